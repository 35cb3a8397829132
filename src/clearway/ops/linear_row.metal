// out = x weight^T + bias for one row, or a few: time embeddings, modulation, pooled text.
//
// Arguments, in order:
//   0 x       rows of K elements, the elements of a row contiguous
//   1 weight  (N, K), the elements of a row contiguous
//   2 bias    (N,), contiguous; absent: weight again
//   3 out     rows of N elements, the elements of a row contiguous
//   4 shape   int64: K, strides of a row of x, weight and out, has_bias
// Launch: threads [N * 32, rows], group_size [256, 1].
// Names: linear_row_<type>_<1 or 4>; 4 takes four elements at a time: K, the strides and offsets of x and
// weight are multiples of 4.
//
// One simdgroup an output: weight is read once for each row of x, in order. Sums are fp32.
// Source: the definition (torch.nn.functional.linear).
#include <metal_stdlib>
using namespace metal;

struct LinearShape {
  long inputs, x_row, weight_row, out_row, has_bias;
};

template <typename T>
inline float load(device const T* from, float) {
  return float(*from);
}
template <typename T>
inline float4 load(device const T* from, float4) {
  return float4(*(device const vec<T, 4>*)from);
}
inline float across(float value) { return value; }
inline float across(float4 value) { return (value.x + value.y) + (value.z + value.w); }

template <typename T, typename F>
kernel void linear_row(device const T* x [[buffer(0)]], device const T* weight [[buffer(1)]],
                       device const T* bias [[buffer(2)]], device T* out [[buffer(3)]],
                       constant LinearShape& shape [[buffer(4)]], uint2 place [[thread_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint WIDTH = sizeof(F) / sizeof(float);
  const uint inputs = uint(shape.inputs), output = place.x / 32;
  x += long(place.y) * shape.x_row;
  weight += long(output) * shape.weight_row;

  F sum = F(0.0f);
  for (uint i = lane * WIDTH; i < inputs; i += 32 * WIDTH)
    sum += load(x + i, F(0.0f)) * load(weight + i, F(0.0f));
  const float total = simd_sum(across(sum));
  if (lane == 0)
    out[long(place.y) * shape.out_row + output] = T(shape.has_bias ? total + float(bias[output]) : total);
}

#define INSTANCE(T, F, WIDTH)                      \
  template [[host_name("linear_row_" #T "_" #WIDTH)]] \
  [[kernel]] decltype(linear_row<T, F>) linear_row<T, F>;
#define INSTANCES(T)    \
  INSTANCE(T, float, 1) \
  INSTANCE(T, float4, 4)
INSTANCES(half)
INSTANCES(bfloat)
INSTANCES(float)
