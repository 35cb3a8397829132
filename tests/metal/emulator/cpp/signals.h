// A wild pointer, or a 16-byte vector off its alignment, would end the process: it becomes a fault instead.
#pragma once
#include <setjmp.h>
#include <signal.h>
#if defined(__x86_64__)
#include <ucontext.h>
#endif

#include "memory.h"

namespace msl {

static sigjmp_buf recovery;

static void on_signal(int number, siginfo_t* info, void* context) {
  if (!current) {  // not the kernel's doing
    signal(number, SIG_DFL);
    return;
  }
  const void* at = nullptr;
#if defined(__x86_64__)
  at = (const void*)(((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1);
#endif
  (void)context;
  fault(HOST_TRAP, current->context.index_in_group, 0, -1, (uint64_t)info->si_addr, false, at, 0);
  stopped = true;
  siglongjmp(recovery, 1);
}

// Catches signals for its lifetime, on a stack of its own: the fibre's may be what is broken.
class Signals {
 public:
  Signals() {
    stack_t ours{};
    ours.ss_sp = stack_;
    ours.ss_size = sizeof stack_;
    sigaltstack(&ours, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_segv_);
    sigaction(SIGBUS, &action, &old_bus_);
  }
  ~Signals() {
    sigaction(SIGSEGV, &old_segv_, nullptr);
    sigaction(SIGBUS, &old_bus_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  char stack_[65536];
  stack_t old_stack_;
  struct sigaction old_segv_, old_bus_;
};

}  // namespace msl
