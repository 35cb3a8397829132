// Checked mode: every load and store of a kernel, through the call-outs of -fsanitize=thread.
// No sanitizer runtime is linked; the __tsan_* and __ubsan_* functions are these.
#pragma once
#include "fibre.h"

namespace msl {

struct Access {
  uint32_t group, epoch, simd_epoch;
  uint16_t thread;
  uint8_t kind;  // 0 none, 1 plain, 2 atomic
  uint8_t many;  // readers in this epoch: 0 one, 1 several lanes of one simdgroup, 2 several simdgroups
};

// What is remembered of one byte: its last writer and last reader. Precise for those, not a full history.
struct Cell {
  Access write, read;
  bool told_race, told_uninitialised, read_by_groups, initialised;
};

static std::vector<Cell> group_cells;
static std::vector<std::vector<Cell>> device_cells;

// Is `past` separated from what `now` does by a barrier (or is it the same thread's)?
static bool ordered(const Access& past, uint32_t epoch, const Fibre& now) {
  if (past.epoch != epoch || past.thread == now.context.index_in_group) return true;
  return past.thread / 32 == now.context.simdgroup && past.simd_epoch != now.simd_epoch;
}

static bool read_conflicts(const Access& read, uint32_t epoch, const Fibre& now) {
  if (read.epoch != epoch) return false;
  if (read.many == 2) return true;
  if (read.many == 1) return read.thread / 32 != now.context.simdgroup || read.simd_epoch == now.simd_epoch;
  return !ordered(read, epoch, now);
}

static void touch(Cell& cell, bool write, bool atomic, bool device, int buffer, uint64_t offset,
                  const void* address) {
  const Fibre& f = *current;
  const uint32_t epoch = device ? device_epoch : group_epoch, group = device ? group_id : 0;
  const uint32_t thread = f.context.index_in_group;
  if (!device && !write && !cell.write.kind && !cell.initialised && !cell.told_uninitialised) {
    cell.told_uninitialised = true;
    fault(UNINITIALISED, thread, thread, buffer, offset, false, address, 0);
  }
  bool race = false;
  uint32_t other = 0xffff;  // a thread of another threadgroup
  if (cell.write.kind && !(atomic && cell.write.kind == 2)) {
    race = device && cell.write.group != group;
    if (!race && !ordered(cell.write, epoch, f)) race = true, other = cell.write.thread;
  }
  if (!race && write && cell.read.kind && !(atomic && cell.read.kind == 2)) {
    race = device && (cell.read.group != group || cell.read_by_groups);
    if (!race && read_conflicts(cell.read, epoch, f)) race = true, other = cell.read.thread;
  }
  if (race && !cell.told_race) {
    cell.told_race = true;
    fault(device ? RACE_DEVICE : RACE_THREADGROUP, thread, other, buffer, offset, write, address, 0);
  }
  Access now{group, epoch, f.simd_epoch, (uint16_t)thread, (uint8_t)(atomic ? 2 : 1), 0};
  if (write) {
    cell.write = now;
    return;
  }
  const Access& read = cell.read;
  if (read.kind && device && read.group != group) cell.read_by_groups = true;
  if (read.kind && read.group == group && read.epoch == epoch) {
    const bool together = read.thread / 32 == thread / 32;
    if (!together || read.many == 2) now.many = 2;
    else if (read.simd_epoch == f.simd_epoch && (read.many || read.thread != thread)) now.many = 1;
  }
  cell.read = now;
}

static bool within(const void* p, const void* start, size_t bytes) {
  return (const char*)p >= (const char*)start && (const char*)p < (const char*)start + bytes;
}

static void check(void* at, int bytes, bool write, bool atomic, const void* address) {
  if (!current || !P->checked) return;
  char* p = (char*)at;
  if (within(p, stacks, stacks_bytes)) return;
  if (within(p, fibres.data(), fibres.size() * sizeof(Fibre))) return;  // the thread's own context
  if (within(p, P->arguments, P->buffer_count * sizeof(void*))) return;
  if (within(p, group_buffers.data(), group_buffers.size() * sizeof(void*))) return;
  const uint32_t thread = current->context.index_in_group;
  if (within(p, arena, ARENA_BYTES)) {
    const uint64_t offset = (uint64_t)(p - arena);
    bool inside = false;
    for (const Variable& v : variables)
      if (p >= v.start && p + bytes <= v.start + v.bytes) inside = true;
    if (!inside) return fault(OUT_OF_BOUNDS, thread, 0, -2, offset, write, address, 0);
    for (int i = 0; i < bytes; i++)
      touch(group_cells[offset + i], write, atomic, false, -2, offset + i, address);
    return;
  }
  for (int b = 0; b < P->buffer_count; b++) {
    const Buffer& buffer = P->buffers[b];
    if (!buffer.start || !within(p, buffer.start, buffer.bytes) || p + bytes > buffer.start + buffer.bytes)
      continue;
    const uint64_t offset = (uint64_t)(p - buffer.start);
    if (buffer.inside && !buffer.inside[offset])
      return fault(OUT_OF_BOUNDS, thread, 0, b, offset, write, address, 0);
    P->traffic[b * 4 + (write ? 1 : 0)] += bytes;
    for (int i = 0; i < bytes; i++)
      touch(device_cells[b][offset + i], write, atomic, true, b, offset + i, address);
    return;
  }
  if (within(p, __ehdr_start, (size_t)(_end - __ehdr_start))) return;  // constants of the program
  fault(OUT_OF_BOUNDS, thread, 0, -1, (uint64_t)p, write, address, 0);
}

static void check_aligned(void* at, int bytes, bool write, const void* address) {
  if (current && P->checked && (uintptr_t)at % bytes)
    fault(MISALIGNED, current->context.index_in_group, 0, -1, (uintptr_t)at % bytes, write, address, 0);
  check(at, bytes, write, false, address);
}

static void start_checking() {
  device_cells.assign(P->buffer_count, {});
  group_cells.assign(P->checked ? ARENA_BYTES : 0, Cell{});
  if (P->checked)
    for (int b = 0; b < P->buffer_count; b++) device_cells[b].resize(P->buffers[b].bytes);
}

static void finish_checking() {
  for (size_t b = 0; b < device_cells.size(); b++)
    for (const Cell& cell : device_cells[b]) {
      P->traffic[b * 4 + 2] += cell.read.kind != 0;
      P->traffic[b * 4 + 3] += cell.write.kind != 0;
    }
  device_cells.clear();
}

}  // namespace msl

#define MSL_CALLER __builtin_return_address(0)
#define MSL_CALL_OUTS(N)                                                                    \
  void __tsan_read##N(void* a) { msl::check_aligned(a, N, false, MSL_CALLER); }             \
  void __tsan_write##N(void* a) { msl::check_aligned(a, N, true, MSL_CALLER); }             \
  void __tsan_unaligned_read##N(void* a) { msl::check(a, N, false, false, MSL_CALLER); }    \
  void __tsan_unaligned_write##N(void* a) { msl::check(a, N, true, false, MSL_CALLER); }    \
  void __tsan_read_write##N(void* a) {                                                      \
    msl::check_aligned(a, N, false, MSL_CALLER), msl::check(a, N, true, false, MSL_CALLER); \
  }                                                                                         \
  void __tsan_unaligned_read_write##N(void* a) {                                            \
    msl::check(a, N, false, false, MSL_CALLER), msl::check(a, N, true, false, MSL_CALLER);  \
  }

extern "C" {
MSL_CALL_OUTS(1)
MSL_CALL_OUTS(2)
MSL_CALL_OUTS(4)
MSL_CALL_OUTS(8)
MSL_CALL_OUTS(16)
void __tsan_init(void) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* a, unsigned long n) { msl::check(a, (int)n, false, false, MSL_CALLER); }
void __tsan_write_range(void* a, unsigned long n) { msl::check(a, (int)n, true, false, MSL_CALLER); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  msl::check((void*)from, (int)n, false, false, MSL_CALLER);
  msl::check(to, (int)n, true, false, MSL_CALLER);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  msl::check((void*)from, (int)n, false, false, MSL_CALLER);
  msl::check(to, (int)n, true, false, MSL_CALLER);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int c, size_t n) {
  msl::check(to, (int)n, true, false, MSL_CALLER);
  return memset(to, c, n);
}
// -fsanitize=bounds: report, and leave this thread for good (going on would overwrite its stack).
void __ubsan_handle_out_of_bounds(void*, void* index) {
  using namespace msl;
  if (!current) return;
  fault(ARRAY_INDEX, current->context.index_in_group, 0, -1, (uint64_t)index, false, MSL_CALLER, 0);
  stopped = true;
  leave();
}
}
