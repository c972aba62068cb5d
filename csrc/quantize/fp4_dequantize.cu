// Packed FP4 to operands of a bf16 GEMM.
#include "api/check.h"
#include "quantize/fp4_kernels.h"
#include "quantize/fp4_numerics.cuh"

namespace narrowfloat {
namespace {

constexpr int kAtOnce = 8;  // rows a warp has in flight
constexpr int kWarps = kFp4Threads / 32;
constexpr int kGroups = kFp4DequantizeGroups;    // a lane half a group
constexpr int kChunks = kGroups / kScaleGroups;  // tiles of scale bytes side by side
// apart in shared memory, so that lanes of several tiles meet in no bank
constexpr int kChunkWords = kScaleTileBytes / 4 + 4;

// The eight magnitudes times an e4m3 scale, as bf16: their low bytes, then their high bytes.
__device__ inline uint4 products_of(uint32_t scale) {
  uint32_t low[2] = {0, 0}, high[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    constexpr float kMagnitudes[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    const uint32_t bf16 =
        scale == kNanScale ? 0x7fc0u : __float_as_uint(kMagnitudes[i] * e4m3_value(scale)) >> 16;
    low[i / 4] |= (bf16 & 0xff) << (8 * (i % 4));
    high[i / 4] |= (bf16 >> 8) << (8 * (i % 4));
  }
  return make_uint4(low[0], low[1], high[0], high[1]);
}

// Eight codes to eight bf16: magnitudes from the table, signs onto their high bytes.
__device__ inline uint4 to_operand(uint32_t codes, const uint4& products) {
  const uint32_t magnitudes = codes & 0x77777777u, even = codes << 4;  // signs of even ones on top
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t m = magnitudes >> (16 * i);
    const uint32_t low = __byte_perm(products.x, products.y, m);
    const uint32_t signs = __byte_perm(even, codes, i ? 0x7362 : 0x5140);
    const uint32_t high = __byte_perm(products.z, products.w, m) | (signs & 0x80808080u);
    out[2 * i] = __byte_perm(low, high, 0x5140);
    out[2 * i + 1] = __byte_perm(low, high, 0x7362);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// A block takes 128 rows x 16 groups, whose scale bytes lie together: a warp a row, a lane half a
// group, so that every store of a warp fills whole sectors.
__global__ void __launch_bounds__(kFp4Threads)
    narrowfloat_fp4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t rows,
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

__global__ void narrowfloat_fp4_alpha(const float* a_scale, const float* b_scale, float* alpha) {
  alpha[0] = *a_scale * *b_scale;
  alpha[1] = 0.f;
}

}  // namespace

void launch_fp4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t rows,
                           int64_t groups, int64_t chunks, void* operand, int blocks,
                           cudaStream_t stream) {
  narrowfloat_fp4_dequantize<<<blocks, kFp4Threads, 0, stream>>>(
      codes, scales, rows, groups, chunks, static_cast<uint16_t*>(operand));
  NF_CUDA(cudaGetLastError());
}

void fp4_alpha(const float* a_scale, const float* b_scale, float* alpha, cudaStream_t stream) {
  narrowfloat_fp4_alpha<<<1, 1, 0, stream>>>(a_scale, b_scale, alpha);
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
