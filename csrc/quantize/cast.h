// How one operand of one GEMM is quantized along its contraction.
#pragma once

#include "quantize/tensor.h"

namespace narrowfloat {

// What shares a scale. row: fp32 per row of the operand; block, pow2: fp32, or a power of two, per
// 128 elements of a row, or 128 x 128; mx: a power of two a 32; tensor: one fp32; nvfp4: e4m3 a 16,
// or 16 x 16, and fp32 per tensor; mxfp4: a power of two a 32. formats.py has the same numbers.
enum class Scaling : int {
  none = 0,  // left in bf16
  row = 1,
  block = 2,
  pow2 = 3,
  mx = 4,
  tensor = 5,
  nvfp4 = 6,
  mxfp4 = 7,
};
constexpr int kScalings = 8;

constexpr const char* name_of(Scaling s) {  // as formats.py
  constexpr const char* kNames[] = {"bf16", "row",    "block", "block_pow2",
                                    "mx",   "tensor", "nvfp4", "mxfp4"};
  return kNames[static_cast<int>(s)];
}

constexpr bool is_fp4(Scaling s) { return s == Scaling::nvfp4 || s == Scaling::mxfp4; }
constexpr bool power_of_two(Scaling s) { return s == Scaling::pow2 || s == Scaling::mx; }
constexpr bool has_tensor_scale(Scaling s) { return s == Scaling::tensor || is_fp4(s); }

// Which kernels quantize: tensor.h, block.h or fp4.h.
enum class Family : int { tensor, block, fp4 };
constexpr Family family_of(Scaling s) {
  return s == Scaling::tensor ? Family::tensor : is_fp4(s) ? Family::fp4 : Family::block;
}

// What becomes of one orientation [R, C] of a tensor.
enum class Form : int {
  none,
  codes,
  operand,  // bf16 [padded(R), padded32(C)]: x itself, or code x block scale where that is exact
};

struct Cast {
  Scaling scaling = Scaling::none;
  Element element = Element::bf16;
  bool square = false;  // blocks as high as they are wide, for weights
  bool stochastic = false;
  bool hadamard = false;
  bool four_over_six = false;
  bool scale_up = false;  // block scales are rounded up

  bool operator==(const Cast&) const = default;
};

}  // namespace narrowfloat
