// One dispatch: its parameters (launch.py fills them), its fibres, its counters.
// Everything is a plain global: a dispatch runs on one operating-system thread, under Python's lock.
#pragma once
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "abi.h"

namespace msl {

// Numbers of faults; report.py puts them into words.
enum FaultKind {
  RACE_THREADGROUP = 1,
  RACE_DEVICE,
  OUT_OF_BOUNDS,
  UNINITIALISED,
  BARRIER_DIVERGENCE,
  MATRIX_DIVERGENCE,
  THREADGROUP_MEMORY,
  ARRAY_INDEX,
  MISALIGNED,
  HOST_TRAP,
};

struct Fault {
  uint32_t kind, group, thread, other;
  int32_t buffer;  // -1: none known, -2: threadgroup memory
  int32_t write;
  uint64_t offset;
  uint64_t address;  // of the instruction in this shared object, 0: none
  uint64_t line;     // of the barrier or collective, 0: none
};

struct Counters {
  uint64_t threads, groups, barriers, simd_ops, matrix_ops, divergent, faults, group_bytes, atomics;
};

struct Buffer {
  char* start;
  uint64_t bytes;
  const uint8_t* inside;  // per byte: part of the tensor's view; nullptr: all of it is
};

struct Params {
  void (*entry)(const Context*);
  uint32_t grid[3], group[3];
  void** arguments;
  const Buffer* buffers;
  int32_t buffer_count;
  int32_t shuffled;
  uint64_t seed;
  int32_t checked;
  int32_t max_faults;
  const uint64_t* group_buffer_bytes;
  int32_t group_buffer_count;
  uint32_t group_limit;
  Fault* faults;
  Counters* counters;
  uint64_t* traffic;  // per buffer: bytes loaded, bytes stored, distinct loaded, distinct stored
};

enum State : uint8_t { READY, AT_BARRIER, AT_COLLECTIVE, DONE };

struct Fibre {
  void* stack_pointer;
  Context context;
  State state;
  Collective fn;
  void* slot;
  uint64_t site;
  int whole, barrier_flags;
  uint32_t simd_epoch;  // simdgroup barriers passed
};

struct Simdgroup {
  uint32_t live, waiting;  // lanes not yet done; lanes in a collective
  std::vector<uint32_t> ready;
  size_t next;
};

struct Variable {
  int id;
  char* start;
  size_t bytes;
};

constexpr size_t STACK_BYTES = 64 * 1024, ARENA_BYTES = 64 * 1024;
constexpr int MEM_DEVICE = 1, MEM_THREADGROUP = 2;  // metal::mem_flags

static Params* P;
static Counters count;
static std::vector<Fibre> fibres;
static std::vector<Simdgroup> simdgroups;
static std::vector<Variable> variables;  // threadgroup variables of the running threadgroup
static std::vector<void*> group_buffers;
static char *stacks, *arena;
static size_t stacks_bytes, arena_used;
static Fibre* current;  // nullptr while the runtime itself works
static uint32_t threads_now, live, at_barrier, group_id;
static uint32_t group_epoch, device_epoch;  // change at every barrier that orders that memory
static uint64_t random_state;
static bool stopped;

static uint64_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

static void fault(FaultKind kind, uint32_t thread, uint32_t other, int buffer, uint64_t offset, bool write,
                  const void* address, uint64_t line) {
  const uint64_t at = address ? (uint64_t)((char*)address - __ehdr_start) : 0;
  static Fault last;
  const bool again = count.faults && last.kind == kind && last.address == at && last.thread == thread &&
                     last.group == group_id && last.line == line && kind != OUT_OF_BOUNDS;
  if (again) return;  // the next byte of the same access
  const uint64_t i = count.faults++;
  last = Fault{kind, group_id, thread, other, buffer, write, offset, at, line};
  if (i < (uint64_t)P->max_faults) P->faults[i] = last;
}

}  // namespace msl
