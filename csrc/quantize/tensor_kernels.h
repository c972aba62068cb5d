// Kernel parameters of the quantizing kernels of tensor.cpp.
#pragma once

#include "quantize/tensor.h"

namespace narrowfloat {

constexpr int kThreads = 256;
constexpr int kTileCols = 128;    // of a quantizing tile; its rows are a template argument
constexpr int kRowsOfSmall = 64;  // of a tile of the launch that finds the amax and quantizes
constexpr int kStripCols = 256;   // of a measuring block: a warp reads 32 x 8 neighbours
constexpr int kBlocksPerSm = 4;   // resident at once; bounds registers to 64 a thread

struct JobParams {
  const void* x;
  int64_t rows, cols, row_stride, col_stride;
  uint32_t col_tiles;
  uint8_t* q_rows;
  uint8_t* q_columns;
  int64_t q_rows_ld, q_columns_ld;  // padded(cols), padded(rows)
  float* scale;
  uint32_t* amax_partials;  // magnitudes as bits, one a block or tile that was read
  float* sum_partials;      // [sum_count, cols]
  void* column_sums;
  int64_t sum_count;
  int amax_count;
  Element format;
  Real sums_type;
  bool scale_given;
  History history;
  uint32_t tiles;        // 0 where no copy is wanted
  uint32_t first_block;  // subtracted, modulo the grid, from the block that owns its first tile
};

// The amax and sums of one tensor: `blocks` blocks in the launch, which take `slices` slices of its
// rows.
struct AmaxJob {
  const void* x;
  int64_t rows, cols, row_stride, col_stride;
  uint32_t* amax_partials;  // [blocks], or null
  float* sum_partials;      // [slices, cols], or null
  int64_t slices;
  int blocks;  // 0 where there is nothing to find
};

struct AmaxParams {
  AmaxJob job[kMaxJobs];
};

struct QuantizeParams {
  JobParams job[kMaxJobs];
  int count;
};

// vectors: eight neighbours of every row lie in one or two aligned 16-byte words
void launch_amax(const AmaxParams& params, Real type, bool vectors, cudaStream_t stream);
// overlaps: may start while the measuring launch before it in the stream still runs
void launch_quantize(const QuantizeParams& params, Real type, int tile_rows, bool overlaps,
                     bool vectors, int blocks, cudaStream_t stream);
// With delayed scales, finding the amax on the way. A block leaves one maximum a job.
void launch_quantize_and_amax(const QuantizeParams& params, Real type, int tile_rows, bool vectors,
                              int blocks, cudaStream_t stream);
// a block a tile of kRowsOfSmall rows: no more than the device holds at once
void launch_amax_and_quantize(const QuantizeParams& params, Real type, bool vectors,
                              cudaStream_t stream);
// column sums of a column-major matrix: out[c] = sum over r of x[c * col_stride + r]
void launch_sums_of_contiguous(const JobParams& job, Real type, cudaStream_t stream);

}  // namespace narrowfloat
