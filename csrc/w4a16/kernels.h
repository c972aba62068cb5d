// Kernel parameters of a GEMM with packed FP4 weights, which matmul.cpp fills; where the pieces of
// shared memory lie, how many warps and stages there are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "w4a16/matmul.h"
#include "w4a16/packed.cuh"

namespace narrowfloat {

constexpr int kPitch = 36;  // words from token to token of a partial sum: no bank conflicts
constexpr int kXPad = 16;   // bytes between rows of x in shared memory, likewise
constexpr int kXPitch = kUnitCols * 2 + kXPad;  // the same where x streams, unit by unit
constexpr int kSumPad = 4;                      // words, likewise

// Where x is held: units of a warp on their way or in use, by groups of tokens.
__host__ __device__ constexpr int ring_stages(int groups) { return groups == 2 ? 3 : 4; }
constexpr int kHoldWarps = 16;
// Where x streams: stages of a block, at most, and as many warps as there are registers for.
constexpr int kMostStages = 5, kMostWarpTiles = 2;
__host__ __device__ constexpr int most_warps(int groups, int warp_tiles) {
  const int sums = groups * warp_tiles;
  return sums <= 4 || warp_tiles == 1 ? 16 : sums <= 8 ? 12 : 8;
}

struct FP4Params {
  const __nv_bfloat16* x;
  const uint8_t* packed;
  const float* scale;
  const void* bias;
  void* y;
  int64_t x_stride, n, k;
  Real bias_type, y_type;
  int tokens;
  int units;                       // of K
  int row_tiles;                   // of 32
  int tiles;                       // of row_groups * 32 rows, where x is held
  int split, row_groups, k_warps;  // row_groups * k_warps warps a block
  int log_split, log_k_warps;
  int slab;                           // units
  int stages, stage;                  // where x streams; how many bytes each
  int log_rows, log_slice;            // of a tile, of a block's share of it
  int x_first, sums_first, exchange;  // bytes in shared memory; the ring is at 0
  bool vectors, constant;
};

// A kernel for so many groups of 8 tokens; null: there is none.
using FP4Kernel = void (*)(FP4Params);
FP4Kernel fp4_held_kernel(int groups);
FP4Kernel fp4_streamed_kernel(int groups, int warp_tiles);
inline FP4Kernel fp4_kernel(int groups, int warp_tiles) {
  return warp_tiles == 0 ? fp4_held_kernel(groups) : fp4_streamed_kernel(groups, warp_tiles);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

// Bytes of shared memory, piece by piece. Where x streams, the sums take the place of the stages.
struct FP4SharedLayout {
  int stage, ring, x, sums, exchange;
  FP4SharedLayout(const FP4Plan& plan, int64_t tokens) {
    const int rows = plan.row_groups * std::max(plan.warp_tiles, 1) * kUnitRows;
    const int k_warps = plan.warps / plan.row_groups;
    const int sent = plan.split > 1 ? static_cast<int>(tokens) * rows * 4 : 0;
    if (plan.warp_tiles == 0) {
      stage = plan.warps * kUnitBytes;
      ring = ring_stages(plan.groups) * stage;
      x = static_cast<int>(tokens) * (plan.slab * kUnitCols * 2 + kXPad);
      sums = plan.warps * plan.groups * 8 * kPitch * 4;
      exchange = sent * 2;
    } else {
      stage =
          k_warps * (plan.groups * 8 * kXPitch + plan.row_groups * plan.warp_tiles * kUnitBytes);
      sums = k_warps * plan.groups * 8 * (rows + kSumPad) * 4;
      exchange = sent;
      x = 0;
      ring = std::max(plan.stages * stage - sums - exchange, 0);
    }
  }
  int all() const { return ring + x + sums + exchange; }
};

}  // namespace narrowfloat
