// The operators that ops.py defines, as C++ functions.
#pragma once

#include <tuple>

#include "api/tensors.h"

namespace narrowfloat {

// rows, their scales, columns, theirs, tensor scales; see linear/spec.h for `spec`.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_op(const Tensor& x, int64_t spec,
                                                               std::optional<Tensor> scale,
                                                               std::optional<Tensor> seed);

Tensor scaled_mm_op(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                    std::optional<Tensor> bias, ScalarType out_dtype, bool fast);
void scaled_mm_accumulate_op(Tensor out, const Tensor& a, const Tensor& b, const Tensor& a_scale,
                             const Tensor& b_scale, bool fast);

// y, x's columns, their scales, tensor scales. x_codes, w_codes: quantized already, along K.
std::tuple<Tensor, Tensor, Tensor, Tensor> linear_forward(
    std::optional<Tensor> x, std::optional<Tensor> w, std::optional<Tensor> bias, int64_t spec,
    std::optional<Tensor> x_codes, std::optional<Tensor> x_scales, std::optional<Tensor> x_scale,
    std::optional<Tensor> w_codes, std::optional<Tensor> w_scales, std::optional<Tensor> w_scale,
    int64_t rows, int64_t out_features, int64_t in_features);

// dx, dw, db. x_columns: of the forward, or x itself where wgrad takes it in bf16.
std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy, std::optional<Tensor> x_columns, std::optional<Tensor> x_columns_scales,
    std::optional<Tensor> scales, std::optional<Tensor> w, std::optional<Tensor> seed,
    int64_t in_features, int64_t spec, std::optional<Tensor> x_scale, std::optional<Tensor> w_codes,
    std::optional<Tensor> w_scales, std::optional<Tensor> w_scale);

// With delayed scaling: `history` is int32 [3, width], the amax histories of x, w and dy.
std::tuple<Tensor, Tensor, Tensor, Tensor> delayed_linear_forward(const Tensor& x, const Tensor& w,
                                                                  std::optional<Tensor> bias,
                                                                  Tensor history, int64_t spec);
std::tuple<Tensor, Tensor, Tensor> delayed_linear_backward(const Tensor& dy,
                                                           std::optional<Tensor> x_columns,
                                                           std::optional<Tensor> scales,
                                                           std::optional<Tensor> w, Tensor history,
                                                           int64_t in_features, int64_t spec);

}  // namespace narrowfloat
