// out = silu((x - mean) / sqrt(variance + eps) * weight + bias), mean and variance over a group of channels.
//
// Arguments, in order:
//   0 x              (B, C, S) by strides: S the elements of a channel at one common stride
//   1 weight, 2 bias (C,), contiguous, of one type; whatever is absent is bound to the other, or to x
//   3 out            as x, with strides of its own
//   4 shape          int64: groups, channels of a group, S, strides of x and out (B, C, S each),
//                    channels_inner (1: neighbours in memory are channels), has (1 weight + 2 bias)
//   5 eps            float32
// Launch: threads [B * groups * 256], group_size [256].
// Names: group_norm_silu_<type>_<type of weight>_<1 or 4>; 4 takes four elements at a time: the inner stride
// of x and out is 1, the inner length and all other strides and offsets are multiples of 4.
//
// One threadgroup a batch and group, one dispatch. The variance is that of centred values, in a second pass:
// E[x^2] - E[x]^2 loses its digits where |mean| >> std. So x is read three times, the last two from cache for
// groups that fit, and out is written once. Sums are fp32.
// Source: Wu and He 2018.
#include <metal_stdlib>
using namespace metal;

struct GroupNormShape {
  long groups, channels, size;
  long x[3], out[3];
  long channels_inner, has;
};

constant constexpr uint THREADS = 256, SIMDGROUPS = THREADS / 32;

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

// The parameters of the channel at `from`, or of four neighbours.
template <typename W>
inline float parameter(device const W* from, bool, float) {
  return float(*from);
}
template <typename W>
inline float4 parameter(device const W* from, bool neighbours, float4 kind) {
  return neighbours ? load(from, kind) : float4(float(*from));
}

inline float sum_of_threads(float value, threadgroup float* partial, uint lane, uint simd_index) {
  value = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // `partial` may still be read from the sum before
  if (lane == 0) partial[simd_index] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < SIMDGROUPS ? partial[lane] : 0.0f);
}

// Where a thread is in (outer, inner), in steps of THREADS * width elements without a division each.
struct Walk {
  uint inner, outer_at, inner_at, outer_step, inner_step;
  Walk(uint inner_length, uint tid, uint width)
      : inner(inner_length),
        outer_at(tid * width / inner_length),
        inner_at(tid * width % inner_length),
        outer_step(THREADS * width / inner_length),
        inner_step(THREADS * width % inner_length) {}
  void next() {
    outer_at += outer_step;
    inner_at += inner_step;
    if (inner_at >= inner) {
      inner_at -= inner;
      outer_at++;
    }
  }
};

template <typename T, typename W, typename F>
kernel void group_norm_silu(device const T* x [[buffer(0)]], device const W* weight [[buffer(1)]],
                            device const W* bias [[buffer(2)]], device T* out [[buffer(3)]],
                            constant GroupNormShape& shape [[buffer(4)]], constant float& eps [[buffer(5)]],
                            uint group [[threadgroup_position_in_grid]],
                            uint tid [[thread_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[SIMDGROUPS];
  constexpr uint WIDTH = sizeof(F) / sizeof(float);
  const bool inner_is_channel = shape.channels_inner != 0;
  const uint channels = uint(shape.channels), size = uint(shape.size);
  const uint inner = inner_is_channel ? channels : size, outer = inner_is_channel ? size : channels;
  const uint x_outer = uint(inner_is_channel ? shape.x[2] : shape.x[1]);
  const uint x_inner = uint(inner_is_channel ? shape.x[1] : shape.x[2]);
  const uint out_outer = uint(inner_is_channel ? shape.out[2] : shape.out[1]);
  const uint out_inner = uint(inner_is_channel ? shape.out[1] : shape.out[2]);
  const long batch = long(group) / shape.groups, first_channel = long(group) % shape.groups * shape.channels;
  x += batch * shape.x[0] + first_channel * shape.x[1];
  out += batch * shape.out[0] + first_channel * shape.out[1];
  const float count = float(channels) * float(size);

  F sum = F(0.0f);
  for (Walk at(inner, tid, WIDTH); at.outer_at < outer; at.next())
    sum += load(x + at.outer_at * x_outer + at.inner_at * x_inner, F(0.0f));
  const float mean = sum_of_threads(across(sum), partial, lane, simd_index) / count;

  F squares = F(0.0f);
  for (Walk at(inner, tid, WIDTH); at.outer_at < outer; at.next()) {
    const F centred = load(x + at.outer_at * x_outer + at.inner_at * x_inner, F(0.0f)) - mean;
    squares += centred * centred;
  }
  const float variance = sum_of_threads(across(squares), partial, lane, simd_index) / count;
  const float factor = precise::rsqrt(variance + eps);

  for (Walk at(inner, tid, WIDTH); at.outer_at < outer; at.next()) {
    const long channel = first_channel + (inner_is_channel ? at.inner_at : at.outer_at);
    F value = (load(x + at.outer_at * x_outer + at.inner_at * x_inner, F(0.0f)) - mean) * factor;
    if (shape.has & 1) value = value * parameter(weight + channel, inner_is_channel, F(0.0f));
    if (shape.has & 2) value = value + parameter(bias + channel, inner_is_channel, F(0.0f));
    store(out + at.outer_at * out_outer + at.inner_at * out_inner, value / (1.0f + exp(-value)));
  }
}

#define INSTANCE(T, W, F, WIDTH)                                  \
  template [[host_name("group_norm_silu_" #T "_" #W "_" #WIDTH)]] \
  [[kernel]] decltype(group_norm_silu<T, W, F>) group_norm_silu<T, W, F>;
#define INSTANCES(T, W)    \
  INSTANCE(T, W, float, 1) \
  INSTANCE(T, W, float4, 4)
INSTANCES(half, half)
INSTANCES(half, float)
INSTANCES(bfloat, bfloat)
INSTANCES(bfloat, float)
INSTANCES(float, float)
