// Which scale byte a block of a tile gets: its own group's, two groups', 16 x 16's, and
// which of two that map its largest value to 6 or to 4.
#pragma once

#include "quantize/fp4_kernels.h"
#include "quantize/fp4_rounding.cuh"
#include "quantize/fp4_tile.cuh"

namespace narrowfloat {

// The squared error of a group with a scale byte.
__device__ inline float error_with(const Shared& s, int side, uint32_t scale,
                                   const float (&x)[kGroup]) {
  return squared_error(x, s.factors[side][scale].multiplier, e4m3_value(scale), s.side[side].up);
}

// Where a group's scale byte comes from.
enum class Choice { group, six_or_four, block };

// The scale byte of a group whose block's amax is `bits`. Where a block is more than the group, its
// threads agree: `pair_lane` is the other half's lane distance for blocks of 32. `plain`: neither
// mx nor rounded up.
template <typename W>
__device__ inline uint32_t choose_scale(const Fp4QuantizeParams& p, const Shared& s, bool plain,
                                        float to_six, uint32_t bits, const float (&x)[kGroup],
                                        int pair_lane) {
  const Fp4Job& job = p.job;
  const Fp4Side& side = job.side[W::kSide];
  if constexpr (W::kChoice == Choice::six_or_four) {
    const uint32_t six = block_scale(bits, s.side[W::kSide], false, side.scale_up, false);
    if (six != 0 && six != kNanScale) {
      const uint32_t four = block_scale(bits, s.side[W::kSide], false, false, true);
      // a tie keeps 6
      return error_with(s, W::kSide, four, x) < error_with(s, W::kSide, six, x) ? four : six;
    }
    return six;
  }
  if (plain) return nearest_block_scale(bits, to_six);
  if (job.mx) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, pair_lane));
  return block_scale(bits, s.side[W::kSide], job.mx, side.scale_up, false);
}

__host__ __device__ inline bool any_six(const Fp4Job& job) {
  return (job.side[0].form != Form::none && job.side[0].four_over_six) ||
         (job.side[1].form != Form::none && job.side[1].four_over_six);
}

// The scale bytes of a tile's 16 x 16 blocks, into s.block[now], which is zero before.
__device__ inline void choose_block_scales(const Fp4QuantizeParams& p, Shared& s, int now) {
  const uint32_t* tile = s.tile[now];
  const int k = p.job.side[0].form != Form::none ? 0 : 1;
  const Fp4Side& side = p.job.side[k];
  const bool six_or_four = any_six(p.job);
  const int group = threadIdx.x % kTileGroups;
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
    uint32_t w[8];
    take16(tile, row, group, w);
    atomicMax(&s.block[now][row / kGroup * kTileGroups + group], packed_amax(w));
  }
  __syncthreads();
  if (six_or_four) {
#pragma unroll 1
    for (int i = 0; i < kRowSteps; ++i) {
      const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
      const uint32_t bits = s.block[now][row / kGroup * kTileGroups + group];
      const uint32_t six = block_scale(bits, s.side[k], false, side.scale_up, false);
      const uint32_t four = block_scale(bits, s.side[k], false, false, true);
      float x[kGroup];
      take16(tile, row, group, x);
      s.error[0][row * kTileGroups + group] = error_with(s, k, six, x);
      s.error[1][row * kTileGroups + group] = error_with(s, k, four, x);
    }
    __syncthreads();
  }
  if (threadIdx.x < kTileGroups * kTileGroups) {
    const uint32_t bits = s.block[now][threadIdx.x];
    uint32_t scale = block_scale(bits, s.side[k], false, side.scale_up, false);
    if (six_or_four) {
      if (scale != 0 && scale != kNanScale) {
        float six_error = 0.f, four_error = 0.f;
        const int row = static_cast<int>(threadIdx.x) / kTileGroups * kGroup;
        for (int i = 0; i < kGroup; ++i) {
          const int at = (row + i) * kTileGroups + group;
          six_error = __fadd_rn(six_error, s.error[0][at]);
          four_error = __fadd_rn(four_error, s.error[1][at]);
        }
        if (four_error < six_error) scale = block_scale(bits, s.side[k], false, false, true);
      }
    }
    s.block[now][threadIdx.x] = scale;
  }
  __syncthreads();
}

}  // namespace narrowfloat
