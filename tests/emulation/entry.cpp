// What the test of the tensor kernels calls: csrc's quantizing host code and kernels, compiled for
// the CPU. The test puts the rewritten kernels where they are included.
#include "cuda_on_cpu.h"
// after it
#include "pretended_device.h"

#include "quantize/amax_history.rewritten.h"
#include "quantize/tensor.cpp"
#include "quantize/tensor_amax_kernels.rewritten.h"
#include "quantize/tensor_kernels.rewritten.h"
// its table is read once a device: a test takes another number for another device
#include "api/device.cpp"

extern "C" {

struct TestJob {  // as test_kernels_emulated.py lays it out
  const void* x;
  int64_t type, rows, cols, row_stride, col_stride, format;
  uint8_t* q_rows;
  uint8_t* q_columns;
  float* scale;
  int64_t scale_given;
  void* column_sums;
  int64_t sums_type;
  float* history;  // or null
  int64_t width, guarded, joins;
};

// Returns the number of launches that quantize, negative where the first measures too, 0 if it
// threw.
int64_t run_quantize(const TestJob* jobs, int64_t count, int64_t device, int64_t multiprocessors,
                     int64_t cooperative) try {
  using namespace narrowfloat;
  g_multiprocessors = static_cast<int>(multiprocessors);
  g_cooperative = static_cast<int>(cooperative);
  QuantizeJob real[kMaxJobs];
  for (int64_t j = 0; j < count; ++j) {
    const TestJob& t = jobs[j];
    real[j] = {t.x,
               static_cast<Real>(t.type),
               t.rows,
               t.cols,
               t.row_stride,
               t.col_stride,
               static_cast<Element>(t.format),
               t.q_rows,
               t.q_columns,
               t.scale,
               t.scale_given != 0,
               t.column_sums,
               static_cast<Real>(t.sums_type),
               {t.history, static_cast<int>(t.width), t.guarded != 0, t.joins != 0}};
  }
  const QuantizePlan plan = plan_quantize(real, static_cast<int>(count), static_cast<int>(device));
  std::vector<uint32_t> scratch(plan.scratch_bytes / 4 + 8, 0xffffffffu);
  const auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 15) / 16 * 16;
  quantize(plan, reinterpret_cast<void*>(aligned), nullptr);
  return plan.step[0].amax_pass == AmaxPass::within ? -plan.steps : plan.steps;
} catch (const std::exception& error) {
  fprintf(stderr, "%s\n", error.what());
  return 0;
}

int64_t run_roll(float* const* layers, int64_t count, int64_t rows, int64_t width, int64_t latest,
                 double factor) try {
  const std::vector<uintptr_t> addresses(reinterpret_cast<const uintptr_t*>(layers),
                                         reinterpret_cast<const uintptr_t*>(layers) + count);
  narrowfloat::roll_histories(
      addresses,
      {static_cast<int>(rows), static_cast<int>(width), latest != 0, static_cast<float>(factor)},
      nullptr);
  return 1;
} catch (const std::exception& error) {
  fprintf(stderr, "%s\n", error.what());
  return 0;
}

}  // extern "C"
