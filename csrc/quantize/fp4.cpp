// Quantizing to FP4: the launches, their grids, where partials lie.
#include "quantize/fp4.h"

#include <algorithm>

#include "api/check.h"
#include "api/device.h"
#include "quantize/fp4_kernels.h"

namespace narrowfloat {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool wanted(const Fp4Side& side) { return side.form != Form::none; }

bool rotated_rows(const Fp4Job& job) { return wanted(job.side[0]) && job.side[0].rotated; }

struct AmaxShape {
  int blocks;
  int64_t slices;
};

// As many blocks as the device holds. Where columns are summed each has a strip of them and a slice
// of the bands of rows, which leaves some of the device's places empty.
AmaxShape amax_shape(const Fp4Job& job, int device) {
  const int64_t resident = int64_t{device_of(device).multiprocessors} * kFp4AmaxBlocksPerSm;
  const int64_t strip = 32 * fp4_lane_columns(job.type);
  const int64_t strips = std::clamp<int64_t>(ceil_div(job.cols, strip), 1, resident);
  const int64_t bands = std::max<int64_t>(ceil_div(job.rows, kFp4Band), 1);
  if (!job.column_sums) {
    const int64_t units = std::max<int64_t>(ceil_div(job.cols, strip), 1) * bands;
    return {static_cast<int>(std::min(units, resident)), 1};
  }
  const int64_t slices = std::clamp<int64_t>(resident / strips, 1, bands);
  return {static_cast<int>(strips * slices), slices};
}

int rotated_blocks(const Fp4Job& job, int device) {
  const int64_t groups = job.rows * ceil_div(job.cols, kGroup);
  return static_cast<int>(
      std::clamp<int64_t>(ceil_div(groups, kFp4Threads), 1,
                          int64_t{device_of(device).multiprocessors} * kFp4AmaxBlocksPerSm));
}

// Partials in the scratch: maxima of the sides, then sums.
struct Partials {
  AmaxShape shape;
  int rotated = 0;  // blocks of the launch for rotated rows
  int64_t bytes = 0;
};

Partials partials_of(const Fp4Job& job, int device) {
  Partials p{amax_shape(job, device)};
  if (rotated_rows(job)) p.rotated = rotated_blocks(job, device);
  const int64_t words =
      2 * p.shape.blocks + p.rotated + (job.column_sums ? p.shape.slices * job.cols : 0);
  p.bytes = ceil_div(words * 4, 16) * 16;
  return p;
}

// `neighbours` of every row lie in aligned words of `bytes`.
bool aligned(const Fp4Job& job, int64_t bytes) {
  return job.col_stride == 1 && job.row_stride * size_of(job.type) % bytes == 0 &&
         job.cols * size_of(job.type) % bytes == 0 &&
         reinterpret_cast<uintptr_t>(job.x) % bytes == 0;
}

}  // namespace

int64_t fp4_scratch_bytes(const Fp4Job& job, int device) { return partials_of(job, device).bytes; }

void fp4_quantize(const Fp4Job& job, void* scratch, int device, cudaStream_t stream) {
  // places in a row of bf16 are 32 bits, in bytes
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024;
  NF_CHECK(job.rows <= kMost && job.cols <= kMost, "fp4: expected at most ", kMost,
           " rows and columns, got ", job.rows, " x ", job.cols, " (split the tensor)");
  const Partials partials = partials_of(job, device);
  auto* words = static_cast<uint32_t*>(scratch);
  const int blocks = partials.shape.blocks;
  Fp4AmaxParams amax{};
  amax.job = job;
  amax.blocks = blocks;
  amax.slices = partials.shape.slices;
  amax.aligned = aligned(job, 8);
  const bool apart = rotated_rows(job);
  if (wanted(job.side[0]) && !apart) amax.amax[0] = words;
  if (wanted(job.side[1])) amax.amax[1] = words + blocks;
  if (job.column_sums) {
    amax.sum_partials = reinterpret_cast<float*>(words + 2 * blocks + partials.rotated);
  }
  Fp4QuantizeParams params{};
  params.job = job;
  params.amax[0] = words, params.amax[1] = words + blocks;
  params.amax_count[0] = params.amax_count[1] = blocks;
  params.sum_partials = amax.sum_partials;
  params.sum_count = amax.slices;
  params.aligned = aligned(job, 16);
  // the kernel counts tiles in 32 bits: those of 2^32 tiles have 8 TiB of codes at least
  const int64_t across = ceil_div(job.cols, kFp4Tile);
  params.col_tiles = static_cast<int>(across);
  params.tiles = ceil_div(job.rows, kFp4Tile) * across;
  const int64_t sizes[2] = {job.rows, job.cols};
  for (int k = 0; k < 2; ++k) {
    const int64_t contracted = sizes[1 - k];
    params.padded[k] = static_cast<int>(padded(sizes[k]));
    params.groups[k] = static_cast<int>(fp4_padded(contracted) / kGroup);
    params.numbers[k] = static_cast<int>(ceil_div(contracted, kGroup));
    params.chunks[k] = static_cast<int>(ceil_div(contracted, kGroup * kScaleGroups));
  }
  if (apart) {
    Fp4AmaxParams rotated = amax;
    rotated.amax[0] = words + 2 * blocks;
    rotated.blocks = partials.rotated;
    launch_fp4_amax_rotated_rows(rotated, stream);
    params.amax[0] = rotated.amax[0];
    params.amax_count[0] = partials.rotated;
  }
  launch_fp4_amax(amax, stream);
  const Device own = device_of(device);
  const int grid = static_cast<int>(
      std::clamp<int64_t>(params.tiles, 1, int64_t{own.multiprocessors} * kFp4BlocksPerSm));
  launch_fp4_quantize(params, grid, own.overlaps, stream);
}

void fp4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols,
                    void* operand, int device, cudaStream_t stream) {
  const int64_t groups = fp4_padded(cols) / kGroup;
  // in 32 bits, as above
  const int64_t tiles = ceil_div(padded(rows), kScaleRows) * ceil_div(groups, kFp4DequantizeGroups);
  if (tiles == 0) return;
  const int64_t chunks = ceil_div(cols, kGroup * kScaleGroups);
  const int64_t resident = int64_t{device_of(device).multiprocessors} * 8;
  const int blocks = static_cast<int>(std::min(tiles, resident));
  launch_fp4_dequantize(codes, scales, padded(rows), groups, chunks, operand, blocks, stream);
}

}  // namespace narrowfloat
