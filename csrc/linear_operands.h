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

// x's scale, then w's, as a forward returns them.
constexpr int64_t kScales = 2 * kScale, kWScale = kScale;

// At least so many floats of `scales`, on the device of `as`.
float* scales_of(const Tensor& scales, int64_t least, const Tensor& as, const char* op,
                 const char* name);

bool is_codes(const Tensor& t);  // in FP8

// Codes of [rows, cols] with one scale, padded as narrowfloat::quantize does.
void check_codes(const Tensor& q, int64_t rows, int64_t cols, Element element, const char* op,
                 const char* name);

// bias [N] as it can be read, on the device of `as`: itself, or a contiguous copy; none if there is
// none.
std::optional<Tensor> bias_for(const std::optional<Tensor>& bias, int64_t n, const Tensor& as,
                               const char* op);

}  // namespace narrowfloat
