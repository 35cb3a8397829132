// vec<T, N> with the common swizzles, packed vectors, element-wise operators.
#pragma once
#include "base.h"

namespace metal {

template <class T, int N> struct vec;
template <class T, int N> struct packed_vec;

// A swizzle such as v.zw: a member of vec's union, so it sees all of the vector's elements.
template <class T, int N, int... I> struct swizzle {
  typedef vec<T, (int)sizeof...(I)> Value;
  T d[N];
  operator Value() const { return Value(d[I]...); }
  swizzle& operator=(const Value& v) {
    int k = 0;
    ((d[I] = v[k++]), ...);
    return *this;
  }
  swizzle& operator=(const swizzle& o) { return *this = (Value)o; }
  template <class U> swizzle& operator+=(const U& u) { return *this = (Value)(*this) + u; }
  template <class U> swizzle& operator-=(const U& u) { return *this = (Value)(*this) - u; }
  template <class U> swizzle& operator*=(const U& u) { return *this = (Value)(*this) * u; }
  template <class U> swizzle& operator/=(const U& u) { return *this = (Value)(*this) / u; }
};

// length_of<A>: 0 for a scalar; element_of<A>, vector_of<A> for vectors, packed vectors and swizzles.
template <class A> struct shape {
  static constexpr int length = 0;
  typedef void element;
};
template <class T, int N> struct shape<vec<T, N>> {
  static constexpr int length = N;
  typedef T element;
};
template <class T, int N> struct shape<packed_vec<T, N>> : shape<vec<T, N>> {};
template <class T, int N, int... I> struct shape<swizzle<T, N, I...>> : shape<vec<T, (int)sizeof...(I)>> {};
template <class A> inline constexpr int length_of = shape<decay_t<A>>::length;
template <class A> using element_of = typename shape<decay_t<A>>::element;
template <class A> using vector_of = vec<element_of<A>, length_of<A>>;
template <class A> constexpr int parts() { return length_of<A> ? length_of<A> : 1; }
#define MSL_IF(...) enable_if_t<(__VA_ARGS__), int> = 0

// Vectors are copied whole and as aligned as they promise to be, so that checked mode sees each copy as one
// access of the vector's size and can tell where the address is not a multiple of it.
template <int Bytes> struct whole {
  typedef unsigned __int128 type __attribute__((may_alias));
};
template <> struct whole<2> {
  typedef uint16_t type __attribute__((may_alias));
};
template <> struct whole<4> {
  typedef uint32_t type __attribute__((may_alias));
};
template <> struct whole<8> {
  typedef uint64_t type __attribute__((may_alias));
};
template <class V> inline __attribute__((always_inline)) void copy_whole(V* to, const V* from) {
  typedef typename whole<(sizeof(V) < 16 ? sizeof(V) : 16)>::type Part;
  for (size_t i = 0; i < sizeof(V) / sizeof(Part); i++) ((Part*)to)[i] = ((const Part*)from)[i];
}

#define MSL_VECTOR_MEMBERS(N)                                                                         \
  vec() = default;                                                                                    \
  vec(const vec& o) { copy_whole(this, &o); }                                                         \
  vec& operator=(const vec& o) {                                                                      \
    copy_whole(this, &o);                                                                             \
    return *this;                                                                                     \
  }                                                                                                   \
  template <class S, MSL_IF(is_scalar_v<S>)> vec(S s) {                                               \
    for (int i = 0; i < N; i++) d[i] = (T)s;                                                          \
  }                                                                                                   \
  template <class U> explicit vec(const vec<U, N>& o) {                                               \
    for (int i = 0; i < N; i++) d[i] = (T)o.d[i];                                                     \
  }                                                                                                   \
  template <class U> vec(const packed_vec<U, N>& o) {                                                 \
    for (int i = 0; i < N; i++) d[i] = (T)o.d[i];                                                     \
  }                                                                                                   \
  template <class... A, MSL_IF((sizeof...(A) > 1) && ((parts<A>() + ...) == N))> vec(const A&... a) { \
    int k = 0;                                                                                        \
    (put(k, a), ...);                                                                                 \
  }                                                                                                   \
  template <class A> void put(int& k, const A& a) {                                                   \
    if constexpr (length_of<A> == 0) {                                                                \
      d[k++] = (T)a;                                                                                  \
    } else {                                                                                          \
      vector_of<A> v = a;                                                                             \
      for (int i = 0; i < length_of<A>; i++) d[k++] = (T)v.d[i];                                      \
    }                                                                                                 \
  }                                                                                                   \
  T& operator[](int i) { return d[i]; }                                                               \
  const T& operator[](int i) const { return d[i]; }                                                   \
  template <class U> vec& operator+=(const U& u) { return *this = *this + u; }                        \
  template <class U> vec& operator-=(const U& u) { return *this = *this - u; }                        \
  template <class U> vec& operator*=(const U& u) { return *this = *this * u; }                        \
  template <class U> vec& operator/=(const U& u) { return *this = *this / u; }

template <class T> struct alignas(sizeof(T) * 2) vec<T, 2> {
  template <int... I> using s = swizzle<T, 2, I...>;
  union {
    T d[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    s<0, 0> xx;
    s<0, 1> xy;
    s<1, 0> yx;
    s<1, 1> yy;
  };
  MSL_VECTOR_MEMBERS(2)
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 3> {
  template <int... I> using s = swizzle<T, 3, I...>;
  union {
    T d[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    s<0, 1> xy;
    s<0, 2> xz;
    s<1, 2> yz;
    s<1, 0> yx;
    s<2, 0> zx;
    s<2, 1> zy;
    s<0, 1, 2> xyz;
    s<2, 1, 0> zyx;
  };
  MSL_VECTOR_MEMBERS(3)
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 4> {
  template <int... I> using s = swizzle<T, 4, I...>;
  union {
    T d[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    s<0, 1> xy;
    s<0, 2> xz;
    s<0, 3> xw;
    s<1, 2> yz;
    s<1, 3> yw;
    s<2, 3> zw;
    s<1, 0> yx;
    s<3, 2> wz;
    s<0, 1, 2> xyz;
    s<1, 2, 3> yzw;
    s<2, 1, 0> zyx;
    s<0, 1, 2, 3> xyzw;
    s<3, 2, 1, 0> wzyx;
    s<1, 0, 3, 2> yxwz;
    s<2, 3, 0, 1> zwxy;
  };
  MSL_VECTOR_MEMBERS(4)
};

// The alignment of one element, and no padding.
template <class T, int N> struct packed_vec {
  T d[N];
  packed_vec() = default;
  packed_vec(const vec<T, N>& v) {
    for (int i = 0; i < N; i++) d[i] = v.d[i];
  }
  template <class... A, MSL_IF(sizeof...(A) == N && (N > 1))> packed_vec(A... a) {
    int k = 0;
    ((d[k++] = (T)a), ...);
  }
  T& operator[](int i) { return d[i]; }
  const T& operator[](int i) const { return d[i]; }
};

#define MSL_OPERATOR(OP)                                                                 \
  template <class A, class B, MSL_IF(length_of<A> > 0 || length_of<B> > 0)>              \
  inline auto operator OP(const A& a, const B& b) {                                      \
    if constexpr (length_of<A> > 0 && length_of<B> > 0) {                                \
      static_assert(is_same_v<element_of<A>, element_of<B>>,                             \
                    "MSL: no implicit conversion between vector element types");         \
      vector_of<A> x = a, r;                                                             \
      vector_of<B> y = b;                                                                \
      for (int i = 0; i < length_of<A>; i++) r.d[i] = (element_of<A>)(x.d[i] OP y.d[i]); \
      return r;                                                                          \
    } else if constexpr (length_of<A> > 0) {                                             \
      return a OP vector_of<A>((element_of<A>)b);                                        \
    } else {                                                                             \
      return vector_of<B>((element_of<B>)a) OP b;                                        \
    }                                                                                    \
  }
MSL_OPERATOR(+)
MSL_OPERATOR(-)
MSL_OPERATOR(*)
MSL_OPERATOR(/)
MSL_OPERATOR(%)
MSL_OPERATOR(&)
MSL_OPERATOR(|)
MSL_OPERATOR(^)
MSL_OPERATOR(<<)
MSL_OPERATOR(>>)

#define MSL_COMPARISON(OP)                                                             \
  template <class A, class B, MSL_IF(length_of<A> > 0 || length_of<B> > 0)>            \
  inline auto operator OP(const A& a, const B& b) {                                    \
    constexpr int n = length_of<A> > 0 ? length_of<A> : length_of<B>;                  \
    typedef vec<conditional_t<(length_of<A> > 0), element_of<A>, element_of<B>>, n> V; \
    V x = (V)a, y = (V)b;                                                              \
    vec<bool, n> r;                                                                    \
    for (int i = 0; i < n; i++) r.d[i] = x.d[i] OP y.d[i];                             \
    return r;                                                                          \
  }
MSL_COMPARISON(<)
MSL_COMPARISON(>)
MSL_COMPARISON(<=)
MSL_COMPARISON(>=)
MSL_COMPARISON(==)
MSL_COMPARISON(!=)
MSL_COMPARISON(&&)
MSL_COMPARISON(||)

#define MSL_UNARY(OP)                                                                \
  template <class A, MSL_IF(length_of<A> > 0)> inline auto operator OP(const A& a) { \
    vector_of<A> x = a;                                                              \
    for (int i = 0; i < length_of<A>; i++) x.d[i] = OP x.d[i];                       \
    return x;                                                                        \
  }
MSL_UNARY(-)
MSL_UNARY(~)
template <class A, MSL_IF(length_of<A> > 0)> inline auto operator!(const A& a) {
  vector_of<A> x = a;
  vec<bool, length_of<A>> r;
  for (int i = 0; i < length_of<A>; i++) r.d[i] = !x.d[i];
  return r;
}

}  // namespace metal

#define MSL_VECTOR_NAMES(T)                      \
  typedef metal::vec<T, 2> T##2;                 \
  typedef metal::vec<T, 3> T##3;                 \
  typedef metal::vec<T, 4> T##4;                 \
  typedef metal::packed_vec<T, 2> packed_##T##2; \
  typedef metal::packed_vec<T, 3> packed_##T##3; \
  typedef metal::packed_vec<T, 4> packed_##T##4;
MSL_VECTOR_NAMES(float)
MSL_VECTOR_NAMES(half)
MSL_VECTOR_NAMES(bfloat)
MSL_VECTOR_NAMES(bool)
MSL_VECTOR_NAMES(char)
MSL_VECTOR_NAMES(uchar)
MSL_VECTOR_NAMES(short)
MSL_VECTOR_NAMES(ushort)
MSL_VECTOR_NAMES(int)
MSL_VECTOR_NAMES(uint)
MSL_VECTOR_NAMES(long)
MSL_VECTOR_NAMES(ulong)
using metal::vec;  // the MSL compiler shows it unqualified too
