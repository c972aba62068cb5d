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

// Few tiles of 128 rows leave multiprocessors idle; fp32 fills the registers with 64.
int tile_rows(const QuantizePlan& plan, Real type, int64_t elements) {
  if (type == Real::f32) return 64;
  return elements <= device_of(plan.device).multiprocessors * 2 * 128 * int64_t{kTileCols} ? 64
                                                                                           : 128;
}

int64_t tiles_of(const QuantizeJob& job, int rows) {
  return writes(job) ? ceil_div(job.rows, rows) * ceil_div(job.cols, kTileCols) : 0;
}

int grid_for(int64_t tiles, int device, bool measures) {
  const int64_t resident = int64_t{device_of(device).multiprocessors} * blocks_per_sm(measures);
  return static_cast<int>(std::clamp<int64_t>(tiles, 1, resident));
}

struct MeasureShape {
  int blocks;
  int64_t slices;
};

// As many blocks as the device holds, each a strip of columns and a slice of the bands of rows.
MeasureShape measure_shape(const QuantizeJob& job, int device) {
  const int64_t band = (job.type == Real::f32 ? 4 : 8) * (kThreads / 32);
  const int64_t resident = int64_t{device_of(device).multiprocessors} * blocks_per_sm(false);
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

int64_t total_elements(const QuantizePlan& plan) {
  int64_t elements = 0;
  for (int j = 0; j < plan.count; ++j) elements += plan.job[j].rows * plan.job[j].cols;
  return elements;
}

int64_t total_tiles(const QuantizePlan& plan, int rows) {
  int64_t tiles = 0;
  for (int j = 0; j < plan.count; ++j) tiles += tiles_of(plan.job[j], rows);
  return tiles;
}

Partials partials_of(const QuantizePlan& plan, int j) {
  const QuantizeJob& job = plan.job[j];
  Partials p;
  if (plan.together) {
    const int rows = tile_rows(plan, job.type, total_elements(plan));
    if (!job.scale_given) p.amax_count = grid_for(total_tiles(plan, rows), plan.device, true);
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
  const int64_t size = size_of(job.type);
  JobParams p{};
  p.x = job.x;
  p.rows = job.rows, p.cols = job.cols;
  p.row_stride = job.row_stride, p.col_stride = job.col_stride;
  p.row_tiles = ceil_div(job.rows, rows), p.col_tiles = ceil_div(job.cols, kTileCols);
  p.q_rows = job.q_rows, p.q_columns = job.q_columns;
  p.q_rows_ld = padded(job.cols), p.q_columns_ld = padded(job.rows);
  p.scale = job.scale;
  p.column_sums = job.column_sums;
  p.format = job.format;
  p.sums_type = job.sums_type;
  p.scale_given = job.scale_given;
  p.vectors = job.col_stride == 1 && job.row_stride * size % 16 == 0 && job.cols % 8 == 0 &&
              reinterpret_cast<uintptr_t>(job.x) % 16 == 0;
  return p;
}

JobParams with_partials(const QuantizePlan& plan, int j, int rows, void* scratch) {
  JobParams params = params_of(plan.job[j], rows);
  const Partials p = partials_of(plan, j);
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
  launch_measure(p, job.type, shape.blocks, shape.slices, stream);
}

// Jobs first .. first + count - 1 in one launch.
void write(const QuantizePlan& plan, int first, int count, void* scratch, cudaStream_t stream) {
  const Real type = plan.job[first].type;
  int64_t elements = 0, tiles = 0;
  for (int j = first; j < first + count; ++j) elements += plan.job[j].rows * plan.job[j].cols;
  const int rows = tile_rows(plan, type, elements);
  QuantizeParams params{};
  bool nothing = true;
  for (int j = first; j < first + count; ++j) {
    params.job[j - first] = with_partials(plan, j, rows, scratch);
    params.tiles[j - first] = tiles_of(plan.job[j], rows);
    tiles += params.tiles[j - first];
    nothing &= plan.job[j].scale_given && !plan.job[j].column_sums;
  }
  if (nothing && tiles == 0) return;
  launch_quantize(params, type, rows, plan.together, grid_for(tiles, plan.device, plan.together),
                  stream);
}

}  // namespace

QuantizePlan plan_quantize(const QuantizeJob* jobs, int count, int device) {
  NF_CHECK(count >= 1 && count <= kMaxJobs, "quantize: expected 1 or 2 tensors, got ", count);
  QuantizePlan plan{};
  plan.count = count;
  plan.device = device;
  int64_t bytes = 0;
  bool one_type = true, measures = false, all_write = true;
  for (int j = 0; j < count; ++j) {
    plan.job[j] = jobs[j];
    bytes += bytes_of(jobs[j]);
    one_type &= jobs[j].type == jobs[0].type;
    all_write &= writes(jobs[j]);
    measures |= !jobs[j].scale_given;
  }
  // What the L2 cache keeps is not read again from memory by the launch that measured it. Beyond
  // that two launches are as fast, and do not wait for the whole device as a grid barrier must.
  plan.together =
      one_type && measures && all_write && bytes <= device_of(device).l2_bytes * 2 / 3;
  for (int j = 0; j < count; ++j) {
    if (sums_apart(jobs[j])) plan.sums_job[j] = jobs[j];
    plan.job[j] = row_major(jobs[j]);
  }
  for (int j = 0; j < count; ++j) {
    plan.first_byte[j] = plan.scratch_bytes;
    plan.scratch_bytes += ceil_div(partials_of(plan, j).bytes, 16) * 16;
  }
  return plan;
}

void quantize(const QuantizePlan& plan, void* scratch, cudaStream_t stream) {
  for (int j = 0; j < plan.count; ++j) {
    const QuantizeJob& job = plan.sums_job[j];
    if (job.column_sums) launch_sums_of_contiguous(params_of(job, kTileCols), job.type, stream);
  }
  if (!plan.together) {
    for (int j = 0; j < plan.count; ++j) {
      const JobParams params = with_partials(plan, j, kTileCols, scratch);
      if (params.amax_partials || params.sum_partials) measure(plan, j, params, stream);
    }
    const bool one_launch = plan.count == 2 && plan.job[0].type == plan.job[1].type;
    if (plan.count == 2 && !one_launch) {
      write(plan, 0, 1, scratch, stream);
      write(plan, 1, 1, scratch, stream);
      return;
    }
  }
  write(plan, 0, plan.count, scratch, stream);
}

}  // namespace narrowfloat
