// How packed FP4 weights become an operand of a bf16 product, for many tokens.
#include <algorithm>

#include "api/check.h"
#include "w4a16/instructions.cuh"
#include "w4a16/matmul.h"
#include "w4a16/packed.cuh"

namespace narrowfloat {
namespace {

constexpr int kUnpackThreads = 256;

// A warp a unit. A lane has two runs of 32 bytes in each of four rows; they change hands in shared
// memory, so that a store writes whole lines.
__global__ void __launch_bounds__(kUnpackThreads)
    narrowfloat_fp4_unpack(const uint8_t* packed, int64_t units, int k_units,
                           __nv_bfloat16* operand, const float* scale, float* alpha) {
  constexpr int kWarps = kUnpackThreads / 32;
  __shared__ uint4 halves[kWarps][32 * 8];  // [row][16-byte chunk ^ row % 8]: no bank conflicts
  if (alpha && blockIdx.x == 0 && threadIdx.x < 2) alpha[threadIdx.x] = threadIdx.x ? 0.f : *scale;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint4* const chunks = halves[threadIdx.x / 32];
  const int64_t ld = static_cast<int64_t>(k_units) * kUnitCols;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; unit < units;
       unit += static_cast<int64_t>(gridDim.x) * kWarps) {
    const uint8_t* from = packed + unit * kUnitBytes;
    uint4 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = reinterpret_cast<const uint4*>(from)[i * 32 + lane];
    const uint2 scales = reinterpret_cast<const uint2*>(from + kUnitCodes)[lane];
    __nv_bfloat16* to = operand + (unit / k_units * kUnitRows + lane / 8) * ld +
                        unit % k_units * kUnitCols + lane % 8 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int rows = 0; rows < 2; ++rows) {
        const uint4& four = codes[half * 2 + rows];
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
        const uint32_t bytes = (half ? scales.y : scales.x) >> rows * 16;
        const uint32_t scale_pair[2] = {widen_scales(__byte_perm(bytes, 0, 0x4040)),
                                        widen_scales(__byte_perm(bytes, 0, 0x4141))};
        uint32_t row[2][8];  // g, g + 8
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint32_t a[4];
          spread_codes(words[j], a);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            constexpr uint32_t kRestorePair = 0x43004300u;  // kRestore, twice
            row[q % 2][j * 2 + q / 2] =
                multiply_pair(multiply_pair(a[q], scale_pair[q % 2]), kRestorePair);
          }
        }
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          uint4* const at = chunks + (rows * 16 + q * 8 + g) * 8;
          at[2 * t ^ g] = make_uint4(row[q][0], row[q][1], row[q][2], row[q][3]);
          at[(2 * t + 1) ^ g] = make_uint4(row[q][4], row[q][5], row[q][6], row[q][7]);
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = i * 4 + lane / 8;
        *reinterpret_cast<uint4*>(to + i * 4 * ld + half * 64) =
            chunks[row * 8 + (lane % 8 ^ row % 8)];
      }
      __syncwarp();
    }
  }
}

}  // namespace

void fp4_unpack(const uint8_t* packed, int64_t n, int64_t k, void* operand, const float* scale,
                float* alpha, cudaStream_t stream) {
  const int64_t k_units = (k + kUnitCols - 1) / kUnitCols;
  const int64_t units = (n + kUnitRows - 1) / kUnitRows * k_units;
  if (units == 0) return;
  constexpr int kWarps = kUnpackThreads / 32;
  const int64_t blocks = std::min<int64_t>((units + kWarps - 1) / kWarps, 65536);
  narrowfloat_fp4_unpack<<<static_cast<unsigned>(blocks), kUnpackThreads, 0, stream>>>(
      packed, units, static_cast<int>(k_units), static_cast<__nv_bfloat16*>(operand), scale, alpha);
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
