// What the FP4 test calls: csrc's host code and kernels, compiled for the CPU.
#include "cuda_on_cpu.h"
// after it
#include "pretended_device.h"

#include "quantize/fp4.cpp"
#include "quantize/fp4_amax_kernels.rewritten.h"
#include "quantize/fp4_dequantize.rewritten.h"
#include "quantize/fp4_kernels.rewritten.h"
// its table is read once a device: a test takes another number for another device
#include "api/device.cpp"

extern "C" {

struct TestSide {  // as test_fp4_kernels_emulated.py lays it out
  int64_t form, stochastic, rotated, four_over_six, scale_up;
  void *data, *scales, *tensor_scale;
};

struct TestJob {
  const void* x;
  int64_t type, rows, cols, row_stride, col_stride, mx, square;
  TestSide side[2];
  const int64_t* seed;
  void* column_sums;
};

int64_t run_fp4(const TestJob* t, int64_t device, int64_t multiprocessors) try {
  using namespace narrowfloat;
  g_multiprocessors = static_cast<int>(multiprocessors);
  Fp4Job job{};
  job.x = t->x;
  job.type = static_cast<Real>(t->type);
  job.rows = t->rows, job.cols = t->cols;
  job.row_stride = t->row_stride, job.col_stride = t->col_stride;
  job.mx = t->mx, job.square = t->square;
  for (int k = 0; k < 2; ++k) {
    const TestSide& from = t->side[k];
    Fp4Side& to = job.side[k];
    to.form = static_cast<Form>(from.form);
    to.stochastic = from.stochastic, to.rotated = from.rotated;
    to.four_over_six = from.four_over_six, to.scale_up = from.scale_up;
    to.codes = static_cast<uint8_t*>(from.data);
    to.operand = from.data;
    to.scales = static_cast<uint8_t*>(from.scales);
    to.tensor_scale = static_cast<float*>(from.tensor_scale);
  }
  job.scales = static_cast<float*>(t->side[0].tensor_scale);  // where the test has all of them
  job.seed = t->seed;
  job.column_sums = t->column_sums;
  job.sums_type = Real::f32;
  const int number = static_cast<int>(device);
  std::vector<uint32_t> scratch(fp4_scratch_bytes(job, number) / 4 + 8, 0xffffffffu);
  const auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 15) / 16 * 16;
  fp4_quantize(job, reinterpret_cast<void*>(aligned), number, nullptr);
  return 1;
} catch (const std::exception& error) {
  fprintf(stderr, "%s\n", error.what());
  return 0;
}

int64_t run_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols,
                       void* operand, int64_t device, int64_t multiprocessors) try {
  g_multiprocessors = static_cast<int>(multiprocessors);
  narrowfloat::fp4_dequantize(codes, scales, rows, cols, operand, static_cast<int>(device),
                              nullptr);
  return 1;
} catch (const std::exception& error) {
  fprintf(stderr, "%s\n", error.what());
  return 0;
}

}  // extern "C"
