// Which instructions kernels use from sm90a on: barriers in shared memory, bulk copies, and
// products of a warpgroup whose first operand lies in registers.
#pragma once

#include <cstdint>

#include "w4a16/instructions.cuh"

namespace narrowfloat {

// The same value in all lanes, which the compiler then knows.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The first address from p on that is a multiple of `boundary`; p lies in shared memory.
__device__ inline uint8_t* from_boundary(void* p, uint32_t boundary) {
  return static_cast<uint8_t*>(p) + (boundary - shared_address(p) % boundary) % boundary;
}

// A barrier of `count` arrivals a phase, and of the bytes that are announced for it. Phases
// alternate in parity; the first is 0, and the one before it counts as over.
using Barrier = uint64_t;

__device__ inline void start_barrier(Barrier* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)
               : "memory");
}
// After start_barrier, before other threads, or copies, use them; then the block's barrier.
__device__ inline void barriers_started() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive_if(bool does, Barrier* b) {  // without a branch
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(shared_address(b)),
      "r"(static_cast<int>(does))
      : "memory");
}
__device__ inline void arrive_and_announce(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes)
               : "memory");
}
__device__ inline void wait_for_phase(Barrier* b, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@over bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

// Global to shared memory by the copy engine; addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(void* to_shared, const void* from_global, int bytes, Barrier* b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to_shared)),
      "l"(from_global), "r"(bytes), "r"(shared_address(b))
      : "memory");
}
// What threads have written so far, the copy engine reads.
__device__ inline void written_for_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Moves registers from the warpgroups that fetch to those that multiply: how many a thread has from
// now on. By all warps of a warpgroup.
template <int kRegisters>
__device__ inline void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Of the threads of some warps of the block; 0 is __syncthreads'.
__device__ inline void sync_warps(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

// How many have come before, of those that share a counter in global memory.
__device__ inline int take_ticket(int* counter) { return atomicAdd(counter, 1); }

// A matrix in shared memory, rows of 64 bf16 of K (128 bytes), where the 16-byte chunk c of row r
// lies at c ^ r % 8; it begins on a multiple of 1024 bytes (PTX manual, "Asynchronous warpgroup
// level matrix shared memory layout", 128-byte swizzling: 8 rows are 1024 bytes apart).
// This is the low word of its descriptor.
__device__ inline uint32_t swizzled_matrix(const void* at) {
  return 1 << 16 | (shared_address(at) & 0x3ffff) >> 4;
}
constexpr uint32_t kSwizzledMatrix = 1u << 30 | 1024 / 16;  // the high one
// The same from so many bytes on.
__device__ inline uint32_t moved_by(uint32_t matrix, int bytes) { return matrix + bytes / 16; }

// Before the first product whose registers were written by other instructions.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the newest kGroups groups of products are done.
template <int kGroups>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// All are; only now the sums may be read, which the compiler does not know.
template <int kTiles, int kSums>
__device__ inline void wait_for_sums(float (&c)[kTiles][kSums]) {
  wait_for_products<0>();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) asm volatile("" : "+f"(c[i][j])::"memory");
  }
}

// c [64, 2 kSums] += (or = where `add` is 0) a [64, 16] b [2 kSums, 16]^T in a warpgroup. A warp
// has 16 rows, of which a lane has the elements that it has in mma(); of c, sums 4 i to 4 i + 3 are
// those of mma() for the columns from 8 i on.
template <int kSums>
__device__ inline void multiply_warpgroup(float (&c)[kSums], const uint32_t (&a)[4], uint32_t b,
                                          int add);

template <>
__device__ inline void multiply_warpgroup<8>(float (&c)[8], const uint32_t (&a)[4], uint32_t b,
                                             int add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\n"
      "setp.ne.b32 p, %13, 0;\n"
      "mov.b64 b, {%12, %14};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, b, p, 1, 1, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kSwizzledMatrix));
}
template <>
__device__ inline void multiply_warpgroup<16>(float (&c)[16], const uint32_t (&a)[4], uint32_t b,
                                              int add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "mov.b64 b, {%20, %22};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, b, p, 1, 1, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kSwizzledMatrix));
}
template <>
__device__ inline void multiply_warpgroup<32>(float (&c)[32], const uint32_t (&a)[4], uint32_t b,
                                              int add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "mov.b64 b, {%36, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, b, p, 1, 1, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kSwizzledMatrix));
}
template <>
__device__ inline void multiply_warpgroup<64>(float (&c)[64], const uint32_t (&a)[4], uint32_t b,
                                              int add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\n"
      "setp.ne.b32 p, %69, 0;\n"
      "mov.b64 b, {%68, %70};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, b, p, 1, 1, 0;\n}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
        "+f"(c[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(kSwizzledMatrix));
}

}  // namespace narrowfloat
