// Decides how a fiber of cuda_on_cpu.h gives way to another without asking the system:
// swapcontext() saves the signal mask by a system call each time, which is most of what emulating a
// launch takes. Included before that header, whose contexts then are these. Elsewhere than on
// x86-64 nothing changes.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace fast_fibers {

// Stacks that no block uses now.
struct Stacks {
  std::mutex mutex;
  std::vector<std::unique_ptr<char[]>> free;
};
inline Stacks stacks;

// Those of the block that this thread runs.
struct Taken {
  std::vector<std::unique_ptr<char[]>> all;

  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(stacks.mutex);
    if (stacks.free.empty()) {
      all.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    } else {
      all.push_back(std::move(stacks.free.back()));
      stacks.free.pop_back();
    }
    return all.back().get();
  }
  ~Taken() {
    const std::lock_guard<std::mutex> lock(stacks.mutex);
    for (auto& stack : all) stacks.free.push_back(std::move(stack));
  }
};
inline thread_local Taken taken;

struct Context {
  struct {
    void* ss_sp;
    size_t ss_size;
  } uc_stack;
  Context* uc_link;
  void* stack_pointer;
};

extern "C" void narrowfloat_switch_fibers(void** from, void* to);
asm(R"(
.text
.type narrowfloat_switch_fibers, @function
narrowfloat_switch_fibers:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size narrowfloat_switch_fibers, . - narrowfloat_switch_fibers
)");

inline int swap(Context* from, Context* to) {
  narrowfloat_switch_fibers(&from->stack_pointer, to->stack_pointer);
  return 0;
}

// On a stack of `ss_size` bytes from above; `begin` never returns.
inline void make(Context* context, void (*begin)(), int) {
  const size_t bytes = context->uc_stack.ss_size;
  const auto end = reinterpret_cast<uintptr_t>(taken.take(bytes)) + bytes;
  auto* top = reinterpret_cast<void**>(end / 16 * 16);
  *--top = nullptr;  // where it would return to; so the stack lies as after a call
  *--top = reinterpret_cast<void*>(begin);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context->stack_pointer = top;
}

}  // namespace fast_fibers

#define ucontext_t fast_fibers::Context
#define getcontext(context) 0
#define makecontext fast_fibers::make
#define swapcontext fast_fibers::swap
#endif
