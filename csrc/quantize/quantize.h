// One call that quantizes: a few tensors, both orientations of each, every cast in as few launches
// as there are. No torch headers.
#pragma once

#include "quantize/cast.h"

namespace narrowfloat {

// One orientation [R, C] of a tensor, quantized along C.
struct QuantizeSide {
  Form form = Form::none;
  Cast cast;
  void* data = nullptr;      // codes, or the operand
  void* scales = nullptr;    // of rows or blocks
  float* scale = nullptr;    // [4], of the tensor, where the cast has one: scale, ...
  bool scale_given = false;  // read; tensor casts alone
  uint32_t* amax = nullptr;  // of rows, see BlockSide; asked for even where form is none
  bool amax_given = false;   // read
  float* alpha = nullptr;    // FP4: {scale * *other_scale, 0} is written too
  const float* other_scale = nullptr;
};

// x [rows, cols] at r * row_stride + c * col_stride. side[0] is x, side[1] its transpose.
struct QuantizeTensor {
  const void* x = nullptr;
  Real type = Real::f32;
  int64_t rows = 0, cols = 0, row_stride = 0, col_stride = 0;
  QuantizeSide side[2];
  void* column_sums = nullptr;  // [cols], sum over the rows of x
  Real sums_type = Real::f32;
  Family sums_family = Family::block;  // whose launches sum
  History history;                     // of tensor casts
  const int64_t* seed = nullptr;       // [2] on the device, for stochastic rounding
};

constexpr int kMaxTensors = 3;

// Tensors that are added later are quantized sooner, but for those with one scale, of which two
// share their launches. So `other_scale` may be that of a tensor that is added later.
struct QuantizeCall {
  const char* op;
  int device;
  QuantizeTensor tensor[kMaxTensors] = {};
  int count = 0;

  int64_t scratch_bytes() const;
  // scratch: 16-byte aligned, needed until the stream passes the call. No host synchronization;
  // deterministic given the seed.
  void run(void* scratch, cudaStream_t stream) const;

 private:
  int64_t walk(uint8_t* scratch, cudaStream_t stream, bool launches) const;
};

// Of an operand [rows, cols] contracted along cols, in bytes.
int64_t codes_bytes(const Cast& cast, int64_t rows, int64_t cols);
int64_t scales_bytes(const Cast& cast, int64_t rows, int64_t cols);  // of rows or blocks

// Codes from row to row.
int64_t codes_ld(const Cast& cast, int64_t cols);

}  // namespace narrowfloat
