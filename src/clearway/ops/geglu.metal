// out = value * gelu(gate), x = [value | gate] along the last axis: the feed-forward of the SD transformers.
//
// Arguments, in order:
//   0 x      rows of 2 D elements, the elements of a row contiguous
//   1 out    rows of D elements, the elements of a row contiguous
//   2 shape  int64: D, strides of a row of x and out
// Launch: threads [D / width, rows], group_size [min(256, D / width rounded up to 32s), 1].
// Names: geglu_<type>_<1 or 4>, width the last; 4: D and both strides and offsets are multiples of 4.
//
// gelu(g) = g * cdf(g), the exact one (erf), not the tanh form. MSL has no erf. For g >= 0,
// cdf(-g) = u / 2 * exp(P(u) - g^2 / 2) with u = 1 / (1 + g / sqrt(8)): P is our own least-squares fit at 400
// Chebyshev points up to g = 14. In fp32 the error of the cdf is below 2.4e-6 of it for |g| < 6, that of gelu
// below 4e-7 for |g| < 12 (PyTorch's own: 1.1e-6).
// Source: Shazeer 2020 (GEGLU), Hendrycks and Gimpel 2016 (GELU).
#include <metal_stdlib>
using namespace metal;

struct GegluShape {
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

template <typename F>
inline F gelu(F gate) {
  const F u = 1.0f / (1.0f + 0.353553391f * fabs(gate));
  F p = F(-0.188451256f);
  p = p * u + 0.75412425f;
  p = p * u - 1.0049527f;
  p = p * u + 0.352873231f;
  p = p * u - 0.040865868f;
  p = p * u + 0.39417261f;
  p = p * u + 0.998576941f;
  p = p * u - 1.26547794f;
  const F tail = 0.5f * u * exp(p - 0.5f * gate * gate);
  return gate * select(1.0f - tail, tail, gate < 0.0f);
}

template <typename T, typename F>
kernel void geglu(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                  constant GegluShape& shape [[buffer(2)]], uint2 at [[thread_position_in_grid]]) {
  constexpr uint WIDTH = sizeof(F) / sizeof(float);
  device const T* value = x + long(at.y) * shape.x_row + at.x * WIDTH;
  const F gated = load(value, F(0.0f)) * gelu(load(value + shape.width, F(0.0f)));
  store(out + long(at.y) * shape.out_row + at.x * WIDTH, gated);
}

#define INSTANCE(T, F, WIDTH)                      \
  template [[host_name("geglu_" #T "_" #WIDTH)]] \
  [[kernel]] decltype(geglu<T, F>) geglu<T, F>;
#define INSTANCES(T)    \
  INSTANCE(T, float, 1) \
  INSTANCE(T, float4, 4)
INSTANCES(half)
INSTANCES(bfloat)
INSTANCES(float)
