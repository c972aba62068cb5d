// Decides what every linear layer asks of the tensors it is called with, FP8 or FP4.
#pragma once

#include "ops.h"

namespace narrowfloat {

// x [..., K] and w [N,K] of a forward, on one CUDA device and with one K.
struct ForwardOperands {
  Launch on;
  Matrix x, w;

  ForwardOperands(const Tensor& x, const Tensor& w, const char* op);
};

// w [N,K] of a backward that makes dx, for dy [..., N].
Matrix weight_for_dx(const std::optional<Tensor>& w, const Tensor& dy, int64_t n, int64_t k,
                     const char* op);

// bias [N] as it can be read, on the device of `as`: itself, or a contiguous copy; none if there is
// none.
std::optional<Tensor> bias_for(const std::optional<Tensor>& bias, int64_t n, const Tensor& as,
                               const char* op);

}  // namespace narrowfloat
