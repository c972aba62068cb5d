// Decides how a quantizing call runs: one launch or two, tile size, grid, and where partials lie.
#include "quantize.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "check.h"
#include "quantize_kernels.h"

namespace narrowfloat {
namespace {

struct Device {
  int multiprocessors;
  int64_t l2_bytes;
};

// Read once a device; the values never change.
Device device_of(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int64_t>, kMaxDevices> l2{};
  static std::array<std::atomic<int>, kMaxDevices> multiprocessors{};
  NF_CHECK(index >= 0 && index < kMaxDevices, "quantize: expected a device below ", kMaxDevices,
           ", got ", index);
  if (multiprocessors[index] == 0) {
    int bytes = 0, count = 0;
    NF_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, index));
    NF_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, index));
    l2[index] = bytes;
    multiprocessors[index] = count;
  }
  return {multiprocessors[index], l2[index]};
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t bytes_of(const QuantizeJob& job) { return job.rows * job.cols * size_of(job.type); }

bool writes(const QuantizeJob& job) { return job.q_rows || job.q_columns; }

// A column-major matrix is its transpose in row-major: exchange the copies and nothing is
// transposed. Its column sums then are sums of contiguous runs.
bool column_major(const QuantizeJob& job) {
  return job.row_stride == 1 && job.col_stride != 1 && job.cols > 1;
}

bool sums_apart(const QuantizeJob& job) { return job.column_sums && column_major(job); }

QuantizeJob row_major(QuantizeJob job) {
  if (column_major(job)) {
    std::swap(job.rows, job.cols);
    std::swap(job.row_stride, job.col_stride);
    std::swap(job.q_rows, job.q_columns);
    job.column_sums = nullptr;
  }
  return job;
}

int64_t tiles_of(const QuantizeJob& job, int rows) {
  return writes(job) ? ceil_div(job.rows, rows) * ceil_div(job.cols, kTileCols) : 0;
}

int64_t tiles_of(const QuantizePlan& plan, const QuantizeStep& step, int rows) {
  int64_t tiles = 0;
  for (int j = step.first; j < step.first + step.count; ++j) tiles += tiles_of(plan.job[j], rows);
  NF_CHECK(tiles < int64_t{1} << 31, "quantize: expected fewer than 2^31 tiles, got ", tiles,
           " (split the tensor)");
  return tiles;
}

int64_t resident_blocks(int device) {
  return int64_t{device_of(device).multiprocessors} * kBlocksPerSm;
}

// Tiles of 128 rows write the transposed copy in longer runs, tiles of 64 occupy more
// multiprocessors; 64 rows of fp32 fill a thread's registers. A launch that measures holds one tile
// a block in registers: 128 rows where that lets it hold all that 64 do not.
int tile_rows(const QuantizePlan& plan, const QuantizeStep& step) {
  if (plan.job[step.first].type == Real::f32) return 64;
  const int64_t resident = resident_blocks(plan.device), tiles = tiles_of(plan, step, 128);
  if (step.fused) return tiles_of(plan, step, 64) > resident && tiles <= resident ? 128 : 64;
  return tiles <= resident / 2 ? 64 : 128;
}

int grid_for(int64_t tiles, int device) {
  return static_cast<int>(std::clamp<int64_t>(tiles, 1, resident_blocks(device)));
}

// Eight neighbours of a row lie in one or two aligned 16-byte words, in every row.
bool vectors(const QuantizeJob& job) {
  return job.col_stride == 1 && job.row_stride * size_of(job.type) % 16 == 0 && job.cols % 8 == 0 &&
         reinterpret_cast<uintptr_t>(job.x) % 16 == 0;
}

struct MeasureShape {
  int blocks;
  int64_t slices;
};

// As many blocks as the device holds, each a strip of columns and a slice of the bands of rows.
MeasureShape measure_shape(const QuantizeJob& job, int device) {
  const int64_t band = (job.type == Real::f32 ? 4 : 8) * (kThreads / 32);
  const int64_t resident = resident_blocks(device);
  const int64_t strips = std::clamp<int64_t>(ceil_div(job.cols, kStripCols), 1, resident);
  const int64_t slices =
      std::clamp<int64_t>(resident / strips, 1, std::max<int64_t>(ceil_div(job.rows, band), 1));
  return {static_cast<int>(strips * slices), slices};
}

// Without sums the shape does not matter: a narrow contiguous matrix is read in full strips.
QuantizeJob widened(QuantizeJob job) {
  const int64_t elements = job.rows * job.cols;
  if (!job.column_sums && job.cols < kStripCols && job.row_stride == job.cols &&
      job.col_stride == 1 && elements % kStripCols == 0) {
    job.rows = elements / kStripCols;
    job.cols = job.row_stride = kStripCols;
  }
  return job;
}

struct Partials {
  int amax_count = 0;
  int64_t sum_count = 0;
  int64_t bytes = 0;  // amax first, then sums
};

Partials partials_of(const QuantizePlan& plan, const QuantizeStep& step, int j) {
  const QuantizeJob& job = plan.job[j];
  Partials p;
  if (step.fused) {
    const int rows = tile_rows(plan, step);
    if (!job.scale_given) p.amax_count = grid_for(tiles_of(plan, step, rows), plan.device);
    if (job.column_sums) p.sum_count = ceil_div(job.rows, rows);
  } else {
    const MeasureShape shape = measure_shape(widened(job), plan.device);
    if (!job.scale_given) p.amax_count = shape.blocks;
    if (job.column_sums) p.sum_count = shape.slices;
  }
  p.bytes = (p.amax_count + p.sum_count * job.cols) * 4;
  return p;
}

JobParams params_of(const QuantizeJob& job, int rows) {
  JobParams p{};
  p.x = job.x;
  p.rows = job.rows, p.cols = job.cols;
  p.row_stride = job.row_stride, p.col_stride = job.col_stride;
  p.col_tiles = static_cast<uint32_t>(ceil_div(job.cols, kTileCols));
  p.q_rows = job.q_rows, p.q_columns = job.q_columns;
  p.q_rows_ld = padded(job.cols), p.q_columns_ld = padded(job.rows);
  p.scale = job.scale;
  p.column_sums = job.column_sums;
  p.format = job.format;
  p.sums_type = job.sums_type;
  p.scale_given = job.scale_given;
  return p;
}

JobParams with_partials(const QuantizePlan& plan, const QuantizeStep& step, int j, int rows,
                        void* scratch) {
  JobParams params = params_of(plan.job[j], rows);
  const Partials p = partials_of(plan, step, j);
  char* here = static_cast<char*>(scratch) + plan.first_byte[j];
  params.amax_partials = p.amax_count ? reinterpret_cast<uint32_t*>(here) : nullptr;
  params.amax_count = p.amax_count;
  params.sum_partials = p.sum_count ? reinterpret_cast<float*>(here) + p.amax_count : nullptr;
  params.sum_count = p.sum_count;
  return params;
}

void measure(const QuantizePlan& plan, int j, const JobParams& params, cudaStream_t stream) {
  const QuantizeJob job = widened(plan.job[j]);
  const MeasureShape shape = measure_shape(job, plan.device);
  JobParams p = params_of(job, kTileCols);
  p.amax_partials = params.amax_partials;
  p.sum_partials = params.sum_partials;
  launch_measure(p, job.type, vectors(job), shape.blocks, shape.slices, stream);
}

void run(const QuantizePlan& plan, const QuantizeStep& step, void* scratch, cudaStream_t stream) {
  const int rows = tile_rows(plan, step);
  const int64_t tiles = tiles_of(plan, step, rows);
  const int grid = grid_for(tiles, plan.device);
  QuantizeParams params{};
  params.count = step.count;
  bool scales_or_sums = false;
  int64_t before = 0;
  for (int i = 0; i < step.count; ++i) {
    const int j = step.first + i;
    JobParams& job = params.job[i] = with_partials(plan, step, j, rows, scratch);
    job.tiles = static_cast<uint32_t>(tiles_of(plan.job[j], rows));
    job.first_block = static_cast<uint32_t>((grid - before % grid) % grid);
    before += job.tiles;
    scales_or_sums |= !plan.job[j].scale_given || plan.job[j].column_sums;
    if ((job.amax_partials || job.sum_partials) && !step.fused) measure(plan, j, job, stream);
  }
  if (tiles == 0 && !scales_or_sums) return;
  const QuantizeJob& first = plan.job[step.first];
  launch_quantize(params, first.type, rows, step.fused, vectors(first), grid, stream);
}

// What the L2 cache keeps is not read again from memory by the launch that measured it. Beyond that
// two launches are as fast, and do not wait for the whole device as a grid barrier must.
void choose_steps(QuantizePlan& plan) {
  const int64_t fits = device_of(plan.device).l2_bytes * 2 / 3;
  const auto fusible = [&](const QuantizeJob& job) {
    return !job.scale_given && writes(job) && bytes_of(job) <= fits;
  };
  const QuantizeJob &a = plan.job[0], &b = plan.job[1];
  if (plan.count == 2 && a.type == b.type && vectors(a) == vectors(b)) {
    const bool small = writes(a) && writes(b) && bytes_of(a) + bytes_of(b) <= fits;
    if (small ? fusible(a) || fusible(b) : !fusible(a) && !fusible(b)) {
      plan.step[plan.steps++] = {0, 2, small};
      return;
    }
  }
  for (int j = 0; j < plan.count; ++j) plan.step[plan.steps++] = {j, 1, fusible(plan.job[j])};
}

}  // namespace

QuantizePlan plan_quantize(const QuantizeJob* jobs, int count, int device) {
  NF_CHECK(count >= 1 && count <= kMaxJobs, "quantize: expected 1 or 2 tensors, got ", count);
  QuantizePlan plan{};
  plan.count = count;
  plan.device = device;
  for (int j = 0; j < count; ++j) {
    if (sums_apart(jobs[j])) plan.sums_job[j] = jobs[j];
    plan.job[j] = row_major(jobs[j]);
  }
  choose_steps(plan);
  for (int s = 0; s < plan.steps; ++s) {
    for (int j = plan.step[s].first; j < plan.step[s].first + plan.step[s].count; ++j) {
      plan.first_byte[j] = plan.scratch_bytes;
      plan.scratch_bytes += ceil_div(partials_of(plan, plan.step[s], j).bytes, 16) * 16;
    }
  }
  return plan;
}

void quantize(const QuantizePlan& plan, void* scratch, cudaStream_t stream) {
  for (int j = 0; j < plan.count; ++j) {
    const QuantizeJob& job = plan.sums_job[j];
    if (job.column_sums) launch_sums_of_contiguous(params_of(job, kTileCols), job.type, stream);
  }
  for (int s = 0; s < plan.steps; ++s) run(plan, plan.step[s], scratch, stream);
}

}  // namespace narrowfloat
