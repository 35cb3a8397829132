// simdgroup_matrix: 8x8 only, as the hardware path has it. Each lane holds two neighbours of one row.
#pragma once
#include "simd.h"

namespace metal {

// Lane -> row and first of its two columns. Apple documents no layout; MLX and PyTorch rely on this one.
struct Place {
  int row, column;
  MSL_UNCHECKED explicit Place(uint lane) {
    const int quad = (int)lane / 4;
    row = (quad & 4) + (int)lane / 2 % 4;
    column = (quad & 2) * 2 + (int)lane % 2 * 2;
  }
};

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "only 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const Place at(msl_context()->lane);
    elements = vec<T, 2>(at.row == at.column ? diagonal : (T)0, at.row == at.column + 1 ? diagonal : (T)0);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows = Columns>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements = vec<T, 2>(value, value);
  return m;
}

inline ulong matrix_index(int k, ulong stride, const vec<ulong, 2>& origin, bool transposed) {
  const Place at(msl_context()->lane);
  return transposed ? (origin.y + at.column + k) * stride + origin.x + at.row
                    : (origin.y + at.row) * stride + origin.x + at.column + k;
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* from, ulong stride = 8,
                           vec<ulong, 2> origin = vec<ulong, 2>(0), bool transposed = false) {
  for (int k = 0; k < 2; k++) m.elements.d[k] = from[matrix_index(k, stride, origin, transposed)];
}
template <class T>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* to, ulong stride = 8,
                            vec<ulong, 2> origin = vec<ulong, 2>(0), bool transposed = false) {
  for (int k = 0; k < 2; k++) to[matrix_index(k, stride, origin, transposed)] = m.elements.d[k];
}

template <class D, class A, class B, class C> struct MultiplyLane {
  vec<D, 2>* d;
  vec<A, 2> a;
  vec<B, 2> b;
  vec<C, 2> c;
};
// d = a b + c, sums over k in order in float. The hardware's order and inner width are not documented.
template <class D, class A, class B, class C> MSL_UNCHECKED void multiply_lanes(void** slots, uint) {
  typedef MultiplyLane<D, A, B, C> L;
  alignas(32) float a[64], b[64], c[64];
  for (int lane = 0; lane < 32; lane++) {
    const L& l = *(L*)slots[lane];
    const Place at(lane);
    for (int k = 0, i = at.row * 8 + at.column; k < 2; k++, i++)
      a[i] = (float)l.a.d[k], b[i] = (float)l.b.d[k], c[i] = (float)l.c.d[k];
  }
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 8; k++)
      for (int j = 0; j < 8; j++) c[i * 8 + j] += a[i * 8 + k] * b[k * 8 + j];
  for (int lane = 0; lane < 32; lane++) {
    const Place at(lane);
    for (int k = 0; k < 2; k++) ((L*)slots[lane])->d->d[k] = (D)c[at.row * 8 + at.column + k];
  }
}
template <class D, class A, class B, class C>
MSL_COLLECTIVE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                  const simdgroup_matrix<A, 8, 8>& a,
                                                  const simdgroup_matrix<B, 8, 8>& b,
                                                  const simdgroup_matrix<C, 8, 8>& c, MSL_SITE) {
  MultiplyLane<D, A, B, C> lane{&d.elements, a.elements, b.elements, c.elements};
  msl_collective(&multiply_lanes<D, A, B, C>, &lane, site_, 1);
}
template <class D, class A, class B>
MSL_COLLECTIVE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                       const simdgroup_matrix<B, 8, 8>& b, MSL_SITE) {
  MultiplyLane<D, A, B, D> lane{&d.elements, a.elements, b.elements, vec<D, 2>(0)};
  msl_collective(&multiply_lanes<D, A, B, D>, &lane, site_, 1);
}

}  // namespace metal
