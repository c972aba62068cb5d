// How rows are unpadded and biases converted, for the GEMMs that need it.
#include "api/check.h"
#include "gemm/epilogue.h"
#include "quantize/numerics.cuh"

namespace narrowfloat {
namespace {

constexpr int kEpilogueThreads = 256;

// Index is 32 bits wide where that is enough: a 64-bit division costs more than the copy.
template <typename Index>
__global__ void __launch_bounds__(kEpilogueThreads)
    narrowfloat_finish_rows(const void* in, Real in_type, int64_t ld, void* out, Real type,
                            Index elements, Index cols, const void* bias, Real bias_type,
                            const float* row_scales, const float* column_scales) {
  const Index step = static_cast<Index>(gridDim.x) * kEpilogueThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kEpilogueThreads + threadIdx.x; i < elements;
       i += step) {
    const Index r = i / cols, c = i % cols;
    float v = in ? load_real(in, in_type, r * ld + c) : 0.f;
    if (row_scales) v = v * row_scales[r] * column_scales[c];
    if (bias) v += load_real(bias, bias_type, c);
    store_real(out, type, i, v);
  }
}

__global__ void __launch_bounds__(kEpilogueThreads)
    narrowfloat_convert_bias(const void* bias, Real from, int64_t cols, void* out, Real to,
                             int64_t padded_cols) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kEpilogueThreads + threadIdx.x;
  if (i < padded_cols) store_real(out, to, i, i < cols ? load_real(bias, from, i) : 0.f);
}

__global__ void __launch_bounds__(kEpilogueThreads)
    narrowfloat_pad_codes(const uint8_t* codes, int64_t rows, int64_t cols, int64_t row_stride,
                          int64_t col_stride, uint8_t* out, int64_t out_rows, int64_t out_cols) {
  for (int64_t r = blockIdx.x; r < out_rows; r += gridDim.x) {
    for (int64_t c = threadIdx.x; c < out_cols; c += kEpilogueThreads) {
      const bool inside = r < rows && c < cols;
      out[r * out_cols + c] = inside ? codes[r * row_stride + c * col_stride] : 0;
    }
  }
}

int blocks_for(int64_t elements) {
  const int64_t blocks = (elements + kEpilogueThreads - 1) / kEpilogueThreads;
  return static_cast<int>(blocks < 65536 ? blocks : 65536);
}

}  // namespace

void finish_rows(const void* in, Real in_type, int64_t ld, void* out, Real type, int64_t rows,
                 int64_t cols, const void* bias, Real bias_type, cudaStream_t stream,
                 const float* row_scales, const float* column_scales) {
  const int64_t elements = rows * cols;
  if (elements == 0) return;
  const int blocks = blocks_for(elements);
  if (elements < (int64_t{1} << 31)) {
    narrowfloat_finish_rows<uint32_t><<<blocks, kEpilogueThreads, 0, stream>>>(
        in, in_type, ld, out, type, static_cast<uint32_t>(elements), static_cast<uint32_t>(cols),
        bias, bias_type, row_scales, column_scales);
  } else {
    narrowfloat_finish_rows<int64_t><<<blocks, kEpilogueThreads, 0, stream>>>(
        in, in_type, ld, out, type, elements, cols, bias, bias_type, row_scales, column_scales);
  }
  NF_CUDA(cudaGetLastError());
}

void convert_bias(const void* bias, Real from, int64_t cols, void* out, Real to,
                  int64_t padded_cols, cudaStream_t stream) {
  if (padded_cols == 0) return;
  const int64_t blocks = (padded_cols + kEpilogueThreads - 1) / kEpilogueThreads;
  narrowfloat_convert_bias<<<static_cast<unsigned>(blocks), kEpilogueThreads, 0, stream>>>(
      bias, from, cols, out, to, padded_cols);
  NF_CUDA(cudaGetLastError());
}

void pad_codes(const void* codes, int64_t rows, int64_t cols, int64_t row_stride,
               int64_t col_stride, void* out, cudaStream_t stream) {
  const int64_t out_rows = padded(rows);
  if (out_rows * padded(cols) == 0) return;
  const int blocks = static_cast<int>(out_rows < 65536 ? out_rows : 65536);
  narrowfloat_pad_codes<<<blocks, kEpilogueThreads, 0, stream>>>(
      static_cast<const uint8_t*>(codes), rows, cols, row_stride, col_stride,
      static_cast<uint8_t*>(out), out_rows, padded(cols));
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
