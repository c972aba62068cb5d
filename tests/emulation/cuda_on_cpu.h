// Decides how CUDA kernels run on a CPU for the tests: a block is an OS thread, its threads are
// fibers that yield at barriers; shared memory is thread-local. Included before the kernels'
// sources, whose <<<...>>> launches the test rewrites into cuda_on_cpu::launch. It checks what
// kernels compute, not how fast, and no memory model: fibers of a block run one at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace cuda_on_cpu {

struct Block;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  uint3 index;
  bool done = false;
  int warp_phase = 0;
};

// One warp's exchange: two buffers, so that a lane that is ahead by one does not overwrite.
struct Warp {
  int arrived[2] = {0, 0};
  uint32_t value[2][32];
  int phase = 0;
};

struct Block {
  uint3 index;
  dim3 grid;
  std::barrier<>* grid_barrier;
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  int live = 0, arrived = 0, generation = 0;
  int grid_arrived = 0, grid_generation = 0;
  Fiber* current = nullptr;
  std::function<void()> body;

  void yield() { swapcontext(&current->context, &scheduler); }

  void sync() {
    const int mine = generation;
    if (++arrived == live) {
      arrived = 0;
      ++generation;
    }
    while (generation == mine) yield();
  }

  void sync_grid() {
    const int mine = grid_generation;
    if (++grid_arrived == live) {
      grid_arrived = 0;
      grid_barrier->arrive_and_wait();
      ++grid_generation;
    }
    while (grid_generation == mine) yield();
  }

  // Every lane's value; all 32 lanes must come (the kernels use full masks only).
  const uint32_t* exchange(uint32_t value) {
    Fiber& self = *current;
    const int lane = self.index.x % 32;
    Warp& warp = warps[self.index.x / 32];
    const int phase = self.warp_phase++;
    warp.value[phase % 2][lane] = value;
    if (++warp.arrived[phase % 2] == 32) {
      warp.arrived[phase % 2] = 0;
      warp.phase = phase + 1;
    }
    while (warp.phase <= phase) yield();
    return warp.value[phase % 2];
  }
};

inline thread_local Block* block = nullptr;

inline void fiber_main() {
  block->body();
  Fiber* self = block->current;
  self->done = true;
  --block->live;
  if (block->live > 0 && block->arrived == block->live) {  // an exited thread counts as arrived
    block->arrived = 0;
    ++block->generation;
  }
  swapcontext(&self->context, &block->scheduler);
}

inline void run_block(Block& b, int threads) {
  block = &b;
  constexpr size_t kStack = 64 << 10;
  b.fibers.resize(threads);
  b.warps.resize((threads + 31) / 32);
  b.live = threads;
  for (int t = 0; t < threads; ++t) {
    Fiber& f = b.fibers[t];
    f.stack = std::make_unique<char[]>(kStack);
    f.index = make_uint3(t, 0, 0);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = &b.scheduler;
    makecontext(&f.context, fiber_main, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (Fiber& f : b.fibers) {
      if (f.done) continue;
      any = true;
      b.current = &f;
      swapcontext(&b.scheduler, &f.context);
    }
  }
}

// What a launch asks for by its size, of whatever size.
inline unsigned char* launch_shared() {
  alignas(16) static thread_local unsigned char bytes[256 << 10];
  return bytes;
}

template <typename Kernel, typename... Args>
void launch(Kernel* kernel, int blocks, int threads, Args... args) {
  std::barrier<> barrier(blocks);
  std::vector<std::thread> running;
  for (int i = 0; i < blocks; ++i) {
    running.emplace_back([&, i] {
      Block b;
      b.index = make_uint3(i, 0, 0);
      b.grid = dim3(blocks);
      b.grid_barrier = &barrier;
      b.body = [&] { kernel(args...); };
      run_block(b, threads);
    });
  }
  for (std::thread& t : running) t.join();
}

}  // namespace cuda_on_cpu

namespace cooperative_groups {
struct Grid {
  void sync() const { cuda_on_cpu::block->sync_grid(); }
};
inline Grid this_grid() { return {}; }
}  // namespace cooperative_groups

#undef __shared__
#define __shared__ static thread_local
#undef __noinline__
#define __noinline__
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (cuda_on_cpu::block->current->index)
#define blockIdx (cuda_on_cpu::block->index)
#define gridDim (cuda_on_cpu::block->grid)

inline void __syncthreads() { cuda_on_cpu::block->sync(); }
inline void __syncwarp() { cuda_on_cpu::block->exchange(0); }
inline float __shfl_xor_sync(unsigned, float v, int o) {
  const int lane = threadIdx.x % 32;
  return std::bit_cast<float>(cuda_on_cpu::block->exchange(std::bit_cast<uint32_t>(v))[lane ^ o]);
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t v, int o) {
  const int lane = threadIdx.x % 32;
  return cuda_on_cpu::block->exchange(v)[lane ^ o];
}
inline double __shfl_xor_sync(unsigned, double v, int o) {
  const int lane = threadIdx.x % 32;
  const auto bits = std::bit_cast<uint64_t>(v);
  const uint64_t low = cuda_on_cpu::block->exchange(static_cast<uint32_t>(bits))[lane ^ o];
  const uint64_t high = cuda_on_cpu::block->exchange(static_cast<uint32_t>(bits >> 32))[lane ^ o];
  return std::bit_cast<double>(high << 32 | low);
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) {
  const uint32_t* all = cuda_on_cpu::block->exchange(v);
  return *std::max_element(all, all + 32);
}
inline uint32_t __float_as_uint(float v) { return std::bit_cast<uint32_t>(v); }
inline float __uint_as_float(uint32_t v) { return std::bit_cast<float>(v); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rz(float a, float b) {
  const double exact = static_cast<double>(a) * b;
  const float near = static_cast<float>(exact);
  return std::fabs(near) > std::fabs(exact) ? std::nextafter(near, 0.f) : near;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float v) { return v >= 1.f ? 1.f : v > 0.f ? v : 0.f; }  // NaN to 0
inline uint32_t atomicMax(uint32_t* p, uint32_t v) {  // blocks run at once
  std::atomic_ref<uint32_t> at(*p);
  uint32_t old = at.load();
  while (old < v && !at.compare_exchange_weak(old, v)) {
  }
  return old;
}
inline double atomicAdd(double* p, double v) { return std::atomic_ref<double>(*p).fetch_add(v); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
inline uint32_t __vimax3_u32(uint32_t a, uint32_t b, uint32_t c) {
  return std::max(std::max(a, b), c);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return c;
}
// In each half the larger of a + b and c.
inline uint32_t __viaddmax_u16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 16) {
    const uint32_t sum = (a >> i) + (b >> i) & 0xffff;
    result |= std::max(sum, c >> i & 0xffff) << i;
  }
  return result;
}
inline uint32_t __ldcs(const uint32_t* p) { return *p; }
template <typename T>
inline T __ldcg(const T* p) {
  return *p;
}
inline void __threadfence() {}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
template <typename T>
T max(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
