// A stack a thread, and the switch between them: ten instructions on x86-64, ucontext elsewhere.
#pragma once
#include "state.h"

#if defined(__x86_64__)
extern "C" void msl_switch(void** save, void* to) __attribute__((visibility("hidden")));
__asm__(
    ".text\n.hidden msl_switch\n.globl msl_switch\n.type msl_switch,@function\nmsl_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size msl_switch,.-msl_switch\n");
#else
#include <ucontext.h>
#endif

namespace msl {

static void fibre_main();

#if defined(__x86_64__)
static void* main_stack;

static void enter(Fibre& fibre) {
  current = &fibre;
  msl_switch(&main_stack, fibre.stack_pointer);
}
static void leave() { msl_switch(&current->stack_pointer, main_stack); }

static void prepare(Fibre& fibre, char* bottom, char* top) {
  (void)bottom;
  void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15);
  *--sp = nullptr;
  *--sp = (void*)fibre_main;
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  fibre.stack_pointer = sp;
}
#else
static ucontext_t main_context;
static std::vector<ucontext_t> contexts;

static void enter(Fibre& fibre) {
  current = &fibre;
  swapcontext(&main_context, &contexts[fibre.context.index_in_group]);
}
static void leave() { swapcontext(&contexts[current->context.index_in_group], &main_context); }

static void prepare(Fibre& fibre, char* bottom, char* top) {
  contexts.resize(fibres.size());
  ucontext_t& context = contexts[fibre.context.index_in_group];
  getcontext(&context);
  context.uc_stack.ss_sp = bottom;
  context.uc_stack.ss_size = (size_t)(top - bottom);
  context.uc_link = nullptr;
  makecontext(&context, (void (*)())fibre_main, 0);
}
#endif

static void fibre_main() {
  P->entry(&current->context);
  current->state = DONE;
  live--;
  simdgroups[current->context.simdgroup].live--;
  leave();
  abort();
}

}  // namespace msl
