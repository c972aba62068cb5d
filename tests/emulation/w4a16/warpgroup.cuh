// Decides how csrc/warpgroup.cuh runs on a CPU: barriers that fibers wait for by yielding, bulk
// copies that come when somebody waits for them or at once, products at once. For clusters of one
// block, which run one after another.
#pragma once

#include "w4a16/instructions.cuh"

inline void __syncwarp() { cluster_on_cpu::exchange({}); }
inline void __threadfence() {}

namespace narrowfloat {

inline int uniform(int value) { return value; }

inline uint8_t* from_boundary(void* p, uint32_t boundary) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  return reinterpret_cast<uint8_t*>((at + boundary - 1) / boundary * boundary);
}

struct BulkCopy {
  cluster_on_cpu::Copy copy;
  struct Barrier* barrier;
};
inline std::vector<BulkCopy> bulk_copies;

struct Barrier {
  int count = 0, pending = 0, phase = 0, bytes = 0;
  void settle() {
    if (pending > 0 || bytes != 0) return;
    ++phase;
    pending = count;
  }
};

inline void start_barrier(Barrier* b, int count) { *b = Barrier{count, count}; }
inline void barriers_started() {}
inline void arrive_if(bool does, Barrier* b) {
  if (!does) return;
  --b->pending;
  b->settle();
}
inline void arrive_and_announce(Barrier* b, int bytes) {
  b->bytes += bytes;
  arrive_if(true, b);
}
inline void make(const BulkCopy& bulk) {
  std::memcpy(bulk.copy.to, bulk.copy.from, bulk.copy.bytes);
  bulk.barrier->bytes -= bulk.copy.bytes;
  bulk.barrier->settle();
}
inline void wait_for_phase(Barrier* b, int parity) {
  while (b->phase % 2 == parity) {
    for (size_t i = 0; i < bulk_copies.size();) {
      if (bulk_copies[i].barrier != b) {
        ++i;
        continue;
      }
      const BulkCopy bulk = bulk_copies[i];
      bulk_copies.erase(bulk_copies.begin() + i);
      make(bulk);
    }
    if (b->phase % 2 == parity) cluster_on_cpu::yield();
  }
}
inline void copy_bulk(void* to_shared, const void* from_global, int bytes, Barrier* b) {
  if (reinterpret_cast<uintptr_t>(to_shared) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(from_global) % 16 != 0 || bytes % 16 != 0) {
    cluster_on_cpu::report("a bulk copy off its boundary");
  }
  const BulkCopy bulk{{to_shared, from_global, bytes}, b};
  if (cluster_on_cpu::late_copies) {
    std::memset(to_shared, 0xff, bytes);
    bulk_copies.push_back(bulk);
  } else {
    make(bulk);
  }
}
inline void written_for_copies() {}
template <int kRegisters>
void give_up_registers() {}
template <int kRegisters>
void take_registers() {}

inline void sync_warps(int, int threads) {
  static int arrived = 0, generation = 0;
  const int mine = generation;
  if (++arrived == threads) arrived = 0, ++generation;
  while (generation == mine) cluster_on_cpu::yield();
}

inline int take_ticket(int* counter) { return (*counter)++; }

inline uint8_t* shared_memory() {
  return reinterpret_cast<uint8_t*>(cluster_on_cpu::current->block->shared.data());
}
inline uint32_t swizzled_matrix(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % 1024 != 0) {
    cluster_on_cpu::report("a matrix off its boundary");
  }
  return static_cast<uint32_t>((static_cast<const uint8_t*>(at) - shared_memory()) / 16);
}
inline uint32_t moved_by(uint32_t matrix, int bytes) { return matrix + bytes / 16; }

inline void begin_products() {}
inline void end_products() {}
template <int kGroups>
void wait_for_products() {}
template <int kTiles, int kSums>
void wait_for_sums(float (&)[kTiles][kSums]) {}

template <int kSums>
void multiply_warpgroup(float (&c)[kSums], const uint32_t (&a)[4], uint32_t b, int add) {
  const auto all = cluster_on_cpu::exchange({a[0], a[1], a[2], a[3]});
  const int lane = threadIdx.x % 32;
  float rows[2][16];  // of a: lane / 4, and 8 more
  for (int k = 0; k < 16; ++k) {
    for (int high = 0; high < 2; ++high) {
      rows[high][k] = half_of(all[lane / 4 * 4 + k % 8 / 2][high + k / 8 * 2], k % 2);
    }
  }
  for (int i = 0; i < kSums; ++i) {
    const int col = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = add ? c[i] : 0;
    for (int k = 0; k < 16; ++k) {
      auto at = reinterpret_cast<uintptr_t>(shared_memory() + b * 16) + col * 128 + k * 2;
      at ^= (at >> 7 & 7) << 4;
      uint16_t bits;
      std::memcpy(&bits, reinterpret_cast<const void*>(at), 2);
      sum += static_cast<double>(rows[i / 2 % 2][k]) * half_of(bits, 0);
    }
    c[i] = static_cast<float>(sum);
  }
}

}  // namespace narrowfloat
