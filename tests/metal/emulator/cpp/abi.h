// What kernels (through the stand-in Metal headers) and the runtime say to each other.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace msl {

struct Uint3 {
  uint32_t x, y, z;
};

// What one thread knows about itself, and the tables that its buffer arguments come from.
struct Context {
  Uint3 position_in_grid, position_in_group, group_in_grid;
  Uint3 group_size, dispatched_group_size, grid_size, groups_in_grid;
  uint32_t lane, simdgroup, index_in_group, simdgroups;
  void* const* buffers;
  void* const* group_buffers;
};

// Computes a collective for the lanes of `mask`; slots[lane] is what that lane brought.
typedef void (*Collective)(void** slots, uint32_t mask);

enum AtomicOp { LOAD, STORE, EXCHANGE, ADD, SUB, AND, OR, XOR, MIN_S, MAX_S, MIN_U, MAX_U, ADD_FLOAT };

}  // namespace msl

extern "C" {
const msl::Context* msl_context(void);
void msl_barrier(int flags, uint64_t site);
// fn == nullptr: a simdgroup barrier. whole: every lane of the simdgroup must take part.
void msl_collective(msl::Collective fn, void* slot, uint64_t site, int whole);
void* msl_threadgroup_variable(int id, size_t bytes, size_t align, int zeroed);
uint64_t msl_atomic(void* at, int bytes, int op, uint64_t value);
int msl_compare_exchange(void* at, int bytes, uint64_t* expected, uint64_t desired);
}
