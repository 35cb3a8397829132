// Atomics, relaxed as in MSL.
#pragma once
#include "matrix.h"

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T> struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;

template <class T> inline uint64_t to_bits(T value) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T> inline T from_bits(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T> inline T atomic_apply(const volatile atomic<T>* at, int op, T value) {
  return from_bits<T>(msl_atomic((void*)at, sizeof(T), op, to_bits(value)));
}
template <class T> inline T atomic_load_explicit(const volatile atomic<T>* at, memory_order) {
  return atomic_apply(at, msl::LOAD, T(0));
}
template <class T, class V> inline void atomic_store_explicit(volatile atomic<T>* at, V value, memory_order) {
  atomic_apply(at, msl::STORE, (T)value);
}
#define MSL_ATOMIC(NAME, OP)                                                                 \
  template <class T, class V> inline T NAME(volatile atomic<T>* at, V value, memory_order) { \
    return atomic_apply(at, OP, (T)value);                                                   \
  }
MSL_ATOMIC(atomic_exchange_explicit, msl::EXCHANGE)
MSL_ATOMIC(atomic_fetch_add_explicit, (is_same_v<T, float> ? msl::ADD_FLOAT : msl::ADD))
MSL_ATOMIC(atomic_fetch_sub_explicit, msl::SUB)
MSL_ATOMIC(atomic_fetch_and_explicit, msl::AND)
MSL_ATOMIC(atomic_fetch_or_explicit, msl::OR)
MSL_ATOMIC(atomic_fetch_xor_explicit, msl::XOR)
MSL_ATOMIC(atomic_fetch_min_explicit, (is_signed_v<T> ? msl::MIN_S : msl::MIN_U))
MSL_ATOMIC(atomic_fetch_max_explicit, (is_signed_v<T> ? msl::MAX_S : msl::MAX_U))
template <class T>
inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* at, T* expected, T desired,
                                                  memory_order, memory_order) {
  uint64_t bits = to_bits(*expected);
  const bool done = msl_compare_exchange((void*)at, sizeof(T), &bits, to_bits(desired));
  *expected = from_bits<T>(bits);
  return done;
}

}  // namespace metal
