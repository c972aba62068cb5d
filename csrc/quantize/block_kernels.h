// Kernel parameters of FP8 by rows or blocks, which block.cpp fills.
#pragma once

#include "quantize/block.h"

namespace narrowfloat {

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / 32;
// Of the quantizing kernel, resident at once: while one waits for its tile, others write theirs.
constexpr int block_blocks_per_sm(int element_bytes) { return element_bytes == 2 ? 4 : 3; }
constexpr int kBlockAmaxBlocksPerSm = 4;
constexpr int kBlockBand = 256;  // rows that a block of the amax launch takes at once: 32 a warp

struct BlockAmaxParams {
  const void* x;
  int64_t rows, cols, row_stride, col_stride;
  uint32_t* row_amax;     // [rows], zeroed before, or null
  uint32_t* column_amax;  // [cols], likewise
  int64_t slices;         // of the bands of rows; blocks / slices strips of columns at once
  int blocks;
};

struct BlockQuantizeParams {
  BlockJob job;
  float* sum_partials;            // [tiles of rows, cols], or null
  int64_t padded_rows[2], ld[2];  // of each side's data
  uint32_t row_tiles, col_tiles;  // at least one of each
  bool aligned;                   // every row begins on 16 bytes, its elements side by side
};

// vectors: eight neighbours of every row lie in one or two aligned 16-byte words
void launch_block_amax(const BlockAmaxParams& params, Real type, bool vectors, cudaStream_t stream);
void launch_block_quantize(const BlockQuantizeParams& params, int blocks, cudaStream_t stream);
// out[c] = sum over i of partials[i, c]
void launch_block_sums(const float* partials, int64_t count, int64_t cols, void* out, Real type,
                       cudaStream_t stream);

}  // namespace narrowfloat
