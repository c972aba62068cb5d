// Which instructions kernels use beyond CUDA C++: copies that do not wait, mma, clusters.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace narrowfloat {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Global to shared memory, behind the thread's back. Both addresses are multiples of kBytes.
template <int kBytes>
__device__ inline void copy_async(void* to_shared, const void* from_global) {
  static_assert(kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to_shared)),
        "l"(from_global)
        : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to_shared)),
                 "l"(from_global)
                 : "memory");
  }
}

// Ends a group of this thread's copies, which may be empty.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the newest kGroups groups of this thread's copies are there, for this thread.
template <int kGroups>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// c [16, 8] += a [16, 16] b [8, 16]^T in a warp. Of lane 4 g + t (PTX manual, "Matrix fragments for
// mma.m16n8k16 with floating point type"): a0..a3 are rows g, g + 8, g, g + 8 and columns 2 t and
// 2 t + 1 (a0, a1) or those + 8 (a2, a3); b0, b1 are row g, columns 2 t and 2 t + 1, then those +
// 8; c0, c1 are row g, columns 2 t and 2 t + 1; c2, c3 row g + 8.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two bf16 products, each rounded once.
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// The barrier of a cluster in two halves: what threads wrote before they arrived, those that have
// waited see, in the other blocks' shared memory too. From sm90 on; elsewhere there are no
// clusters.
__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Writes a word where `at` lies in the shared memory of the cluster's block `rank`.
__device__ inline void store_in_cluster(float* at, uint32_t rank, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}

}  // namespace narrowfloat
