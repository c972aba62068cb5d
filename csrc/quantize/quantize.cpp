// One call that quantizes: which kernels take which orientation of which tensor, in which launches.
#include "quantize/quantize.h"

#include <algorithm>

#include "api/check.h"
#include "quantize/block.h"
#include "quantize/fp4.h"

namespace narrowfloat {
namespace {

constexpr int kMaxTensorJobs = 2 * kMaxTensors;

bool wants(const QuantizeSide& side, Family family) {
  if (side.form == Form::none) return side.amax && family == Family::block;
  return family_of(side.cast.scaling) == family;
}

bool sums(const QuantizeTensor& t, Family family) {
  return t.column_sums && t.sums_family == family;
}

// Where jobs of every family say the same.
template <typename Job>
Job job_of(const QuantizeTensor& t, bool with_sums) {
  Job job{};
  job.x = t.x;
  job.type = t.type;
  job.rows = t.rows, job.cols = t.cols;
  job.row_stride = t.row_stride, job.col_stride = t.col_stride;
  if (with_sums) job.column_sums = t.column_sums, job.sums_type = t.sums_type;
  return job;
}

// rows, columns: what the job quantizes, or null; both have one cast and one scale.
QuantizeJob tensor_job(const QuantizeTensor& t, const QuantizeSide* rows,
                       const QuantizeSide* columns, bool with_sums) {
  auto job = job_of<QuantizeJob>(t, with_sums);
  job.scale_given = true;  // nothing is measured for sums alone
  if (const QuantizeSide* any = rows ? rows : columns) {
    job.format = any->cast.element;
    job.scale = any->scale;
    job.scale_given = any->scale_given;
    if (!any->scale_given) job.history = t.history;
  }
  if (rows) job.q_rows = static_cast<uint8_t*>(rows->data);
  if (columns) job.q_columns = static_cast<uint8_t*>(columns->data);
  return job;
}

// How many there are.
int tensor_jobs(const QuantizeTensor& t, QuantizeJob* jobs) {
  const QuantizeSide* rows = wants(t.side[0], Family::tensor) ? &t.side[0] : nullptr;
  const QuantizeSide* columns = wants(t.side[1], Family::tensor) ? &t.side[1] : nullptr;
  const bool with_sums = sums(t, Family::tensor);
  if (!rows && !columns && !with_sums) return 0;
  if (rows && columns && (rows->cast != columns->cast || rows->scale != columns->scale)) {
    jobs[0] = tensor_job(t, rows, nullptr, with_sums);
    jobs[1] = tensor_job(t, nullptr, columns, false);
    return 2;
  }
  jobs[0] = tensor_job(t, rows, columns, with_sums);
  return 1;
}

bool has_block_job(const QuantizeTensor& t) {
  return wants(t.side[0], Family::block) || wants(t.side[1], Family::block) ||
         sums(t, Family::block);
}

BlockJob block_job(const QuantizeTensor& t) {
  auto job = job_of<BlockJob>(t, sums(t, Family::block));
  for (int k = 0; k < 2; ++k) {
    const QuantizeSide& from = t.side[k];
    if (!wants(from, Family::block)) continue;
    BlockSide& to = job.side[k];
    to.form = from.form;
    to.scaling = from.cast.scaling;
    to.element = from.cast.element;
    to.square = from.cast.square;
    to.data = from.data;
    to.scales = from.scales;
    to.amax = from.amax;
    to.amax_given = from.amax_given;
  }
  return job;
}

void fill(Fp4Side& to, const QuantizeSide& from) {
  to.form = from.form;
  to.stochastic = from.cast.stochastic;
  to.rotated = from.cast.hadamard;
  to.four_over_six = from.cast.four_over_six;
  to.scale_up = from.cast.scale_up;
  if (from.form == Form::operand) {
    to.operand = from.data;
  } else {
    to.codes = static_cast<uint8_t*>(from.data);
    to.scales = static_cast<uint8_t*>(from.scales);
  }
  to.tensor_scale = from.scale;
  to.alpha = from.alpha;
  to.other_scale = from.other_scale;
}

// Squares are the same numbers in both orientations, if both choose their scales alike.
bool are_unlike_squares(const QuantizeTensor& t) {
  const Cast &a = t.side[0].cast, &b = t.side[1].cast;
  return a.square && b.square && (a.four_over_six != b.four_over_six || a.scale_up != b.scale_up);
}

// Both sides in one where they share their scaling. How many there are.
int fp4_jobs(const QuantizeTensor& t, const char* op, Fp4Job* jobs) {
  int count = 0;
  for (int k = 0; k < 2; ++k) {
    const QuantizeSide& side = t.side[k];
    if (!wants(side, Family::fp4)) continue;
    const bool mx = side.cast.scaling == Scaling::mxfp4, square = side.cast.square;
    if (count == 0 || jobs[0].mx != mx || jobs[0].square != square || are_unlike_squares(t)) {
      jobs[count] = job_of<Fp4Job>(t, sums(t, Family::fp4) && count == 0);
      jobs[count].mx = mx, jobs[count].square = square;
      ++count;
    }
    Fp4Job& job = jobs[count - 1];
    fill(job.side[k], side);
    job.scales = side.scale;  // [1 ... 3] become zeros
    if (side.cast.stochastic) {
      NF_CHECK(t.seed, op, ": expected a seed, int64 [2], for stochastic rounding, got none");
      job.seed = t.seed;
    }
  }
  if (count == 0 && sums(t, Family::fp4)) jobs[count++] = job_of<Fp4Job>(t, true);
  return count;
}

}  // namespace

// All jobs in their order; what they need of the scratch together.
int64_t QuantizeCall::walk(uint8_t* scratch, cudaStream_t stream, bool launches) const {
  int64_t bytes = 0;
  QuantizeJob jobs[kMaxTensorJobs];
  int jobs_count = 0;
  for (int i = 0; i < count; ++i) jobs_count += tensor_jobs(tensor[i], jobs + jobs_count);
  for (int j = 0; j < jobs_count; j += kMaxJobs) {
    const QuantizePlan plan = plan_quantize(jobs + j, std::min(kMaxJobs, jobs_count - j), device);
    if (launches) quantize(plan, scratch + bytes, stream);
    bytes += plan.scratch_bytes;
  }
  for (int i = count - 1; i >= 0; --i) {
    if (has_block_job(tensor[i])) {
      const BlockJob job = block_job(tensor[i]);
      if (launches) block_quantize(job, scratch + bytes, device, stream);
      bytes += block_scratch_bytes(job);
    }
    Fp4Job fp4[2];
    const int fp4_count = fp4_jobs(tensor[i], op, fp4);
    for (int j = 0; j < fp4_count; ++j) {
      if (launches) fp4_quantize(fp4[j], scratch + bytes, device, stream);
      bytes += fp4_scratch_bytes(fp4[j], device);
    }
  }
  return bytes;
}

int64_t QuantizeCall::scratch_bytes() const { return walk(nullptr, nullptr, false); }

void QuantizeCall::run(void* scratch, cudaStream_t stream) const {
  walk(static_cast<uint8_t*>(scratch), stream, true);
}

int64_t codes_ld(const Cast& cast, int64_t cols) {
  return is_fp4(cast.scaling) ? fp4_padded(cols) : codes_cols(cast.scaling, cols);
}

int64_t codes_bytes(const Cast& cast, int64_t rows, int64_t cols) {
  return padded(rows) * codes_ld(cast, cols) / (is_fp4(cast.scaling) ? 2 : 1);
}

int64_t scales_bytes(const Cast& cast, int64_t rows, int64_t cols) {
  switch (family_of(cast.scaling)) {
    case Family::tensor:
      return 0;
    case Family::fp4:
      return fp4_scale_bytes(rows, cols);
    default:
      return scale_bytes(cast.scaling, cast.square, rows, cols);
  }
}

}  // namespace narrowfloat
