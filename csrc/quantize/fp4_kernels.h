// Kernel parameters of FP4, which fp4.cpp fills.
#pragma once

#include "quantize/fp4.h"

namespace narrowfloat {

constexpr int kFp4Threads = 256;
constexpr int kFp4Tile = 128;       // rows and columns of a quantizing tile
constexpr int kFp4BlocksPerSm = 3;  // of the quantizing kernel, resident at once
constexpr int kFp4AmaxBlocksPerSm = 3;
constexpr int kFp4Band =
    128;  // rows that a block of the amax launch reads at once: a group of 16 a warp

constexpr int kFp4DequantizeGroups = 16;  // of a row that a tile of the dequantizing kernel has

struct Fp4AmaxParams {
  Fp4Job job;
  uint32_t* amax[2];    // [blocks] magnitudes as bits, one a block, of each side that is wanted
  float* sum_partials;  // [slices, cols], or null
  int64_t slices;
  int blocks;
  bool aligned;  // see fp4.cpp
};

struct Fp4QuantizeParams {
  Fp4Job job;
  const uint32_t* amax[2];
  int amax_count[2];
  const float* sum_partials;
  int64_t sum_count;
  int col_tiles;
  int64_t tiles;
  int padded[2], groups[2];  // of each side: its rows, and the groups of 16 along one
  int numbers[2];            // groups along a row that are numbered: without padding to 32
  int chunks[2];             // tiles of scale bytes side by side
  bool aligned;              // sixteen neighbours of every row lie in aligned 16-byte words
};

// columns a lane of the amax launch reads of a row: 8 bytes
constexpr int fp4_lane_columns(Real type) { return type == Real::f32 ? 2 : 4; }

void launch_fp4_amax(const Fp4AmaxParams& params, cudaStream_t stream);
// A side that is rotated along the rows' own direction: groups of neighbours. One partial a block.
void launch_fp4_amax_rotated_rows(const Fp4AmaxParams& params, cudaStream_t stream);
void launch_fp4_quantize(const Fp4QuantizeParams& params, int blocks, bool overlaps,
                         cudaStream_t stream);

void launch_fp4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t rows,
                           int64_t groups, int64_t chunks, void* operand, int blocks,
                           cudaStream_t stream);

}  // namespace narrowfloat
