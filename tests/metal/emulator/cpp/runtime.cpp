// Runs one kernel's grid: one fibre a thread, simdgroups of 32 lanes, barriers and collectives as rendezvous.
// In order, or with threadgroups, simdgroups and lanes drawn at random from a seed.
#include "signals.h"

using namespace msl;

extern "C" const Context* msl_context(void) { return &current->context; }

extern "C" void msl_barrier(int flags, uint64_t site) {
  current->state = AT_BARRIER;
  current->site = site;
  current->barrier_flags = flags;
  at_barrier++;
  leave();
}

extern "C" void msl_collective(Collective fn, void* slot, uint64_t site, int whole) {
  current->state = AT_COLLECTIVE;
  current->fn = fn;
  current->slot = slot;
  current->site = site;
  current->whole = whole;
  simdgroups[current->context.simdgroup].waiting++;
  leave();
}

namespace msl {

static void wake(Fibre& fibre) {
  fibre.state = READY;
  simdgroups[fibre.context.simdgroup].ready.push_back(fibre.context.index_in_group);
}

static uint32_t lanes_end(uint32_t simdgroup) {
  return simdgroup * 32 + 32 < threads_now ? simdgroup * 32 + 32 : threads_now;
}

// The collective at `site`, for the lanes of `simdgroup` that wait there.
static void resolve(uint32_t simdgroup, uint64_t site) {
  void* slots[32] = {};
  uint32_t mask = 0;
  const uint32_t first = simdgroup * 32, end = lanes_end(simdgroup);
  Fibre* any = nullptr;
  for (uint32_t t = first; t < end; t++) {
    Fibre& fibre = fibres[t];
    if (fibre.state != AT_COLLECTIVE || fibre.site != site) continue;
    slots[t - first] = fibre.slot;
    mask |= 1u << (t - first);
    any = &fibre;
  }
  if (any->whole && mask != 0xffffffffu) {
    fault(MATRIX_DIVERGENCE, any->context.index_in_group, mask, -1, 0, false, nullptr, site >> 32);
    stopped = true;
    return;
  }
  current = nullptr;  // the collective's own accesses are not the kernel's
  if (any->fn) any->fn(slots, mask);
  const bool barrier = !any->fn;
  count.simd_ops++;
  count.matrix_ops += any->whole;
  for (uint32_t t = first; t < end; t++) {
    if (!(mask >> (t - first) & 1)) continue;
    if (barrier) fibres[t].simd_epoch++;
    simdgroups[simdgroup].waiting--;
    wake(fibres[t]);
  }
}

// All live lanes wait in collectives: resolve if it is one and the same; else let the rest go on first.
static void resolve_if_together(uint32_t simdgroup) {
  uint64_t site = 0;
  bool found = false;
  for (uint32_t t = simdgroup * 32; t < lanes_end(simdgroup); t++) {
    if (fibres[t].state != AT_COLLECTIVE) continue;
    if (found && fibres[t].site != site) return;
    site = fibres[t].site;
    found = true;
  }
  if (simdgroups[simdgroup].live < lanes_end(simdgroup) - simdgroup * 32)
    count.divergent++;  // lanes returned
  resolve(simdgroup, site);
}

static void pass_barrier() {
  uint64_t site = 0;
  int flags = 0;
  bool found = false, mixed = live != threads_now;
  for (uint32_t t = 0; t < threads_now; t++) {
    if (fibres[t].state != AT_BARRIER) continue;
    mixed |= found && fibres[t].site != site;
    site = fibres[t].site;
    found = true;
    flags |= fibres[t].barrier_flags;
  }
  if (mixed) {
    fault(BARRIER_DIVERGENCE, live, threads_now, -1, 0, false, nullptr, site >> 32);
    stopped = true;
    return;
  }
  count.barriers++;
  at_barrier = 0;
  if (flags & MEM_THREADGROUP) group_epoch++;
  if (flags & MEM_DEVICE) device_epoch++;
  for (uint32_t t = 0; t < threads_now; t++)
    if (fibres[t].state == AT_BARRIER) wake(fibres[t]);
}

// No lane can go on: some wait in a collective while others of their simdgroup wait elsewhere.
static void resolve_divergent() {
  for (uint32_t t = 0; t < threads_now; t++)
    if (fibres[t].state == AT_COLLECTIVE) {
      count.divergent++;
      return resolve(t / 32, fibres[t].site);
    }
  fault(BARRIER_DIVERGENCE, at_barrier, live, -1, 0, false, nullptr, 0);
  stopped = true;
}

static int pick_simdgroup(uint32_t last) {
  const uint32_t n = (uint32_t)simdgroups.size(), start = P->shuffled ? random_number() % n : last;
  for (uint32_t k = 0; k < n; k++) {
    const Simdgroup& s = simdgroups[(start + k) % n];
    if (s.next < s.ready.size()) return (int)((start + k) % n);
  }
  return -1;
}

static uint32_t pick_lane(Simdgroup& s) {
  if (P->shuffled) std::swap(s.ready[s.next + random_number() % (s.ready.size() - s.next)], s.ready[s.next]);
  const uint32_t thread = s.ready[s.next++];
  if (s.next == s.ready.size()) s.ready.clear(), s.next = 0;
  return thread;
}

static void start_group(Uint3 group, const uint32_t groups[3]) {
  uint32_t size[3], origin[3] = {group.x * P->group[0], group.y * P->group[1], group.z * P->group[2]};
  for (int i = 0; i < 3; i++)
    size[i] = P->grid[i] - origin[i] < P->group[i] ? P->grid[i] - origin[i] : P->group[i];
  threads_now = live = size[0] * size[1] * size[2];
  at_barrier = 0;
  group_epoch++, device_epoch++;
  group_id = group.x + groups[0] * (group.y + groups[1] * group.z);
  variables.clear();
  arena_used = 0;
  if (P->checked) memset((void*)group_cells.data(), 0, group_cells.size() * sizeof(Cell));
  group_buffers.assign(P->group_buffer_count, nullptr);
  simdgroups.resize((threads_now + 31) / 32);
  for (uint32_t s = 0; s < simdgroups.size(); s++)
    simdgroups[s].live = lanes_end(s) - s * 32, simdgroups[s].waiting = 0, simdgroups[s].next = 0,
    simdgroups[s].ready.clear();
  for (uint32_t t = 0; t < threads_now; t++) {
    Fibre& f = fibres[t];
    const Uint3 at{t % size[0], t / size[0] % size[1], t / (size[0] * size[1])};
    f.context = Context{{origin[0] + at.x, origin[1] + at.y, origin[2] + at.z},
                        at,
                        group,
                        {size[0], size[1], size[2]},
                        {P->group[0], P->group[1], P->group[2]},
                        {P->grid[0], P->grid[1], P->grid[2]},
                        {groups[0], groups[1], groups[2]},
                        t % 32,
                        t / 32,
                        t,
                        (uint32_t)simdgroups.size(),
                        P->arguments,
                        group_buffers.data()};
    f.simd_epoch = 0;
    char* bottom = stacks + (size_t)t * STACK_BYTES;
    // Staggered: stacks that begin at equal offsets would share cache lines' sets.
    prepare(f, bottom, bottom + STACK_BYTES - 64 - (t % 61) * 128);
    wake(f);
  }
  for (int i = 0; i < P->group_buffer_count; i++)
    if (P->group_buffer_bytes[i])
      group_buffers[i] = msl_threadgroup_variable(-1 - i, P->group_buffer_bytes[i], 16, 0);
}

static void run_group(Uint3 group, const uint32_t groups[3]) {
  start_group(group, groups);
  uint32_t last = 0;
  while (live && !stopped) {
    const int s = pick_simdgroup(last);
    if (s >= 0) {
      last = (uint32_t)s;
      Simdgroup& simdgroup = simdgroups[s];
      enter(fibres[pick_lane(simdgroup)]);
      current = nullptr;
      if (simdgroup.ready.empty() && simdgroup.waiting && simdgroup.waiting == simdgroup.live)
        resolve_if_together((uint32_t)s);
    } else if (at_barrier == live) {
      pass_barrier();
    } else {
      resolve_divergent();
    }
  }
  count.threads += threads_now;
  count.groups++;
}

static void run_groups(const std::vector<uint64_t>& order, const uint32_t groups[3]) {
  const uint64_t row = groups[0], plane = row * groups[1];
  for (uint64_t i : order) {
    run_group({(uint32_t)(i % row), (uint32_t)(i % plane / row), (uint32_t)(i / plane)}, groups);
    if (stopped) return;
  }
}

}  // namespace msl

// Returns 1 where a fault stopped the dispatch.
extern "C" int msl_run(Params* params) {
  P = params;
  count = Counters{};
  stopped = false;
  group_epoch = device_epoch = 1;
  random_state = P->seed * 0x9E3779B97F4A7C15ull | 1;
  uint32_t groups[3];
  for (int i = 0; i < 3; i++) groups[i] = (P->grid[i] + P->group[i] - 1) / P->group[i];
  std::vector<uint64_t> order((uint64_t)groups[0] * groups[1] * groups[2]);
  for (uint64_t i = 0; i < order.size(); i++) order[i] = i;
  if (P->shuffled)
    for (uint64_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);

  fibres.assign(P->group[0] * P->group[1] * P->group[2], Fibre{});
  stacks_bytes = fibres.size() * STACK_BYTES;
  stacks = (char*)mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  arena = (char*)aligned_alloc(64, ARENA_BYTES);
  start_checking();
  {
    const Signals signals;
    if (!sigsetjmp(recovery, 1)) run_groups(order, groups);
  }
  current = nullptr;
  finish_checking();
  munmap(stacks, stacks_bytes);
  free(arena);
  *P->counters = count;
  return stopped;
}
