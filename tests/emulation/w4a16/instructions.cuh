// Decides how csrc/instructions.cuh and what is around it run on a CPU for the tests: a cluster's
// blocks in one OS thread, each CUDA thread a fiber that yields at barriers, cluster after cluster.
// Found in the place of csrc/instructions.cuh by the kernels that a test has rewritten. Copies that
// do not wait are made as late as they may be, or as early, so that a kernel which relies on
// neither passes both; shared memory begins as NaN. No memory model, no speed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace cluster_on_cpu {

enum class Order { forward, backward, shuffled };  // of the fibers

// How the next launch runs, and what was wrong with the last.
inline bool late_copies = true;
inline Order order = Order::forward;
inline std::string problem;

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Block;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  uint3 index;
  Block* block;
  bool done = false;
  int warp_phase = 0, cluster_phase = 0;
  std::vector<std::vector<Copy>> groups{1};  // the last is open
};

// One warp's exchange: two buffers, so that a lane that is ahead by one does not overwrite.
constexpr int kWords = 6;
struct Warp {
  int arrived[2] = {0, 0}, phase = 0;
  uint32_t value[2][32][kWords];
};

struct Cluster;

struct Block {
  uint3 index;
  Cluster* cluster;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<uint4> shared;
  int live = 0, arrived = 0, generation = 0;
};

struct Cluster {
  std::vector<Block> blocks;
  int threads = 0, arrived = 0, phase = 0;
};

inline ucontext_t scheduler;
inline Fiber* current = nullptr;
inline dim3 grid, block_size;
inline std::function<void()> body;

inline void report(const char* what) {
  if (problem.empty()) problem = what;
}

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void sync_block() {
  Block& b = *current->block;
  const int mine = b.generation;
  if (++b.arrived == b.live) {
    b.arrived = 0;
    ++b.generation;
  }
  while (b.generation == mine) yield();
}

inline auto exchange(const uint32_t (&values)[kWords]) {
  Fiber& self = *current;
  Warp& warp = self.block->warps[self.index.x / 32];
  const int phase = self.warp_phase++;
  std::copy(values, values + kWords, warp.value[phase % 2][self.index.x % 32]);
  if (++warp.arrived[phase % 2] == 32) {
    warp.arrived[phase % 2] = 0;
    warp.phase = phase + 1;
  }
  while (warp.phase <= phase) yield();
  return warp.value[phase % 2];
}

inline void arrive() {
  Cluster& c = *current->block->cluster;
  if (current->cluster_phase != c.phase) report("a thread arrived at the cluster twice");
  ++current->cluster_phase;
  if (++c.arrived == c.threads) {
    c.arrived = 0;
    ++c.phase;
  }
}

inline void fiber_main() {
  body();
  Block& b = *current->block;
  current->done = true;
  if (--b.live > 0 && b.arrived == b.live) {  // an exited thread counts as arrived
    b.arrived = 0;
    ++b.generation;
  }
  swapcontext(&current->context, &scheduler);
}

inline void start(Block& b, Cluster& cluster, unsigned index, size_t shared_bytes) {
  b.index = make_uint3(index, 0, 0);
  b.cluster = &cluster;
  b.fibers.resize(block_size.x);
  b.warps.resize(block_size.x / 32);
  b.live = static_cast<int>(block_size.x);
  b.shared.resize(shared_bytes / 16 + 1);  // and 16 bytes to find writes beyond
  std::memset(b.shared.data(), 0xff, b.shared.size() * 16);
  constexpr size_t kStack = 32 << 10;
  for (unsigned t = 0; t < block_size.x; ++t) {
    Fiber& f = b.fibers[t];
    f.block = &b;
    f.index = make_uint3(t, 0, 0);
    f.stack = std::make_unique<char[]>(kStack);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, fiber_main, 0);
  }
}

inline void check_end(const Cluster& cluster, size_t shared_bytes) {
  for (const Block& b : cluster.blocks) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(b.shared.data());
    for (size_t i = shared_bytes; i < b.shared.size() * 16; ++i) {
      if (bytes[i] != 0xff) report("written beyond shared memory");
    }
    for (const Fiber& f : b.fibers) {
      if (f.cluster_phase != cluster.phase) report("a cluster's barrier was left open");
      for (const auto& group : f.groups) {
        if (!group.empty()) report("a copy was not waited for");
      }
    }
  }
}

template <typename Kernel, typename... Args>
void launch(Kernel* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
            int cluster_size, Args... args) {
  grid = dim3(blocks), block_size = dim3(threads);
  body = [&] { kernel(args...); };
  std::mt19937 random(1);
  if (blocks % cluster_size != 0) report("a grid that is not whole clusters");
  for (unsigned i = 0; i < blocks; i += cluster_size) {
    const unsigned first = order == Order::backward ? blocks - cluster_size - i : i;
    Cluster cluster;
    cluster.blocks.resize(cluster_size);
    cluster.threads = cluster_size * static_cast<int>(threads);
    std::vector<Fiber*> fibers;
    for (int rank = 0; rank < cluster_size; ++rank) {
      start(cluster.blocks[rank], cluster, first + rank, shared_bytes);
      for (Fiber& f : cluster.blocks[rank].fibers) fibers.push_back(&f);
    }
    if (order == Order::backward) std::reverse(fibers.begin(), fibers.end());
    if (order == Order::shuffled) std::shuffle(fibers.begin(), fibers.end(), random);
    for (bool any = true; any;) {
      any = false;
      for (Fiber* f : fibers) {
        if (f->done) continue;
        any = true;
        current = f;
        swapcontext(&scheduler, &f->context);
      }
    }
    check_end(cluster, shared_bytes);
  }
}

}  // namespace cluster_on_cpu

#undef __launch_bounds__
#define __launch_bounds__(...)
#define __grid_constant__
#undef __shared__
#define __shared__ static
#define threadIdx (cluster_on_cpu::current->index)
#define blockIdx (cluster_on_cpu::current->block->index)

inline void __syncthreads() { cluster_on_cpu::sync_block(); }
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) { return v; }  // not called
inline uint32_t __float_as_uint(float v) { return std::bit_cast<uint32_t>(v); }
inline float __uint_as_float(uint32_t v) { return std::bit_cast<float>(v); }
inline float __fdiv_rn(float a, float b) { return a / b; }
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

namespace narrowfloat {

template <int kBytes>
void copy_async(void* to_shared, const void* from_global) {
  if (reinterpret_cast<uintptr_t>(to_shared) % kBytes != 0 ||
      reinterpret_cast<uintptr_t>(from_global) % kBytes != 0) {
    cluster_on_cpu::report("a copy off its boundary");
  }
  if (cluster_on_cpu::late_copies) {
    std::memset(to_shared, 0xff, kBytes);
    cluster_on_cpu::current->groups.back().push_back({to_shared, from_global, kBytes});
  } else {
    std::memcpy(to_shared, from_global, kBytes);
  }
}

inline void end_copies() { cluster_on_cpu::current->groups.emplace_back(); }

template <int kGroups>
void wait_for_copies() {
  auto& groups = cluster_on_cpu::current->groups;
  while (groups.size() - 1 > kGroups) {
    for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    groups.erase(groups.begin());
  }
}

inline float half_of(uint32_t pair, int i) {
  return std::bit_cast<float>(i ? pair & 0xffff0000u : pair << 16);
}

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t own[cluster_on_cpu::kWords] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto all = cluster_on_cpu::exchange(own);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2, high = k / 8;
      const uint32_t from_a = all[row % 8 * 4 + pair][row / 8 + 2 * high];
      const uint32_t from_b = all[col * 4 + pair][4 + high];
      sum += static_cast<double>(half_of(from_a, k % 2)) * half_of(from_b, k % 2);
    }
    c[i] = static_cast<float>(sum);
  }
}

inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    const auto product = __float2bfloat16(half_of(a, i) * half_of(b, i));
    result |= static_cast<uint32_t>(__bfloat16_as_ushort(product)) << 16 * i;
  }
  return result;
}

inline void arrive_at_cluster() { cluster_on_cpu::arrive(); }
inline void wait_for_cluster() {
  const int mine = cluster_on_cpu::current->cluster_phase;
  while (cluster_on_cpu::current->block->cluster->phase < mine) cluster_on_cpu::yield();
}
inline void store_in_cluster(float* at, uint32_t rank, float value) {
  cluster_on_cpu::Block& own = *cluster_on_cpu::current->block;
  const auto offset =
      reinterpret_cast<uint8_t*>(at) - reinterpret_cast<uint8_t*>(own.shared.data());
  auto* there = reinterpret_cast<uint8_t*>(own.cluster->blocks[rank].shared.data()) + offset;
  std::memcpy(there, &value, sizeof(value));
}

}  // namespace narrowfloat
