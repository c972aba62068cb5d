// How tensors with one scale are quantized: one launch or two, tile size, grid, where partials lie.
#include "quantize/tensor.h"

#include <algorithm>

#include "api/check.h"
#include "api/device.h"
#include "quantize/tensor_kernels.h"

namespace narrowfloat {
namespace {

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

// Tiles of 128 rows write the transposed copy in longer runs; tiles of 64 occupy more
// multiprocessors, and the first is fetched before the maxima are known. 64 rows of fp32 fill a
// thread's registers.
int tile_rows(const QuantizePlan& plan, const QuantizeStep& step) {
  if (step.amax_pass == AmaxPass::within) return kRowsOfSmall;
  if (plan.job[step.first].type == Real::f32) return 64;
  return tiles_of(plan, step, 128) <= resident_blocks(plan.device) * 3 / 2 ? 64 : 128;
}

int grid_for(int64_t tiles, int device) {
  return static_cast<int>(std::clamp<int64_t>(tiles, 1, resident_blocks(device)));
}

// Eight neighbours of a row lie in one or two aligned 16-byte words, in every row.
bool vectors(const QuantizeJob& job) {
  return job.col_stride == 1 && job.row_stride * size_of(job.type) % 16 == 0 && job.cols % 8 == 0 &&
         reinterpret_cast<uintptr_t>(job.x) % 16 == 0;
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

struct AmaxShape {
  int blocks;
  int64_t slices;
};

// Up to `most` blocks, each a strip of columns and a slice of the bands of rows.
AmaxShape amax_shape(const QuantizeJob& job, int64_t most) {
  const int64_t band = (job.type == Real::f32 ? 4 : 8) * (kThreads / 32);
  const int64_t strips = std::clamp<int64_t>(ceil_div(job.cols, kStripCols), 1, most);
  const int64_t slices =
      std::clamp<int64_t>(most / strips, 1, std::max<int64_t>(ceil_div(job.rows, band), 1));
  return {static_cast<int>(strips * slices), slices};
}

bool needs_pass(const QuantizeJob& job) { return !job.scale_given || job.column_sums; }

// What the device holds is shared among the tensors of a launch by their bytes.
AmaxShape amax_shape(const QuantizePlan& plan, const QuantizeStep& step, int j) {
  int64_t all = 0;
  for (int i = step.first; i < step.first + step.count; ++i) {
    if (needs_pass(plan.job[i])) all += bytes_of(plan.job[i]);
  }
  const int64_t resident = resident_blocks(plan.device);
  // in doubles, which do not overflow
  const double share =
      all ? static_cast<double>(bytes_of(plan.job[j])) / static_cast<double>(all) : 1.;
  const auto most = static_cast<int64_t>(static_cast<double>(resident) * share);
  return amax_shape(widened(plan.job[j]), std::max<int64_t>(most, 1));
}

struct Partials {
  int amax_count = 0;
  int64_t sum_count = 0;
  int64_t bytes = 0;  // amax first, then sums
};

Partials partials_of(const QuantizePlan& plan, const QuantizeStep& step, int j) {
  const QuantizeJob& job = plan.job[j];
  Partials p;
  if (step.amax_pass == AmaxPass::within) {
    if (!job.scale_given) p.amax_count = static_cast<int>(tiles_of(job, kRowsOfSmall));
    if (job.column_sums) p.sum_count = ceil_div(job.rows, kRowsOfSmall);
  } else if (step.amax_pass == AmaxPass::overlapped) {
    const int rows = tile_rows(plan, step);
    if (!job.scale_given) p.amax_count = grid_for(tiles_of(plan, step, rows), plan.device);
    if (job.column_sums) p.sum_count = ceil_div(job.rows, rows);
  } else {
    const AmaxShape shape = amax_shape(plan, step, j);
    if (!job.scale_given) p.amax_count = shape.blocks;
    if (job.column_sums) p.sum_count = shape.slices;
  }
  p.bytes = (p.amax_count + p.sum_count * job.cols) * 4;
  return p;
}

JobParams params_of(const QuantizeJob& job) {
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
  p.history = job.history;
  return p;
}

struct PartialsAt {
  uint32_t* amax;
  float* sums;
};

PartialsAt partials_at(const QuantizePlan& plan, const QuantizeStep& step, int j, void* scratch) {
  const Partials p = partials_of(plan, step, j);
  char* here = static_cast<char*>(scratch) + plan.first_byte[j];
  return {p.amax_count ? reinterpret_cast<uint32_t*>(here) : nullptr,
          p.sum_count ? reinterpret_cast<float*>(here) + p.amax_count : nullptr};
}

JobParams with_partials(const QuantizePlan& plan, const QuantizeStep& step, int j, void* scratch) {
  JobParams params = params_of(plan.job[j]);
  const Partials p = partials_of(plan, step, j);
  const PartialsAt at = partials_at(plan, step, j, scratch);
  params.amax_partials = at.amax;
  params.amax_count = p.amax_count;
  params.sum_partials = at.sums;
  params.sum_count = p.sum_count;
  return params;
}

// One launch for all of the step's tensors that want their amax or sums. Whether there was any.
bool reduce_amax(const QuantizePlan& plan, const QuantizeStep& step, void* scratch,
                 cudaStream_t stream) {
  AmaxParams params{};
  bool any = false, vectors_of_all = true;
  for (int i = 0; i < step.count; ++i) {
    const int j = step.first + i;
    if (!needs_pass(plan.job[j])) continue;
    const QuantizeJob job = widened(plan.job[j]);
    const AmaxShape shape = amax_shape(plan, step, j);
    const PartialsAt at = partials_at(plan, step, j, scratch);
    params.job[i] = {job.x,   job.rows, job.cols,     job.row_stride, job.col_stride,
                     at.amax, at.sums,  shape.slices, shape.blocks};
    vectors_of_all &= vectors(job);
    any = true;
  }
  if (any) launch_amax(params, plan.job[step.first].type, vectors_of_all, stream);
  return any;
}

void run(const QuantizePlan& plan, const QuantizeStep& step, void* scratch, cudaStream_t stream) {
  const int rows = tile_rows(plan, step);
  const int64_t tiles = tiles_of(plan, step, rows);
  const int grid = grid_for(tiles, plan.device);
  QuantizeParams params{};
  params.count = step.count;
  int64_t before = 0;
  for (int i = 0; i < step.count; ++i) {
    const int j = step.first + i;
    JobParams& job = params.job[i] = with_partials(plan, step, j, scratch);
    job.tiles = static_cast<uint32_t>(tiles_of(plan.job[j], rows));
    job.first_block = static_cast<uint32_t>((grid - before % grid) % grid);
    before += job.tiles;
  }
  const QuantizeJob& first = plan.job[step.first];
  if (step.amax_pass == AmaxPass::within) {
    launch_amax_and_quantize(params, first.type, vectors(first), stream);
    return;
  }
  if (step.amax_pass == AmaxPass::overlapped) {
    launch_quantize_and_amax(params, first.type, rows, vectors(first), grid, stream);
    launch_quantize(params, first.type, rows, device_of(plan.device).overlaps, vectors(first), grid,
                    stream);
    return;
  }
  const bool reduced = reduce_amax(plan, step, scratch, stream);
  if (tiles == 0 && !reduced) return;
  launch_quantize(params, first.type, rows, reduced && device_of(plan.device).overlaps,
                  vectors(first), grid, stream);
}

// A launch costs the host more than the grid barrier costs the device as long as a block has one
// tile. Beyond that two launches are faster, and do not wait for the whole device as a grid must.
bool small(const QuantizePlan& plan, int first, int count) {
  int64_t tiles = 0;
  bool any_measured = false;
  for (int j = first; j < first + count; ++j) {
    const QuantizeJob& job = plan.job[j];
    if (!writes(job) || (job.scale_given && job.column_sums)) return false;
    tiles += tiles_of(job, kRowsOfSmall);
    any_measured |= !job.scale_given;
  }
  return any_measured && tiles > 0 && tiles <= resident_blocks(plan.device) &&
         device_of(plan.device).cooperative;
}

AmaxPass amax_pass_of(const QuantizePlan& plan, int first, int count) {
  if (small(plan, first, count)) return AmaxPass::within;
  for (int j = first; j < first + count; ++j) {
    if (plan.job[j].history.row) return AmaxPass::overlapped;
  }
  return AmaxPass::before;
}

// Its scale is known, or guessed by its history, before its amax is.
bool begins_at_once(const QuantizeJob& job) { return job.history.row || job.scale_given; }

// Tensors of one type are quantized together: fewer launches, and their ends overlap.
void choose_steps(QuantizePlan& plan) {
  const QuantizeJob &a = plan.job[0], &b = plan.job[1];
  const bool alike =
      a.type == b.type && vectors(a) == vectors(b) &&
      ((!a.history.row && !b.history.row) || (begins_at_once(a) && begins_at_once(b)));
  if (plan.count == 2 && alike) {
    plan.step[plan.steps++] = {0, 2, amax_pass_of(plan, 0, 2)};
    return;
  }
  for (int j = 0; j < plan.count; ++j) plan.step[plan.steps++] = {j, 1, amax_pass_of(plan, j, 1)};
}

}  // namespace

QuantizePlan plan_quantize(const QuantizeJob* jobs, int count, int device) {
  NF_CHECK(count >= 1 && count <= kMaxJobs, "quantize: expected 1 or 2 tensors, got ", count);
  QuantizePlan plan{};
  plan.count = count;
  plan.device = device;
  for (int j = 0; j < count; ++j) {
    NF_CHECK(!jobs[j].history.row || (writes(jobs[j]) && !jobs[j].scale_given),
             "quantize: expected a tensor with a history to be quantized by it");
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
    if (job.column_sums) launch_sums_of_contiguous(params_of(job), job.type, stream);
  }
  for (int s = 0; s < plan.steps; ++s) run(plan, plan.step[s], scratch, stream);
}

}  // namespace narrowfloat
