// A GEMM of packed FP4 weights with tens to hundreds of tokens: how its blocks share tiles of rows
// x tokens, what lies in its scratch, its kernel parameters.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "w4a16/matmul.h"
#include "w4a16/packed.cuh"

namespace narrowfloat {

constexpr int kMostTileStages = 12;
// To turn sums into rows of y: words of a warp for 8 tokens, and how many times those.
constexpr int kTurnWords = 160;
__host__ __device__ constexpr int turned_at_once(int warpgroups) { return warpgroups == 2 ? 4 : 2; }

// Must registers move from the warps that fetch to those that multiply? Then a thread has so many.
// All together they are those that the launch has: an increase waits for what is not there, for
// ever (has_fp4_tiles sees to it).
__host__ __device__ constexpr bool moves_registers(int tokens, int warpgroups, int row_tiles) {
  return tokens * row_tiles > 128 || (warpgroups == 4 && tokens >= 64);
}
__host__ __device__ constexpr int fetch_registers(int warpgroups) {
  return warpgroups == 2 ? 40 : 32;
}
__host__ __device__ constexpr int multiply_registers(int warpgroups) {
  return warpgroups == 2 ? 232 : 112;
}
// Those that multiply, then a warp that fetches; where registers are to move from it, a warpgroup.
__host__ __device__ constexpr int tile_threads(int tokens, int warpgroups, int row_tiles) {
  return warpgroups * 128 + (moves_registers(tokens, warpgroups, row_tiles) ? 128 : 32);
}

// Bytes of shared memory that a block has for stages: all that sm90 gives it but what is static.
constexpr int tile_stage_bytes(int warpgroups) {
  return 227 * 1024 - warpgroups * 4 * turned_at_once(warpgroups) * kTurnWords * 4 -
         kMostTileStages * 16 - 64 - 1024;
}

// One launch. A block has some tiles to itself; of those that are left, whose number is no multiple
// of the blocks', each block has an equal share of units of K in a row, so that a tile has several
// blocks, whose sums meet in memory.
struct FP4TilesPlan {
  int tokens;      // of a tile: 16, 32, 64, 128
  int warpgroups;  // of a block, each with
  int row_tiles;   // so many times 64 rows
  int depth;       // units of K a stage, at most
  int stages;
  int blocks;
  int whole;    // tiles a block has to itself
  int shared;   // tiles that are shared
  int share;    // a block's, in units
  double cost;  // estimated, in microseconds
  int rows() const { return warpgroups * row_tiles * 64; }
  int stage_bytes() const;  // a multiple of 1024
};

// Bytes of the scratch, from 256-byte boundary to boundary.
struct FP4TilesScratch {
  int64_t arranged, counters, partials;  // where each begins; arranged at 0
  int64_t bytes;
  FP4TilesScratch(const FP4TilesPlan& plan, int64_t tokens, int64_t k);
};

struct FP4TilesParams {
  const __nv_bfloat16* x;
  int64_t x_stride, n, k;
  uint8_t* arranged;  // x as tiles of plan.tokens x 64 in the order of packed.cuh, swizzled
  int* counters;      // [shared tiles] blocks whose sums are written
  float* partials;    // [blocks][2][rows * tokens]
  const uint8_t* packed;
  const float* scale;
  const void* bias;
  void* y;
  Real bias_type, y_type;
  int tokens;
  int units;        // of K
  int row_tiles;    // of 32
  int token_tiles;  // of plan.tokens
  int depth, stages;
  int stage, weights;  // bytes a stage; where weights begin in it, after x
  int whole, shared, share;
  bool pairs;    // x may be read in words of two elements
  bool vectors;  // four elements of y may be written at once
  bool constant;
};

using FP4TilesKernel = void (*)(FP4TilesParams);
// null: there is none
FP4TilesKernel fp4_tiles_kernel(int tokens, int warpgroups, int row_tiles);
// Zeros the counters too.
FP4TilesKernel fp4_arrange_kernel(int tile_tokens);
constexpr int kArrangeThreads = 256;

// Can this device run it? Its kernels have a body for sm90a alone.
bool has_fp4_tiles(int device);

// Do its kernels count in 32 bits all that there is?
constexpr bool fits_fp4_tiles(int64_t tokens, int64_t n, int64_t k) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return tokens <= kMost && n <= kMost && k <= kMost &&
         (tokens + 127) * (k + kUnitCols - 1) / 8 <= kMost &&  // threads that put x in order
         (tokens + 127) / 16 * ((n + 127) / 128) <= kMost;     // tiles
}

FP4TilesPlan plan_fp4_tiles(int multiprocessors, int64_t tokens, int64_t n, int64_t k);
// A plan of this shape; cost is infinite where there is none. split: blocks a tile of those that
// are shared, at most.
FP4TilesPlan plan_fp4_tiles(int multiprocessors, int64_t tokens, int64_t n, int64_t k,
                            int tile_tokens, int warpgroups, int row_tiles, int split);

// Launches on `stream`, of the current device. job.m tokens, any number from 1 on; sizes of n and k
// from 1 on. scratch: on 256 bytes, FP4TilesScratch::bytes, needed until the stream passes the
// call. No host synchronization; deterministic.
void fp4_tiles(const FP4Matmul& job, const FP4TilesPlan& plan, void* scratch, cudaStream_t stream);

}  // namespace narrowfloat
