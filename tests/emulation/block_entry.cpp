// What the test of FP8 with rowwise and blockwise scaling calls: csrc's host code and kernels,
// compiled for the CPU.
#include "cuda_on_cpu.h"
// after it
#include "pretended_device.h"

extern "C" cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}

#include "quantize/tensor_amax_kernels.rewritten.h"
// its sums of contiguous columns
#include "quantize/block.cpp"
#include "quantize/block_amax_kernels.rewritten.h"
#include "quantize/block_dequantize.rewritten.h"
#include "quantize/block_kernels.rewritten.h"
// its table is read once a device: a test takes another number for another device
#include "api/device.cpp"

extern "C" {

struct TestSide {  // as test_block_kernels_emulated.py lays it out
  int64_t form, scaling, element, square, amax_given;
  void *data, *scales, *amax;
};

struct TestJob {
  const void* x;
  int64_t type, rows, cols, row_stride, col_stride;
  TestSide side[2];
  void* column_sums;
};

int64_t run_block(const TestJob* t, int64_t device, int64_t multiprocessors) try {
  using namespace narrowfloat;
  g_multiprocessors = static_cast<int>(multiprocessors);
  BlockJob job{};
  job.x = t->x;
  job.type = static_cast<Real>(t->type);
  job.rows = t->rows, job.cols = t->cols;
  job.row_stride = t->row_stride, job.col_stride = t->col_stride;
  for (int k = 0; k < 2; ++k) {
    const TestSide& from = t->side[k];
    job.side[k] = {static_cast<Form>(from.form),
                   static_cast<Scaling>(from.scaling),
                   static_cast<Element>(from.element),
                   from.square != 0,
                   from.data,
                   from.scales,
                   static_cast<uint32_t*>(from.amax),
                   from.amax_given != 0};
  }
  job.column_sums = t->column_sums;
  job.sums_type = Real::f32;
  std::vector<uint32_t> scratch(block_scratch_bytes(job) / 4 + 8, 0xffffffffu);
  const auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 15) / 16 * 16;
  block_quantize(job, reinterpret_cast<void*>(aligned), static_cast<int>(device), nullptr);
  return 1;
} catch (const std::exception& error) {
  fprintf(stderr, "%s\n", error.what());
  return 0;
}

void run_block_dequantize(int64_t scaling, int64_t square, const void* codes, const void* scales,
                          int64_t rows, int64_t cols, void* operand) {
  using namespace narrowfloat;
  block_dequantize(static_cast<Scaling>(scaling), square, codes, scales, rows, cols, operand,
                   nullptr);
}

void run_tensor_dequantize(int64_t e5m2, const void* codes, const float* scale, int64_t rows,
                           int64_t cols, void* operand, float* alpha) {
  using namespace narrowfloat;
  tensor_dequantize(e5m2 ? Element::e5m2 : Element::e4m3, codes, scale, rows, cols, operand, alpha,
                    nullptr);
}

void run_block_spread(const void* scales, int64_t square, int64_t rows, int64_t cols,
                      uint8_t* mx_scales) {
  narrowfloat::block_spread_scales(scales, square != 0, rows, cols, mx_scales, nullptr);
}

}  // extern "C"
