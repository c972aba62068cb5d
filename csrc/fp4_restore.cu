// Decides how packed FP4 becomes operands of a bf16 product again.
#include "check.h"
#include "fp4_kernels.h"
#include "fp4_numerics.cuh"

namespace narrowfloat {
namespace {

constexpr int kAtOnce = 4;  // rows a warp has in flight
constexpr int kWarps = kFp4Threads / 32;
constexpr int kChunks = 32 / kScaleGroups;  // tiles of scale bytes side by side: a lane a group
// apart in shared memory, so that lanes of eight tiles meet in no bank
constexpr int kChunkWords = kScaleTileBytes / 4 + 4;

// A block takes 128 rows x 32 groups, whose scale bytes lie together: a warp a row, a lane a group.
__global__ void __launch_bounds__(kFp4Threads)
    narrowfloat_fp4_restore(const uint8_t* codes, const uint8_t* scales, int64_t rows,
                            int64_t groups, int64_t chunks, uint16_t* operand) {
  __shared__ uint4 products[128];
  __shared__ uint32_t scale_words[kChunks * kChunkWords];
  if (threadIdx.x < 128) products[threadIdx.x] = products_of(threadIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t across = (groups + 31) / 32, tiles = (rows + kScaleRows - 1) / kScaleRows * across;
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t r0 = t / across * kScaleRows, g0 = t % across * 32;
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
    const int64_t g = g0 + lane;
    if (g >= groups) continue;
    const auto* bytes =
        reinterpret_cast<const uint8_t*>(scale_words + lane / kScaleGroups * kChunkWords);
#pragma unroll 1
    for (int step = 0; step < kScaleRows; step += kWarps * kAtOnce) {
      uint2 q[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t r = r0 + step + i * kWarps + warp;
        q[i] = r < rows ? reinterpret_cast<const uint2*>(codes)[r * groups + g] : make_uint2(0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = step + i * kWarps + warp;
        const int64_t r = r0 + row;
        if (r >= rows) break;
        const uint32_t scale = bytes[row % 32 * 16 + row / 32 * 4 + lane % kScaleGroups] & 0x7f;
        uint32_t w[8];
        to_operand(make_uint2(q[i].x & 0x77777777u, q[i].y & 0x77777777u), products[scale], w);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const uint32_t codes_of_two = (k < 4 ? q[i].x : q[i].y) >> (8 * (k % 4));
          w[k] |= (codes_of_two << 12 & 0x8000u) | (codes_of_two << 24 & 0x80000000u);
        }
        auto* out = reinterpret_cast<uint4*>(operand + (r * groups + g) * kGroup);
        out[0] = make_uint4(w[0], w[1], w[2], w[3]);
        out[1] = make_uint4(w[4], w[5], w[6], w[7]);
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
