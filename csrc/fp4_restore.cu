// Decides how packed FP4 becomes operands of a bf16 product again.
#include "check.h"
#include "fp4_kernels.h"
#include "fp4_numerics.cuh"

namespace narrowfloat {
namespace {

constexpr int kAtOnce = 8;  // rows a warp has in flight
constexpr int kWarps = kFp4Threads / 32;
constexpr int kGroups = kFp4RestoreGroups;       // a lane half a group
constexpr int kChunks = kGroups / kScaleGroups;  // tiles of scale bytes side by side
// apart in shared memory, so that lanes of several tiles meet in no bank
constexpr int kChunkWords = kScaleTileBytes / 4 + 4;

// A block takes 128 rows x 16 groups, whose scale bytes lie together: a warp a row, a lane half a
// group, so that every store of a warp fills whole sectors.
__global__ void __launch_bounds__(kFp4Threads)
    narrowfloat_fp4_restore(const uint8_t* codes, const uint8_t* scales, int64_t rows,
                            int64_t groups, int64_t chunks, uint16_t* operand) {
  __shared__ uint4 products[128];
  __shared__ uint32_t scale_words[kChunks * kChunkWords];
  if (threadIdx.x < 128) products[threadIdx.x] = products_of(threadIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto across = static_cast<uint32_t>((groups + kGroups - 1) / kGroups);
  const auto tiles = static_cast<uint32_t>((rows + kScaleRows - 1) / kScaleRows * across);
  const int64_t step = kWarps * groups * 2;  // half groups between a warp's rows
  for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t r0 = int64_t{t / across} * kScaleRows, g0 = int64_t{t % across} * kGroups;
    __syncthreads();  // the tile before has been read
    const int64_t first = g0 / kScaleGroups;
    const auto* from = reinterpret_cast<const uint32_t*>(
        scales + (r0 / kScaleRows * chunks + first) * kScaleTileBytes);
    for (int i = threadIdx.x; i < kChunks * (kScaleTileBytes / 4); i += kFp4Threads) {
      const int chunk = i / (kScaleTileBytes / 4);
      scale_words[chunk * kChunkWords + i % (kScaleTileBytes / 4)] =
          first + chunk < chunks ? from[i] : 0;
    }
    __syncthreads();
    const int group = lane / 2;
    if (g0 + group >= groups) continue;
    const auto* bytes =
        reinterpret_cast<const uint8_t*>(scale_words + group / kScaleGroups * kChunkWords) +
        group % kScaleGroups;
    const int rows_inside = static_cast<int>(min(rows - r0, static_cast<int64_t>(kScaleRows)));
    int64_t at = ((r0 + warp) * groups + g0) * 2 + lane;  // in half groups
#pragma unroll 1
    for (int row = warp; row < rows_inside; row += kWarps * kAtOnce, at += kAtOnce * step) {
      uint32_t q[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        q[i] = row + i * kWarps < rows_inside
                   ? __ldcs(reinterpret_cast<const uint32_t*>(codes) + at + i * step)
                   : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = row + i * kWarps;
        if (r >= rows_inside) break;
        const uint32_t scale = bytes[r % 32 * 16 + r / 32 * 4] & 0x7f;
        reinterpret_cast<uint4*>(operand)[at + i * step] = to_operand(q[i], products[scale]);
      }
    }
  }
}

}  // namespace

void launch_fp4_restore(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t groups,
                        int64_t chunks, void* operand, int blocks, cudaStream_t stream) {
  narrowfloat_fp4_restore<<<blocks, kFp4Threads, 0, stream>>>(codes, scales, rows, groups, chunks,
                                                              static_cast<uint16_t*>(operand));
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
