// out = exp(x - max) / sum over the last axis, rows of any width.
//
// Arguments, in order:
//   0 x      rows of D elements, the elements of a row contiguous
//   1 out    as x
//   2 shape  int64: D, strides of a row of x and out
// Launch: threads [rows * group], group_size [group], group = min(256, D rounded up to 32s).
// Names: softmax_<type>_<1 or 4>; 4 takes four elements at a time: D, strides and offsets are multiples of 4.
//
// One threadgroup a row. Each thread keeps the maximum of what it has seen and the sum relative to it; those
// are merged over the simdgroup, then over the threadgroup: x is read twice. fp32 inside.
// Source: Milakov and Gimelshein 2018.
#include <metal_stdlib>
using namespace metal;

struct SoftmaxShape {
  long width, x_row, out_row;
};

template <typename T>
inline float load(device const T* from, float) {
  return float(*from);
}
template <typename T>
inline float4 load(device const T* from, float4) {
  return float4(*(device const vec<T, 4>*)from);
}
template <typename T>
inline void store(device T* to, float value) {
  *to = T(value);
}
template <typename T>
inline void store(device T* to, float4 value) {
  *(device vec<T, 4>*)to = vec<T, 4>(value);
}
inline float across(float value) { return value; }
inline float across(float4 value) { return (value.x + value.y) + (value.z + value.w); }
inline float highest_of(float value) { return value; }
inline float highest_of(float4 value) { return max(max(value.x, value.y), max(value.z, value.w)); }
// What exponents are relative to. -inf - -inf would be NaN where the row may still have numbers elsewhere.
inline float base_of(float highest) { return highest == -INFINITY ? 0.0f : highest; }

template <typename T, typename F>
kernel void softmax(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                    constant SoftmaxShape& shape [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                    uint tid [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint simd_index [[simdgroup_index_in_threadgroup]],
                    uint simd_count [[simdgroups_per_threadgroup]]) {
  threadgroup float highest_of_simdgroup[8], sum_of_simdgroup[8];
  constexpr uint WIDTH = sizeof(F) / sizeof(float);
  const uint width = uint(shape.width), step = threads * WIDTH;
  x += long(row) * shape.x_row;
  out += long(row) * shape.out_row;

  float highest = -INFINITY, sum = 0.0f;
  for (uint i = tid * WIDTH; i < width; i += step) {
    const F value = load(x + i, F(0.0f));
    const float now = max(highest, highest_of(value)), base = base_of(now);
    sum = sum * exp(highest - base) + across(exp(value - base));
    highest = now;
  }
  float all = simd_max(highest);
  sum = simd_sum(sum * exp(highest - base_of(all)));
  if (lane == 0) {
    highest_of_simdgroup[simd_index] = all;
    sum_of_simdgroup[simd_index] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  highest = lane < simd_count ? highest_of_simdgroup[lane] : -INFINITY;
  sum = lane < simd_count ? sum_of_simdgroup[lane] : 0.0f;
  all = simd_max(highest);
  const float base = base_of(all);
  const float factor = 1.0f / simd_sum(sum * exp(highest - base));

  for (uint i = tid * WIDTH; i < width; i += step) store(out + i, exp(load(x + i, F(0.0f)) - base) * factor);
}

#define INSTANCE(T, F, WIDTH)                      \
  template [[host_name("softmax_" #T "_" #WIDTH)]] \
  [[kernel]] decltype(softmax<T, F>) softmax<T, F>;
#define INSTANCES(T)    \
  INSTANCE(T, float, 1) \
  INSTANCE(T, float4, 4)
INSTANCES(half)
INSTANCES(bfloat)
INSTANCES(float)
