// Maths: computed in float by the host's libm and rounded once to the type. Not Apple's last bits;
// fast:: and precise:: are the same here.
#pragma once
#include "vector.h"

namespace metal {

namespace host {
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float exp10(float x) { return __builtin_powf(10.f, x); }
inline float fract(float x) { return x - __builtin_floorf(x); }
inline float sign(float x) { return x > 0 ? 1.f : x < 0 ? -1.f : 0.f; }
inline float saturate(float x) { return x < 0 ? 0.f : x > 1 ? 1.f : x; }
}  // namespace host

#define MSL_MATH_1(NAME, FUNCTION)                                                          \
  template <class T, MSL_IF(length_of<T> == 0)> inline auto NAME(T x) {                     \
    return (conditional_t<is_floating_point_v<T>, T, float>)FUNCTION((float)x);             \
  }                                                                                         \
  template <class A, MSL_IF(length_of<A> > 0)> inline auto NAME(const A& a) {               \
    vector_of<A> x = a;                                                                     \
    for (int i = 0; i < length_of<A>; i++) x.d[i] = (element_of<A>)FUNCTION((float)x.d[i]); \
    return x;                                                                               \
  }
#define MSL_MATH_2(NAME, EXPRESSION)                                                                       \
  template <class A, class B, MSL_IF(length_of<A> == 0 && length_of<B> == 0)> inline auto NAME(A a, B b) { \
    typedef conditional_t<is_floating_point_v<B>, B, float> Other;                                         \
    const float x = (float)a, y = (float)b;                                                                \
    return (conditional_t<is_floating_point_v<A>, A, Other>)(EXPRESSION);                                  \
  }                                                                                                        \
  template <class A, class B, MSL_IF(length_of<A> > 0)> inline auto NAME(const A& a, const B& b) {         \
    vector_of<A> p = a, q = (vector_of<A>)b;                                                               \
    for (int i = 0; i < length_of<A>; i++) {                                                               \
      const float x = p.d[i], y = q.d[i];                                                                  \
      p.d[i] = (element_of<A>)(EXPRESSION);                                                                \
    }                                                                                                      \
    return p;                                                                                              \
  }
#define MSL_MATH                                                                                            \
  MSL_MATH_1(exp, __builtin_expf)                                                                           \
  MSL_MATH_1(exp2, __builtin_exp2f)                                                                         \
  MSL_MATH_1(exp10, host::exp10)                                                                            \
  MSL_MATH_1(log, __builtin_logf)                                                                           \
  MSL_MATH_1(log2, __builtin_log2f)                                                                         \
  MSL_MATH_1(log10, __builtin_log10f) MSL_MATH_1(sqrt, __builtin_sqrtf) MSL_MATH_1(rsqrt, host::rsqrt)      \
      MSL_MATH_1(fabs, __builtin_fabsf) MSL_MATH_1(sin, __builtin_sinf) MSL_MATH_1(cos, __builtin_cosf)     \
          MSL_MATH_1(tan, __builtin_tanf) MSL_MATH_1(asin, __builtin_asinf) MSL_MATH_1(                     \
              acos, __builtin_acosf) MSL_MATH_1(atan, __builtin_atanf) MSL_MATH_1(sinh, __builtin_sinhf)    \
              MSL_MATH_1(cosh, __builtin_coshf) MSL_MATH_1(tanh, __builtin_tanhf) MSL_MATH_1(               \
                  floor, __builtin_floorf) MSL_MATH_1(ceil, __builtin_ceilf)                                \
                  MSL_MATH_1(trunc, __builtin_truncf) MSL_MATH_1(rint, __builtin_rintf) MSL_MATH_1(         \
                      round, __builtin_roundf) MSL_MATH_1(fract, host::fract) MSL_MATH_1(sign, host::sign)  \
                      MSL_MATH_1(saturate, host::saturate) MSL_MATH_2(pow, __builtin_powf(x, y))            \
                          MSL_MATH_2(powr, __builtin_powf(x, y)) MSL_MATH_2(atan2, __builtin_atan2f(x, y))  \
                              MSL_MATH_2(fmod, __builtin_fmodf(x, y))                                       \
                                  MSL_MATH_2(copysign, __builtin_copysignf(x, y)) MSL_MATH_2(divide, x / y) \
                                      MSL_MATH_2(fmax, __builtin_fmaxf(x, y))                               \
                                          MSL_MATH_2(fmin, __builtin_fminf(x, y))
MSL_MATH
namespace precise {
MSL_MATH
}
namespace fast {
MSL_MATH
}

template <class T, MSL_IF(length_of<T> == 0)> inline bool isnan(T x) { return __builtin_isnan((float)x); }
template <class T, MSL_IF(length_of<T> == 0)> inline bool isinf(T x) { return __builtin_isinf((float)x); }
template <class T, MSL_IF(length_of<T> == 0)> inline bool isfinite(T x) {
  return __builtin_isfinite((float)x);
}
template <class A, class B> inline bool isunordered(A a, B b) { return a != a || b != b; }
template <class T> inline bool signbit(T x) { return __builtin_signbit((float)x); }

// Of a number and a NaN: the number. A kernel should not depend on it, so -DMSL_NAN_WINS gives the NaN.
#ifdef MSL_NAN_WINS
#define MSL_UNORDERED(X, Y) ((X) != (X) ? (X) : (Y))
#else
#define MSL_UNORDERED(X, Y) ((X) != (X) ? (Y) : (X))
#endif
#define MSL_EXTREME(NAME, CMP)                                                                             \
  template <class A, class B, MSL_IF(length_of<A> == 0 && length_of<B> == 0)> inline auto NAME(A a, B b) { \
    typedef conditional_t<is_same_v<A, B>, A, decltype(true ? a : b)> R;                                   \
    const R x = (R)a, y = (R)b;                                                                            \
    if constexpr (is_floating_point_v<R>) {                                                                \
      if (x != x || y != y) return MSL_UNORDERED(x, y);                                                    \
    }                                                                                                      \
    return x CMP y ? x : y;                                                                                \
  }                                                                                                        \
  template <class A, class B, MSL_IF(length_of<A> > 0 || length_of<B> > 0)>                                \
  inline auto NAME(const A& a, const B& b) {                                                               \
    constexpr int n = length_of<A> > 0 ? length_of<A> : length_of<B>;                                      \
    typedef vec<conditional_t<(length_of<A> > 0), element_of<A>, element_of<B>>, n> V;                     \
    V x = (V)a, y = (V)b;                                                                                  \
    for (int i = 0; i < n; i++) x.d[i] = NAME(x.d[i], y.d[i]);                                             \
    return x;                                                                                              \
  }
MSL_EXTREME(max, >)
MSL_EXTREME(min, <)
template <class T> inline T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T> inline T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T, class L, class H> inline T clamp(T x, L low, H high) {
  return (T)min(max(x, (T)low), (T)high);
}

template <class T, MSL_IF(length_of<T> == 0)> inline T abs(T x) {
  if constexpr (is_unsigned_v<T>) return x;
  else return x < (T)0 ? -x : x;
}
template <class A, MSL_IF(length_of<A> > 0)> inline auto abs(const A& a) {
  vector_of<A> x = a;
  for (int i = 0; i < length_of<A>; i++) x.d[i] = abs(x.d[i]);
  return x;
}
template <class A, class B, class C, MSL_IF(length_of<A> == 0)> inline auto fma(A a, B b, C c) {
  constexpr bool halves = is_same_v<A, half> && is_same_v<B, half> && is_same_v<C, half>;
  return (conditional_t<halves, half, float>)__builtin_fmaf((float)a, (float)b, (float)c);
}
template <class A, MSL_IF(length_of<A> > 0)> inline auto fma(const A& a, const A& b, const A& c) {
  vector_of<A> x = a;
  for (int i = 0; i < length_of<A>; i++)
    x.d[i] = (element_of<A>)__builtin_fmaf((float)a[i], (float)b[i], (float)c[i]);
  return x;
}
template <class A, class B, MSL_IF(length_of<A> > 0)> inline auto dot(const A& a, const B& b) {
  vector_of<A> x = a;
  vector_of<B> y = b;
  element_of<A> sum = x.d[0] * y.d[0];
  for (int i = 1; i < length_of<A>; i++) sum = sum + x.d[i] * y.d[i];
  return sum;
}
template <class A> inline auto length(const A& a) { return sqrt(dot(a, a)); }
template <class A, class B, class C> inline auto mix(const A& a, const B& b, const C& c) {
  return a + (b - a) * c;
}
template <class A, class B> inline auto step(const A& edge, const B& x) { return x < edge ? (B)0 : (B)1; }

template <class T, MSL_IF(length_of<T> == 0)> inline T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N>
inline vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r.d[i] = c.d[i] ? b.d[i] : a.d[i];
  return r;
}
template <int N> inline bool any(const vec<bool, N>& v) {
  for (int i = 0; i < N; i++)
    if (v.d[i]) return true;
  return false;
}
template <int N> inline bool all(const vec<bool, N>& v) { return !any(!v); }

template <class T> inline T popcount(T x) { return (T)__builtin_popcountll((make_unsigned_t<T>)x); }
template <class T> inline T clz(T x) {
  int n = 0;
  while (n < (int)sizeof(T) * 8 && !((make_unsigned_t<T>)x >> (sizeof(T) * 8 - 1 - n) & 1)) n++;
  return (T)n;
}
template <class T> inline T ctz(T x) {
  int n = 0;
  while (n < (int)sizeof(T) * 8 && !((make_unsigned_t<T>)x >> n & 1)) n++;
  return (T)n;
}
inline uint mulhi(uint a, uint b) { return (uint)((uint64_t)a * b >> 32); }

}  // namespace metal
