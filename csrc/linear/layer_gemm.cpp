// One GEMM of a layer: its operands as their casts want them, from a plan to d.
#include "linear/layer_gemm.h"

#include "quantize/fp4.h"

namespace narrowfloat {
namespace {

bool may_lie(const OperandSource& s) {
  return s.cast.scaling == Scaling::none && s.x && is_aligned(*s.x);
}

bool has_fast_accumulation(const Cast& a, const Cast& b) {
  return a.scaling == b.scaling && (a.scaling == Scaling::tensor || a.scaling == Scaling::row);
}

}  // namespace

LayerGemm::LayerGemm(int64_t m, int64_t n, int64_t k, const OperandSource& a_source,
                     const OperandSource& b_source, Real d_type, bool fast, bool may_be_ragged,
                     Scratch& scratch, const Launch& on, const char* op)
    : a_scaling_(a_source.cast.scaling) {
  const Cast &a_cast = a_source.cast, &b_cast = b_source.cast;
  const Route route = route_of(a_cast, b_cast, on.device, op);
  const bool exact_k = may_be_ragged && may_lie(a_source) && may_lie(b_source);
  const bool as_it_lies = exact_k || k % kPad == 0;
  a = OperandPlan(a_source, m, k, route, as_it_lies && may_lie(a_source), scratch);
  b = OperandPlan(b_source, n, k, route, as_it_lies && may_lie(b_source) && n % 8 == 0, scratch);
  row_scales_ = route == Route::epilogue;
  has_alpha_ = both_fp4() || a_cast.scaling != b_cast.scaling;
  if (has_alpha_) alpha_first_ = scratch.add(2 * sizeof(float));
  gemm_ = Gemm(m, n, k, d_type, fast && has_fast_accumulation(a_cast, b_cast), scratch, a.format(),
               exact_k ? EdgeRule::exact_k : edges_of(a_cast.scaling, route));
}

int64_t LayerGemm::workspace(void* d, const Scratch& scratch, const Launch& on) {
  if (has_alpha_) gemm_.set_alpha(scratch.at<float>(alpha_first_));
  return gemm_.workspace(a.operand(scratch), b.operand(scratch), d, on);
}

void LayerGemm::fill(QuantizeTensor* of_a, QuantizeTensor* of_b, const Scratch& scratch) const {
  QuantizeSide *const a_side = a.fill(of_a, scratch), *const b_side = b.fill(of_b, scratch);
  if (!both_fp4()) return;
  if (QuantizeSide* last = a_side ? a_side : b_side) {
    last->alpha = scratch.at<float>(alpha_first_);
    last->other_scale = (a_side ? b : a).tensor_scale(scratch);
  }
}

void LayerGemm::run(void* d, const Scratch& scratch, int64_t workspace, const Launch& on) {
  float* const alpha = has_alpha_ ? scratch.at<float>(alpha_first_) : nullptr;
  if (both_fp4() && !a.made() && !b.made()) {
    fp4_alpha(a.tensor_scale(scratch), b.tensor_scale(scratch), alpha, on.stream);
  }
  a.finish(scratch, alpha, on);
  b.finish(scratch, alpha, on);
  if (row_scales_) gemm_.set_row_scales(a.row_scales(scratch), b.row_scales(scratch));
  if (has_alpha_) gemm_.set_alpha(alpha);
  gemm_.run(a.operand(scratch), b.operand(scratch), d, scratch, workspace, on);
}

}  // namespace narrowfloat
