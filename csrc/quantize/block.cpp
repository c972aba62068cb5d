// Quantizing to FP8 by rows or blocks: the launches, their grids, what lies in the scratch.
#include "quantize/block.h"

#include <algorithm>
#include <utility>

#include "api/check.h"
#include "api/device.h"
#include "quantize/block_kernels.h"
#include "quantize/tensor_kernels.h"

namespace narrowfloat {
namespace {

bool wanted(const BlockSide& side) { return side.form != Form::none; }

// A side whose rows' maxima a launch before must find.
bool needs_row_amax(const BlockSide& side) {
  if (side.amax_given) return false;
  return wanted(side) ? side.scaling == Scaling::row : side.amax != nullptr;
}

// A column-major matrix is its transpose in row-major. Its column sums then are sums of contiguous
// runs, in a launch of their own.
bool column_major(const BlockJob& job) {
  return job.row_stride == 1 && job.col_stride != 1 && job.cols > 1;
}

BlockJob row_major(BlockJob job) {
  if (column_major(job)) {
    std::swap(job.rows, job.cols);
    std::swap(job.row_stride, job.col_stride);
    std::swap(job.side[0], job.side[1]);
    job.column_sums = nullptr;
  }
  return job;
}

bool rows_begin_on_16(const BlockJob& job) {
  return job.col_stride == 1 && job.row_stride * size_of(job.type) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(job.x) % 16 == 0 && job.rows * job.cols > 0;
}

// At least one: a matrix without columns has rows that have scales, one without rows sums.
int64_t tiles_along(int64_t size) { return std::max<int64_t>(blocks_of(size, kBlock), 1); }

struct Pieces {  // of the scratch, in words
  int64_t amax[2], amax_words, sums, words;
};

Pieces pieces_of(const BlockJob& job) {
  Pieces p{};
  for (int k = 0; k < 2; ++k) {
    p.amax[k] = p.amax_words;
    const bool here = needs_row_amax(job.side[k]) && job.side[k].amax == nullptr;
    if (here) p.amax_words += padded(k ? job.cols : job.rows);
  }
  p.sums = p.amax_words;
  p.words = p.sums + (job.column_sums ? tiles_along(job.rows) * job.cols : 0);
  return p;
}

void reduce_amax(const BlockJob& job, int device, cudaStream_t stream) {
  BlockAmaxParams p{};
  p.x = job.x;
  p.rows = job.rows, p.cols = job.cols;
  p.row_stride = job.row_stride, p.col_stride = job.col_stride;
  if (needs_row_amax(job.side[0])) p.row_amax = job.side[0].amax;
  if (needs_row_amax(job.side[1])) p.column_amax = job.side[1].amax;
  const int64_t resident = int64_t{device_of(device).multiprocessors} * kBlockAmaxBlocksPerSm;
  const int64_t strips = std::clamp<int64_t>(blocks_of(job.cols, kStripCols), 1, resident);
  p.slices = std::clamp<int64_t>(resident / strips, 1,
                                 std::max<int64_t>(blocks_of(job.rows, kBlockBand), 1));
  p.blocks = static_cast<int>(strips * p.slices);
  launch_block_amax(p, job.type, rows_begin_on_16(job) && job.cols % 8 == 0, stream);
}

}  // namespace

int64_t block_scratch_bytes(const BlockJob& job) {
  return (pieces_of(row_major(job)).words * 4 + 15) / 16 * 16;
}

void block_quantize(const BlockJob& given, void* scratch, int device, cudaStream_t stream) {
  BlockJob job = row_major(given);
  const Pieces pieces = pieces_of(job);
  auto* words = static_cast<uint32_t*>(scratch);
  if (given.column_sums && !job.column_sums) {
    JobParams sums{};
    sums.x = given.x;
    sums.rows = given.rows, sums.cols = given.cols;
    sums.row_stride = given.row_stride, sums.col_stride = given.col_stride;
    sums.column_sums = given.column_sums;
    sums.sums_type = given.sums_type;
    launch_sums_of_contiguous(sums, given.type, stream);
  }

  // maxima of rows
  bool reduces = false;
  for (int k = 0; k < 2; ++k) {
    BlockSide& side = job.side[k];
    if (!needs_row_amax(side)) continue;
    reduces = true;
    if (side.amax) {
      NF_CUDA(cudaMemsetAsync(side.amax, 0, padded(k ? job.cols : job.rows) * 4, stream));
    }
  }
  if (pieces.amax_words) NF_CUDA(cudaMemsetAsync(words, 0, pieces.amax_words * 4, stream));
  BlockJob asked = job;  // with its maxima's places
  for (int k = 0; k < 2; ++k) {
    if (needs_row_amax(job.side[k]) && job.side[k].amax == nullptr) {
      asked.side[k].amax = words + pieces.amax[k];
    }
  }
  if (reduces && job.rows * job.cols > 0) reduce_amax(asked, device, stream);

  // tiles
  if (!wanted(job.side[0]) && !wanted(job.side[1]) && !job.column_sums) return;
  BlockQuantizeParams p{};
  p.job = asked;
  if (job.column_sums) p.sum_partials = reinterpret_cast<float*>(words) + pieces.sums;
  for (int k = 0; k < 2; ++k) {
    const BlockSide& side = job.side[k];
    const int64_t size = k ? job.rows : job.cols;
    p.padded_rows[k] = padded(k ? job.cols : job.rows);
    p.ld[k] = side.form == Form::codes ? codes_cols(side.scaling, size) : padded32(size);
  }
  const int64_t row_tiles = tiles_along(job.rows), col_tiles = tiles_along(job.cols);
  NF_CHECK(row_tiles * col_tiles < int64_t{1} << 31,
           "quantize: expected fewer than 2^31 tiles, got ", row_tiles * col_tiles,
           " (split the tensor)");
  p.row_tiles = static_cast<uint32_t>(row_tiles), p.col_tiles = static_cast<uint32_t>(col_tiles);
  p.aligned = rows_begin_on_16(job);
  const int64_t resident = int64_t{device_of(device).multiprocessors} *
                           block_blocks_per_sm(static_cast<int>(size_of(job.type)));
  launch_block_quantize(p, static_cast<int>(std::min(row_tiles * col_tiles, resident)), stream);
  if (job.column_sums) {
    launch_block_sums(p.sum_partials, row_tiles, job.cols, job.column_sums, job.sums_type, stream);
  }
}

}  // namespace narrowfloat
