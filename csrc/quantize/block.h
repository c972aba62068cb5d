// Quantizing a tensor to FP8 by rows or blocks: the structs between host and kernels, no torch
// headers.
#pragma once

#include "quantize/cast.h"

namespace narrowfloat {

constexpr int64_t kBlock = 128, kMxBlock = 32;
constexpr int64_t kMxTileBytes = 512;  // of scale bytes: 128 rows x 4 blocks
constexpr int64_t padded32(int64_t size) { return (size + 31) / 32 * 32; }
constexpr int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Of an operand [rows, size], contracted along `size`.
inline int64_t codes_cols(Scaling s, int64_t size) {
  return s == Scaling::mx ? padded32(size) : padded(size);
}
inline int64_t mx_scale_bytes(int64_t rows, int64_t size) {
  return blocks_of(rows, kBlock) * blocks_of(size, kBlock) * kMxTileBytes;
}
inline int64_t scale_bytes(Scaling s, bool square, int64_t rows, int64_t size) {
  const int64_t across = blocks_of(size, kBlock);
  if (s == Scaling::mx) return mx_scale_bytes(rows, size);
  if (s == Scaling::row) return padded(rows) * 4;
  return 4 * (square ? blocks_of(rows, kBlock) * ((across + 3) / 4 * 4) : across * padded(rows));
}

// One orientation of the tensor: [R, C], contracted along C.
struct BlockSide {
  Form form;
  Scaling scaling;  // none, with form operand: plain bf16
  Element element;
  bool square;
  void* data;  // codes [padded(R), codes_cols(C)], or bf16 [padded(R), padded32(C)]; zeros beyond
  // of codes. row: fp32 [padded(R)], 1 beyond. block, pow2: fp32 [C/128, padded(R)], 1 beyond R;
  // in squares [R/128, C/128 up to a multiple of 4], 0 beyond. mx: UE8M0 in 128x4 tiles, 0 beyond.
  void* scales;
  // row: the amax of each of the R rows as bits of its fp32, [padded(R)], 0 beyond. Read if given;
  // else written here, or into the scratch where it is null. Written too where form is none and
  // this is not null.
  uint32_t* amax;
  bool amax_given;
};

// x [rows, cols] at r * row_stride + c * col_stride. side[0] is x [rows, cols], side[1] its
// transpose [cols, rows].
struct BlockJob {
  const void* x;
  Real type;
  int64_t rows, cols, row_stride, col_stride;
  BlockSide side[2];
  void* column_sums;  // [cols], sum over the rows of x, or null
  Real sums_type;
};

// Bytes of scratch that block_quantize() needs, 16-byte aligned.
int64_t block_scratch_bytes(const BlockJob& job);

// scratch is needed until the stream passes the call. No host synchronization; deterministic.
void block_quantize(const BlockJob& job, void* scratch, int device, cudaStream_t stream);

// Codes and scales of [rows, cols] (pow2 or mx) to the operand form, bf16 [padded(rows),
// padded32(cols)].
void block_dequantize(Scaling scaling, bool square, const void* codes, const void* scales,
                      int64_t rows, int64_t cols, void* operand, cudaStream_t stream);

// Codes with one scale, [padded(rows), padded(cols)], as bf16 of that shape, without the scale;
// alpha[0] = *scale, alpha[1] = 0.
void tensor_dequantize(Element element, const void* codes, const float* scale, int64_t rows,
                       int64_t cols, void* operand, float* alpha, cudaStream_t stream);

// Scales of pow2 as those of mx: each four times, those of a square on each of its rows.
void block_spread_scales(const void* scales, bool square, int64_t rows, int64_t cols,
                         uint8_t* mx_scales, cudaStream_t stream);

}  // namespace narrowfloat
