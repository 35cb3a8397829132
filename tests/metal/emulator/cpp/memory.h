// Threadgroup variables and atomics.
#pragma once
#include "checker.h"

extern "C" void* msl_threadgroup_variable(int id, size_t bytes, size_t align, int zeroed) {
  using namespace msl;
  for (const Variable& v : variables)
    if (v.id == id) return v.start;
  const size_t offset = (arena_used + align - 1) / align * align;
  if (offset + bytes > P->group_limit) {
    fault(THREADGROUP_MEMORY, 0, 0, -2, offset + bytes, true, nullptr, 0);
    stopped = true;
    leave();  // never entered again
  }
  arena_used = offset + bytes;
  if (arena_used > count.group_bytes) count.group_bytes = arena_used;
  memset(arena + offset, zeroed ? 0 : 0xFF, bytes);  // all ones is a NaN in every float format
  if (zeroed && P->checked)
    for (size_t i = 0; i < bytes; i++) group_cells[offset + i].initialised = true;
  variables.push_back({id, arena + offset, bytes});
  return arena + offset;
}

namespace msl {

template <class U, class S> static U combine(int op, U old, U value) {
  switch (op) {
    case ADD: return old + value;
    case SUB: return old - value;
    case AND: return old & value;
    case OR: return old | value;
    case XOR: return old ^ value;
    case MIN_S: return (S)old < (S)value ? old : value;
    case MAX_S: return (S)old > (S)value ? old : value;
    case MIN_U: return old < value ? old : value;
    case MAX_U: return old > value ? old : value;
    default: return value;  // STORE, EXCHANGE
  }
}

// One thread runs at a time, so a plain read, change and write is atomic here.
template <class U, class S> static uint64_t read_modify_write(void* at, int op, uint64_t value) {
  U old, next;
  memcpy(&old, at, sizeof old);
  if (op == LOAD) return old;
  next = combine<U, S>(op, old, (U)value);
  if constexpr (sizeof(U) == sizeof(float)) {
    if (op == ADD_FLOAT) {
      float a, b;
      memcpy(&a, &old, 4), memcpy(&b, &value, 4);
      a += b;
      memcpy(&next, &a, 4);
    }
  }
  memcpy(at, &next, sizeof next);
  return old;
}

}  // namespace msl

extern "C" uint64_t msl_atomic(void* at, int bytes, int op, uint64_t value) {
  using namespace msl;
  count.atomics++;
  check(at, bytes, op != LOAD, true, __builtin_return_address(0));
  if (bytes == 8) return read_modify_write<uint64_t, int64_t>(at, op, value);
  if (bytes == 4) return read_modify_write<uint32_t, int32_t>(at, op, value);
  return read_modify_write<uint8_t, int8_t>(at, op, value);
}

extern "C" int msl_compare_exchange(void* at, int bytes, uint64_t* expected, uint64_t desired) {
  using namespace msl;
  count.atomics++;
  check(at, bytes, true, true, __builtin_return_address(0));
  uint64_t old = 0;
  memcpy(&old, at, bytes);
  const bool same = old == *expected;
  if (same) memcpy(at, &desired, bytes);
  *expected = old;
  return same;
}
