// Decides what a linear layer's two calls are where an operand of a product is left in bf16.
#pragma once

#include "ops.h"

namespace narrowfloat {

// linear_forward and linear_backward of weights that are not quantized yet. Backward: x as its
// transposed codes, or x itself to be taken as bf16.
std::tuple<Tensor, Tensor, Tensor> mixed_input_forward(const Tensor& x, const Tensor& w,
                                                       const std::optional<Tensor>& bias,
                                                       int64_t settings);
std::tuple<Tensor, Tensor, Tensor> mixed_input_backward(const Tensor& dy,
                                                        const std::optional<Tensor>& x,
                                                        const std::optional<Tensor>& scales,
                                                        const std::optional<Tensor>& w,
                                                        int64_t in_features, int64_t settings);

}  // namespace narrowfloat
