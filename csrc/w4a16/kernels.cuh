// What the kernels of a product with packed FP4 weights share: which tiles and units a
// block has, how weights and x reach shared memory, how they are multiplied, how a sum becomes y.
#pragma once

#include "quantize/kernels.cuh"
#include "w4a16/instructions.cuh"
#include "w4a16/kernels.h"
#include "w4a16/packed.cuh"

namespace narrowfloat {

// What a block does: tile after tile of rows, its share of K of each, slab after slab.
struct Share {
  int rank, cluster, clusters;  // of the block in its cluster, of that in the grid
  int first, units, slabs;      // of K
  int tiles;

  __device__ explicit Share(const FP4Params& p) {
    rank = static_cast<int>(blockIdx.x) & (p.split - 1);
    cluster = static_cast<int>(blockIdx.x) >> p.log_split;
    clusters = static_cast<int>(gridDim.x) >> p.log_split;
    first = p.units * rank >> p.log_split;  // units are below 2^23
    units = (p.units * (rank + 1) >> p.log_split) - first;
    slabs = (units + p.slab - 1) / p.slab;
    tiles = tiles_below(p.tiles);
  }
  // How many of the cluster's tiles are below `end`.
  __device__ int tiles_below(int end) const {
    return cluster < end ? (end - 1 - cluster) / clusters + 1 : 0;
  }
  __device__ int tile(int i) const { return cluster + i * clusters; }
  __device__ int in_slab(const FP4Params& p, int slab) const {
    return min(p.slab, units - slab * p.slab);
  }
};

// A lane's part of a unit; `to` and `from` are where its codes begin.
__device__ inline void copy_unit(uint8_t* to, const uint8_t* from, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) copy_async<16>(to + i * 512, from + i * 512);
  copy_async<8>(to + kUnitCodes - lane * 8, from + kUnitCodes - lane * 8);
}

// Eight columns of x to shared memory, `count` times, with copies that are to be waited for. Beyond
// K, which is `left` columns from `from`, zeros: the weights there are zero too, but zero times
// what lies there by chance may be NaN. to_step is in bytes.
__device__ inline void fetch_x(const FP4Params& p, uint8_t* to, int to_step,
                               const __nv_bfloat16* from, int64_t from_step, int64_t left,
                               int64_t left_step, int count) {
  if (p.vectors) {
#pragma unroll 2
    for (int i = 0; i < count; ++i) {
      if (left > 0) {
        copy_async<16>(to, from);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
      to += to_step, from += from_step, left -= left_step;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Eight<__nv_bfloat16> v = load8<false>(from, 1, left);
      *reinterpret_cast<uint4*>(to) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
      to += to_step, from += from_step, left -= left_step;
    }
  }
}

// sum [32 kTiles, 8 kGroups tokens] of a warp += half a unit of each tile times x. x_at(group, two)
// is where this lane's x for the operands 2 two and 2 two + 1 along K lies.
template <int kGroups, int kTiles, typename X>
__device__ inline void multiply_half(const uint4 (&codes)[kTiles][2],
                                     const uint32_t (&scales)[kTiles], X x_at,
                                     float (&sum)[kTiles][2][kGroups][4]) {
#pragma unroll
  for (int two = 0; two < 2; ++two) {
    uint4 b[kGroups];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) b[n] = *reinterpret_cast<const uint4*>(x_at(n, two));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int rows = 0; rows < 2; ++rows) {
        const uint32_t bytes = scales[tile];
        const uint32_t scale[2] = {widen_scales(__byte_perm(bytes, 0, rows ? 0x4242 : 0x4040)),
                                   widen_scales(__byte_perm(bytes, 0, rows ? 0x4343 : 0x4141))};
        const uint4& four = codes[tile][rows];
#pragma unroll
        for (int one = 0; one < 2; ++one) {
          const uint32_t word = two ? (one ? four.w : four.z) : (one ? four.y : four.x);
          uint32_t a[4];
          spread_codes(word, a);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = multiply_pair(a[i], scale[i % 2]);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) {
            mma(sum[tile][rows][n], a, one ? b[n].z : b[n].x, one ? b[n].w : b[n].y);
          }
        }
      }
    }
  }
}

__device__ inline void finish(const FP4Params& p, float scale, int token, int64_t row, float sum) {
  if (row >= p.n) return;
  float v = sum * scale;
  if (p.bias) v += load_real(p.bias, p.bias_type, row);
  store_real(p.y, p.y_type, token * p.n + row, v);
}

}  // namespace narrowfloat
