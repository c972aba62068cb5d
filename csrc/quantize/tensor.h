// Quantizing tensors with one scale each: the structs between host and kernels, no torch headers.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace narrowfloat {

// formats.py gives the same numbers; the last two are operands of GEMMs only
enum class Element : int { e4m3 = 0, e5m2 = 1, e2m1 = 2, bf16 = 3 };
enum class Real : int { f32 = 0, bf16 = 1, f16 = 2 };

constexpr int64_t kPad = 16;  // every quantized copy is zero-padded to multiples of this
constexpr int64_t padded(int64_t size) { return (size + kPad - 1) / kPad * kPad; }
inline int64_t size_of(Real type) { return type == Real::f32 ? 4 : 2; }

// Delayed scaling: the amax history of a tensor, on the device, one row of fp32 a tensor:
//   [0] the amax that its scale covers, 0: none yet
//   [1] the amax of all calls since the histories rolled
//   [2] kHistoryMark ^ the bits of [0]; anything else: the row says nothing, as fresh memory does
//   [3] 0
//   [4 ...] the amax of each step before, the newest first
// So a tensor is quantized while its amax is found. It is quantized again in the same call, decided
// on the device, where there is no scale yet, where it holds a NaN or an Inf, which a delayed scale
// would hide, and, if guarded, where it outgrew what the scale covers.
struct History {
  float* row = nullptr;
  int width = 0;  // of the row
  bool guarded = false;
  bool joins = false;  // this call counts for the scales to come
};
constexpr uint32_t kHistoryMark = 0x6e666831u;
constexpr int kHistoryFirst = 4;
constexpr int kLongestHistory = 1024;

// One tensor to quantize with one scale.
struct QuantizeJob {
  const void* x;  // [rows, cols], element (r, c) at r * row_stride + c * col_stride
  Real type;
  int64_t rows, cols, row_stride, col_stride;
  Element format;
  uint8_t* q_rows;     // [padded(rows), padded(cols)], or null
  uint8_t* q_columns;  // [padded(cols), padded(rows)], or null
  float* scale;        // [4], 16-byte aligned: scale, multiplier, 0, 0. Written, or read if given
  bool scale_given;
  void* column_sums;  // [cols], sum over the rows of x, or null
  Real sums_type;
  History history;  // instead of a scale given
};

constexpr int kMaxJobs = 2;

// When the amax of the tensors of a step is found.
enum class AmaxPass {
  before,      // by a launch of their own
  within,      // by the launch that quantizes: a grid so small that it keeps them in between
  overlapped,  // by a first launch that quantizes with delayed scales; a second one, which mostly
               // has nothing to do, where they do not hold
};

struct QuantizeStep {
  int first, count;  // jobs
  AmaxPass amax_pass;
};

// How a call will run, decided before its scratch is allocated.
struct QuantizePlan {
  QuantizeJob job[kMaxJobs];       // row-major: a column-major one comes as its transpose
  QuantizeJob sums_job[kMaxJobs];  // column sums that need a launch of their own
  int count;
  int device;
  QuantizeStep step[kMaxJobs];
  int steps;
  int64_t first_byte[kMaxJobs];  // of each job's partial results in the scratch
  int64_t scratch_bytes;
};

QuantizePlan plan_quantize(const QuantizeJob* jobs, int count, int device);

// Launches what `plan` says. scratch: 16-byte aligned, plan.scratch_bytes, needed until the stream
// passes the call. No host synchronization; deterministic.
void quantize(const QuantizePlan& plan, void* scratch, cudaStream_t stream);

}  // namespace narrowfloat
