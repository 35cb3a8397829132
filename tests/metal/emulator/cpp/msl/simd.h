// Barriers and simdgroup functions: the last lane to arrive computes the result for all that take part.
#pragma once
#include "math.h"

// A call site is named by its source line (and column, where the compiler knows it), not by its return
// address: an optimiser may copy a call into two branches, and then lanes of one simdgroup would wait at
// two addresses for one operation. clang's `convergent` forbids the copying as well.
#ifdef __clang__
#define MSL_COLLECTIVE __attribute__((noinline, convergent, no_sanitize("thread", "bounds")))
#define MSL_SITE uint64_t site_ = (uint64_t)__builtin_LINE() << 32 | (uint64_t)__builtin_COLUMN()
#else
#define MSL_COLLECTIVE __attribute__((noinline, no_sanitize("thread", "bounds")))
#define MSL_SITE uint64_t site_ = (uint64_t)__builtin_LINE() << 32
#endif
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "bounds")))

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
MSL_COLLECTIVE inline void threadgroup_barrier(mem_flags flags, MSL_SITE) { msl_barrier((int)flags, site_); }
MSL_COLLECTIVE inline void simdgroup_barrier(mem_flags, MSL_SITE) {
  msl_collective(nullptr, nullptr, site_, 0);
}

template <class T> struct Lane {
  T in, out, fill;
  int argument, modulo;
};
#define MSL_LANES(I)           \
  for (int I = 0; I < 32; I++) \
    if (mask >> I & 1)

// Reductions as a fixed tree over the active lanes. The hardware's order is not specified.
#define MSL_REDUCTION(NAME, COMBINE)                                            \
  template <class T> MSL_UNCHECKED void NAME##_lanes(void** slots, uint mask) { \
    T v[32];                                                                    \
    int n = 0;                                                                  \
    MSL_LANES(i) v[n++] = ((Lane<T>*)slots[i])->in;                             \
    for (int h; n > 1; n = h) {                                                 \
      h = (n + 1) / 2;                                                          \
      for (int i = 0; i + h < n; i++) {                                         \
        const T a = v[i], b = v[i + h];                                         \
        v[i] = (T)(COMBINE);                                                    \
      }                                                                         \
    }                                                                           \
    MSL_LANES(i)((Lane<T>*)slots[i])->out = v[0];                               \
  }                                                                             \
  template <class T> MSL_COLLECTIVE T NAME(T x, MSL_SITE) {                     \
    Lane<T> lane;                                                               \
    lane.in = x;                                                                \
    msl_collective(&NAME##_lanes<T>, &lane, site_, 0);                          \
    return lane.out;                                                            \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_and, a& b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)

// SOURCE: the lane read from, in terms of this lane i and the argument a. An inactive one gives one's own.
#define MSL_SHUFFLE(NAME, SOURCE)                                               \
  template <class T> MSL_UNCHECKED void NAME##_lanes(void** slots, uint mask) { \
    MSL_LANES(i) {                                                              \
      Lane<T>* lane = (Lane<T>*)slots[i];                                       \
      const int a = lane->argument, from = (SOURCE);                            \
      const bool active = from >= 0 && from < 32 && (mask >> from & 1);         \
      lane->out = active ? ((Lane<T>*)slots[from])->in : lane->in;              \
      (void)a;                                                                  \
    }                                                                           \
  }                                                                             \
  template <class T> MSL_COLLECTIVE T NAME(T x, ushort argument, MSL_SITE) {    \
    Lane<T> lane;                                                               \
    lane.in = x;                                                                \
    lane.argument = argument;                                                   \
    msl_collective(&NAME##_lanes<T>, &lane, site_, 0);                          \
    return lane.out;                                                            \
  }
MSL_SHUFFLE(simd_shuffle, a)
MSL_SHUFFLE(simd_broadcast, a)
MSL_SHUFFLE(simd_shuffle_xor, i ^ a)
MSL_SHUFFLE(simd_shuffle_up, i - a)
MSL_SHUFFLE(simd_shuffle_down, i + a)
MSL_SHUFFLE(simd_shuffle_rotate_up, (i - a) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_down, (i + a) & 31)
MSL_SHUFFLE(quad_shuffle, (i & ~3) | (a & 3))
MSL_SHUFFLE(quad_broadcast, (i & ~3) | (a & 3))
MSL_SHUFFLE(quad_shuffle_xor, (i & ~3) | ((i ^ a) & 3))

// Within blocks of `modulo` lanes: k is the place in the block, from the place read; past the block, FILL's.
#define MSL_SHUFFLE_FILL(NAME, SOURCE, FILL)                                                             \
  template <class T> MSL_UNCHECKED void NAME##_lanes(void** slots, uint mask) {                          \
    MSL_LANES(i) {                                                                                       \
      Lane<T>* lane = (Lane<T>*)slots[i];                                                                \
      const int m = lane->modulo, a = lane->argument, block = i / m * m, k = i % m, from = (SOURCE);     \
      const bool inside = from >= 0 && from < m;                                                         \
      const int other = block + (inside ? from : (FILL));                                                \
      const Lane<T>* source = mask >> other & 1 ? (Lane<T>*)slots[other] : lane;                         \
      lane->out = inside ? source->in : source->fill;                                                    \
    }                                                                                                    \
  }                                                                                                      \
  template <class T> MSL_COLLECTIVE T NAME(T x, T fill, ushort argument, ushort modulo = 32, MSL_SITE) { \
    Lane<T> lane;                                                                                        \
    lane.in = x;                                                                                         \
    lane.fill = fill;                                                                                    \
    lane.argument = argument;                                                                            \
    lane.modulo = modulo;                                                                                \
    msl_collective(&NAME##_lanes<T>, &lane, site_, 0);                                                   \
    return lane.out;                                                                                     \
  }
MSL_SHUFFLE_FILL(simd_shuffle_and_fill_down, k + a, k + a - m)
MSL_SHUFFLE_FILL(simd_shuffle_and_fill_up, k - a, m + k - a)

#define MSL_SCAN(NAME, INITIAL, COMBINE, INCLUSIVE)                             \
  template <class T> MSL_UNCHECKED void NAME##_lanes(void** slots, uint mask) { \
    T a = (T)(INITIAL);                                                         \
    MSL_LANES(i) {                                                              \
      Lane<T>* lane = (Lane<T>*)slots[i];                                       \
      const T b = lane->in, next = (T)(COMBINE);                                \
      lane->out = INCLUSIVE ? next : a;                                         \
      a = next;                                                                 \
    }                                                                           \
  }                                                                             \
  template <class T> MSL_COLLECTIVE T NAME(T x, MSL_SITE) {                     \
    Lane<T> lane;                                                               \
    lane.in = x;                                                                \
    msl_collective(&NAME##_lanes<T>, &lane, site_, 0);                          \
    return lane.out;                                                            \
  }
MSL_SCAN(simd_prefix_inclusive_sum, 0, a + b, true)
MSL_SCAN(simd_prefix_exclusive_sum, 0, a + b, false)
MSL_SCAN(simd_prefix_inclusive_product, 1, a* b, true)
MSL_SCAN(simd_prefix_exclusive_product, 1, a* b, false)

template <class T> inline T quad_sum(T x) {
  x = x + quad_shuffle_xor(x, 1);
  return x + quad_shuffle_xor(x, 2);
}
template <class T> inline T quad_max(T x) {
  x = max(x, quad_shuffle_xor(x, 1));
  return max(x, quad_shuffle_xor(x, 2));
}

template <class T> MSL_UNCHECKED void simd_broadcast_first_lanes(void** slots, uint mask) {
  MSL_LANES(i)((Lane<T>*)slots[i])->out = ((Lane<T>*)slots[__builtin_ctz(mask)])->in;
}
template <class T> MSL_COLLECTIVE T simd_broadcast_first(T x, MSL_SITE) {
  Lane<T> lane;
  lane.in = x;
  msl_collective(&simd_broadcast_first_lanes<T>, &lane, site_, 0);
  return lane.out;
}

// Votes: out = the lanes that said yes, fill = the lanes that were asked.
MSL_UNCHECKED inline void vote_lanes(void** slots, uint mask) {
  uint yes = 0;
  MSL_LANES(i) yes |= ((Lane<uint>*)slots[i])->in << i;
  MSL_LANES(i)((Lane<uint>*)slots[i])->out = yes;
  MSL_LANES(i)((Lane<uint>*)slots[i])->fill = mask;
}
struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit operator vote_t() const { return votes; }
  bool all() const { return votes == 0xffffffffu; }
  bool any() const { return votes != 0; }
};
#define MSL_VOTE(TYPE, NAME, RESULT)                  \
  MSL_COLLECTIVE inline TYPE NAME(bool x, MSL_SITE) { \
    Lane<uint> lane;                                  \
    lane.in = x;                                      \
    msl_collective(&vote_lanes, &lane, site_, 0);     \
    return RESULT;                                    \
  }
MSL_VOTE(simd_vote, simd_ballot, simd_vote{lane.out})
MSL_VOTE(bool, simd_all, lane.out == lane.fill)
MSL_VOTE(bool, simd_any, lane.out != 0)

}  // namespace metal
