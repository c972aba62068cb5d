// What is left to do to a GEMM that cuBLASLt's own epilogue cannot do.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "quantize/tensor.h"

namespace narrowfloat {

// out [rows, cols] contiguous = in [rows, cols] (leading dimension ld; null: zeros) x row_scales
// [rows] x column_scales [cols] (both null: 1) + bias [cols] (any type; null: none), in fp32. in
// may be out if ld is cols and the types are the same.
void finish_rows(const void* in, Real in_type, int64_t ld, void* out, Real type, int64_t rows,
                 int64_t cols, const void* bias, Real bias_type, cudaStream_t stream,
                 const float* row_scales = nullptr, const float* column_scales = nullptr);

// out [padded_cols] = bias [cols] in another type, zeros beyond.
void convert_bias(const void* bias, Real from, int64_t cols, void* out, Real to,
                  int64_t padded_cols, cudaStream_t stream);

// out [padded(rows), padded(cols)] = codes [rows, cols] of one byte at r * row_stride + c *
// col_stride, zeros beyond.
void pad_codes(const void* codes, int64_t rows, int64_t cols, int64_t row_stride,
               int64_t col_stride, void* out, cudaStream_t stream);

}  // namespace narrowfloat
