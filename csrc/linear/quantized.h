// Codes and scales as tensors: how operators return them, and what is asked of those that are
// given.
#pragma once

#include <optional>

#include "api/tensors.h"
#include "quantize/quantize.h"

namespace narrowfloat {

// An operand that a caller has quantized: codes, scales of rows or blocks, the tensor's scale [4].
struct GivenOperand {
  const void *codes = nullptr, *scales = nullptr;
  const float* scale = nullptr;
};

// As arguments; null where there is none. The names are those of the operator's schema.
struct GivenTensors {
  const std::optional<Tensor>&codes, &scales, &scale;
  const char *codes_name, *scales_name, *scale_name;
  bool scale_leads = false;  // more than the tensor's scale follows it
};

// Of an operand [rows, cols] quantized along cols, on the device of `as`.
GivenOperand checked(const GivenTensors& given, const Cast& cast, int64_t rows, int64_t cols,
                     const Tensor& as, const char* op);

// At least so many floats of `scales`, on the device of `as`.
float* scales_of(const Tensor& scales, int64_t least, const Tensor& as, const char* op,
                 const char* name);

// For stochastic rounding.
const int64_t* seed_of(const std::optional<Tensor>& seed, const Tensor& as, const char* op);

// What an operator returns of an operand [rows, cols]; empty where the cast is none.
struct QuantizedTensors {
  Tensor codes, scales;

  QuantizedTensors(const Cast& cast, Form form, int64_t rows, int64_t cols, int device);
  void fill(QuantizeSide& side, const Cast& cast, Form form, float* scale) const;
};

}  // namespace narrowfloat
