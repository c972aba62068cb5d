// Decides how a linear layer's operands are checked, in the words of reference.py.
#include "linear_operands.h"

namespace narrowfloat {
namespace {

// Before the launch, which only knows that x is not on a CUDA device.
const Tensor& on_cuda(const Tensor& x, const Tensor& w, const char* op) {
  NF_CHECK(x.is_cuda(), op, ": expected ", w.is_cuda() ? "w" : "bias",
           " on cpu as x is, got cuda (move one of them)");
  return x;
}

const Tensor& checked_weight(const Tensor& w, const Tensor& x, const char* op) {
  check_same_device(w, x, op, "w");
  NF_CHECK(w.dim() == 2, op, ": expected w [N,K], got ", w.dim(), " dimensions ", shape_of(w));
  return w;
}

}  // namespace

ForwardOperands::ForwardOperands(const Tensor& x_given, const Tensor& w_given, const char* op)
    : on(on_cuda(x_given, w_given, op), op, "x"),
      x(x_given, op, "x"),
      w(checked_weight(w_given, x_given, op), op, "w") {
  NF_CHECK(w.cols == x.cols, op, ": expected x [..., K] and w [N,K] with one K, got ",
           shape_of(x_given), " and ", shape_of(w_given), " (w is multiplied transposed)");
}

Matrix weight_for_dx(const std::optional<Tensor>& w, const Tensor& dy, int64_t n, int64_t k,
                     const char* op) {
  NF_CHECK(w, op, ": expected w for dx, got none");
  check_same_device(*w, dy, op, "w");
  NF_CHECK(w->dim() == 2 && w->size(0) == n && w->size(1) == k, op, ": expected w (", n, ", ", k,
           ") for dy [..., ", n, "], got ", shape_of(*w));
  return Matrix(*w, op, "w");
}

float* scales_of(const Tensor& scales, int64_t least, const Tensor& as, const char* op,
                 const char* name) {
  check_same_device(scales, as, op, name);
  NF_CHECK(scales.numel() >= least && scales.is_contiguous() &&
               scales.scalar_type() == ScalarType::Float &&
               reinterpret_cast<uintptr_t>(scales.data_ptr()) % 16 == 0,
           op, ": expected ", name, " as float32 [", least,
           "] at an address that is a multiple of 16, as narrowfloat's operators return it");
  return static_cast<float*>(scales.data_ptr());
}

bool is_codes(const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

void check_codes(const Tensor& q, int64_t rows, int64_t cols, Element element, const char* op,
                 const char* name) {
  NF_CHECK(q.dim() == 2 && q.size(0) == padded(rows) && q.size(1) == padded(cols) &&
               q.is_contiguous() && element_of(q, op, name) == element &&
               reinterpret_cast<uintptr_t>(q.data_ptr()) % 16 == 0,
           op, ": expected ", name, " contiguous [", padded(rows), ", ", padded(cols),
           "] in the recipe's format, as narrowfloat::quantize returns it");
}

std::optional<Tensor> bias_for(const std::optional<Tensor>& bias, int64_t n, const Tensor& as,
                               const char* op) {
  if (!bias) return std::nullopt;
  check_same_device(*bias, as, op, "bias");
  NF_CHECK(bias->dim() == 1 && bias->size(0) == n, op, ": expected bias [", n, "], got ",
           shape_of(*bias));
  return bias->is_contiguous() ? *bias : torch::stable::contiguous(*bias);
}

}  // namespace narrowfloat
