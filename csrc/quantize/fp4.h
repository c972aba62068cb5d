// Quantizing a tensor to FP4: the structs between host and kernels, no torch headers.
#pragma once

#include "quantize/cast.h"

namespace narrowfloat {

constexpr int64_t kGroup = 16;   // elements that share a scale byte, along the contraction
constexpr int64_t kFp4Pad = 32;  // contracted sizes are padded to this with zeros
constexpr int64_t kScaleRows = 128, kScaleGroups = 4;  // a tile of scale bytes
constexpr int64_t kScaleTileBytes = kScaleRows * kScaleGroups;
constexpr int kFp4Scales = 4;  // of a call
// Bit i: element i of a group changes its sign before the Hadamard matrix; formats.py has the same.
constexpr uint32_t kRotationSigns = 0xB274;

constexpr int64_t fp4_padded(int64_t size) { return (size + kFp4Pad - 1) / kFp4Pad * kFp4Pad; }
// Of the scale bytes of `rows` rows contracted along `size` elements, in 128x4 tiles.
constexpr int64_t fp4_scale_bytes(int64_t rows, int64_t size) {
  return (rows + kScaleRows - 1) / kScaleRows * kScaleRows *
         ((size + kGroup * kScaleGroups - 1) / (kGroup * kScaleGroups) * kScaleGroups);
}

// One orientation of the tensor: [R, C], quantized along C.
struct Fp4Side {
  Form form;
  bool stochastic, rotated, four_over_six, scale_up;
  uint8_t* codes;   // packed: [padded(R), fp4_padded(C) / 2], the first of two in the low nibble
  uint8_t* scales;  // packed: e4m3, fp4_scale_bytes(R, C)
  void* operand;    // bf16 [padded(R), fp4_padded(C)], code x block scale
  float* tensor_scale;  // written
  // where not null, alpha[0] = tensor scale * *other_scale, alpha[1] = 0 are written too
  float* alpha;
  const float* other_scale;
};

// x [rows, cols] at r * row_stride + c * col_stride. side[0] is x [rows, cols], side[1] its
// transpose [cols, rows].
struct Fp4Job {
  const void* x;
  Real type;
  int64_t rows, cols, row_stride, col_stride;
  bool mx;      // blocks of 32 with a power of two; else of 16
  bool square;  // blocks of 16 x 16
  Fp4Side side[2];
  const int64_t* seed;  // [2] on the device; needed where a side is stochastic
  float* scales;        // [kFp4Scales] or null: 0 is written where no tensor_scale is
  void* column_sums;    // [cols], sum over the rows of x, or null
  Real sums_type;
};

// Bytes of scratch that fp4_quantize() needs, 16-byte aligned.
int64_t fp4_scratch_bytes(const Fp4Job& job, int device);

// Finds the amax and quantizes. scratch is needed until the stream passes the call. No host
// synchronization; deterministic given the seed.
void fp4_quantize(const Fp4Job& job, void* scratch, int device, cudaStream_t stream);

// Packed codes and scales of [rows, cols], contracted along cols, to the operand form: bf16
// [padded(rows), fp4_padded(cols)].
void fp4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols,
                    void* operand, int device, cudaStream_t stream);

// alpha[0] = *a_scale x *b_scale, alpha[1] = 0: of a GEMM whose operands were quantized before.
void fp4_alpha(const float* a_scale, const float* b_scale, float* alpha, cudaStream_t stream);

}  // namespace narrowfloat
