// out = (s - mean) / sqrt(variance + eps) * weight + bias over the last axis; s is x, or x + residual rounded
// to the type of x, which is written too where it is asked for.
//
// Arguments, in order:
//   0 x, 1 residual     rows of D elements, the elements of a row contiguous; no residual: x again
//   2 weight, 3 bias    (D,), contiguous, of one type; whatever is absent is bound to the other, or to x
//   4 out, 5 summed     rows of D elements; not asked for: out again
//   6 shape             int64: D, strides of a row of x, residual, out and summed,
//                       has (1 weight + 2 bias + 4 residual + 8 summed)
//   7 eps               float32
// Launch: threads [rows * 32], group_size [256].
// Names: layer_norm_<type>_<type of weight>_<1 or 4>; 4 takes four elements at a time: D and all strides and
// offsets are multiples of 4.
//
// One simdgroup a row, so neither barriers nor threadgroup memory. The variance is that of centred values:
// PyTorch's one-pass one on MPS is wrong for rows of small variance (issue 190491). Sums are fp32.
// Source: Ba, Kiros and Hinton 2016.
#include <metal_stdlib>
using namespace metal;

struct LayerNormShape {
  long width;
  long x, residual, out, summed;
  long has;
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
// Rounded to T, as if it had been stored.
template <typename T>
inline float rounded(float value, T) {
  return float(T(value));
}
template <typename T>
inline float4 rounded(float4 value, T) {
  return float4(vec<T, 4>(value));
}
inline float across(float value) { return value; }
inline float across(float4 value) { return (value.x + value.y) + (value.z + value.w); }

template <typename T, typename W, typename F>
kernel void layer_norm(device const T* x [[buffer(0)]], device const T* residual [[buffer(1)]],
                       device const W* weight [[buffer(2)]], device const W* bias [[buffer(3)]],
                       device T* out [[buffer(4)]], device T* summed [[buffer(5)]],
                       constant LayerNormShape& shape [[buffer(6)]], constant float& eps [[buffer(7)]],
                       uint thread_in_grid [[thread_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint WIDTH = sizeof(F) / sizeof(float), STEP = 32 * WIDTH;
  const uint width = uint(shape.width);
  const long row = thread_in_grid / 32;
  x += row * shape.x;
  residual += row * shape.residual;
  const bool add = (shape.has & 4) != 0;

  F sum = F(0.0f);
  for (uint i = lane * WIDTH; i < width; i += STEP) {
    F value = load(x + i, F(0.0f));
    if (add) value = rounded(value + load(residual + i, F(0.0f)), T(0.0f));
    if (shape.has & 8) store(summed + row * shape.summed + i, value);
    sum += value;
  }
  const float mean = simd_sum(across(sum)) / float(width);

  F squares = F(0.0f);
  for (uint i = lane * WIDTH; i < width; i += STEP) {
    F value = load(x + i, F(0.0f));
    if (add) value = rounded(value + load(residual + i, F(0.0f)), T(0.0f));
    squares += (value - mean) * (value - mean);
  }
  const float factor = precise::rsqrt(simd_sum(across(squares)) / float(width) + eps);

  for (uint i = lane * WIDTH; i < width; i += STEP) {
    F value = load(x + i, F(0.0f));
    if (add) value = rounded(value + load(residual + i, F(0.0f)), T(0.0f));
    value = (value - mean) * factor;
    if (shape.has & 1) value = value * load(weight + i, F(0.0f));
    if (shape.has & 2) value = value + load(bias + i, F(0.0f));
    store(out + row * shape.out + i, value);
  }
}

#define INSTANCE(T, W, F, WIDTH)                                  \
  template [[host_name("layer_norm_" #T "_" #W "_" #WIDTH)]] \
  [[kernel]] decltype(layer_norm<T, W, F>) layer_norm<T, W, F>;
#define INSTANCES(T, W)    \
  INSTANCE(T, W, float, 1) \
  INSTANCE(T, W, float4, 4)
INSTANCES(half, half)
INSTANCES(half, float)
INSTANCES(bfloat, bfloat)
INSTANCES(bfloat, float)
INSTANCES(float, float)
