// Decides how a product of an operand in FP8 and one in bf16 is put together. No tensor core
// multiplies the two: codes become bf16, which is exact, and their scale is the product's alpha.
#include "mixed_input.h"

#include "block_operand.h"
#include "cublaslt.h"
#include "linear_operands.h"

namespace narrowfloat {
namespace {

struct Codes {
  Tensor rows, columns;
};

// x quantized with one scale, in the orientations that are wanted; none of them in bf16. The scale
// is written, or read if known. sums: of its columns, if not null.
Codes quantized(const Matrix& x, Element element, bool rows, bool columns, float* scale, bool known,
                const Tensor* sums, const Launch& on) {
  if (element == Element::bf16) rows = columns = false, element = Element::e4m3;
  const auto codes = [&](bool wanted, int64_t r, int64_t c) {
    const ScalarType dtype = dtype_of(element);
    return wanted ? empty({padded(r), padded(c)}, dtype, on.device) : empty({0}, dtype, on.device);
  };
  Codes made{codes(rows, x.rows, x.cols), codes(columns, x.cols, x.rows)};
  const bool writes = rows || columns;
  if (!writes && !sums) return made;
  QuantizeJob job = x.job(element, rows ? made.rows.data_ptr() : nullptr,
                          columns ? made.columns.data_ptr() : nullptr, writes ? scale : nullptr,
                          known || !writes);
  if (sums) {
    job.column_sums = sums->data_ptr();
    job.sums_type = real_of(sums->scalar_type(), "linear_backward", "db");
  }
  const QuantizePlan plan = plan_quantize(&job, 1, on.device);
  Scratch scratch;
  const int64_t partials = scratch.add(plan.scratch_bytes);
  scratch.allocate(on.device);
  quantize(plan, scratch.at(partials), on.stream);
  return made;
}

// An operand [rows, k] of a product: codes with one scale, or a tensor or its transpose as bf16.
class Factor {
 public:
  // In bf16: side 0 of x, contracted along its columns, or 1, its transpose.
  Factor(const Matrix& x, int side)
      : rows_(side ? x.cols : x.rows), k_(side ? x.rows : x.cols), x_(&x), side_(side) {}
  Factor(int64_t rows, int64_t k, Element element, const void* codes, const float* scale)
      : rows_(rows), k_(k), element_(element), codes_(codes), scale_(scale) {}
  static Factor of(const Matrix& x, int side, Element element, const Codes& codes,
                   const float* scale) {
    const Factor plain(x, side);
    if (element == Element::bf16) return plain;
    const Tensor& taken = side ? codes.columns : codes.rows;
    return {plain.rows_, plain.k_, element, taken.data_ptr(), scale};
  }

  bool quantized() const { return element_ != Element::bf16; }

  // beside: the other operand is in bf16. second: of the product, which wants whole words of d.
  void plan(bool beside, bool second, Scratch& scratch) {
    restored_ = quantized() && beside;
    if (restored_) first_ = scratch.add(padded(rows_) * padded(k_) * 2);
    if (quantized()) return;
    const bool direct = lies_well(*x_) && k_ % kPad == 0 && (!second || rows_ % 8 == 0);
    taken_ = direct ? Side::direct(*x_, side_)
                    : Side(*x_, side_, Scaling::none, Route::native, Element::e4m3, false, scratch);
  }

  Operand planned() const {
    if (!quantized()) return taken_.planned();
    if (restored_) return {kInScratch, rows_, padded(k_), Element::bf16, nullptr};
    return {codes_, rows_, padded(k_), element_, scale_};
  }

  Operand in(const Scratch& scratch, float* alpha, const Launch& on) const {
    if (!quantized()) {
      BlockJob job = job_of(*x_);
      taken_.fill(job.side[side_], scratch);
      if (taken_.made()) block_quantize(job, nullptr, on.device, on.stream);
      return taken_.in(scratch, on);
    }
    Operand o = planned();
    if (restored_) {
      tensor_restore(element_, codes_, scale_, rows_, k_, scratch.at(first_), alpha, on.stream);
      o.q = scratch.at(first_);
    }
    return o;
  }

 private:
  int64_t rows_, k_;
  Element element_ = Element::bf16;
  const void* codes_ = nullptr;
  const float* scale_ = nullptr;
  const Matrix* x_ = nullptr;  // in bf16
  int side_ = 0;
  Side taken_;
  bool restored_ = false;
  int64_t first_ = 0;
};

// d [m,n] = a [m,k] b [n,k]^T + bias
void multiply(Factor a, Factor b, const Tensor& d, int64_t m, int64_t n, int64_t k, bool fast,
              const std::optional<Tensor>& bias, const char* op, const Launch& on) {
  const bool both = a.quantized() && b.quantized();
  const bool one = a.quantized() != b.quantized();
  Scratch scratch;
  Product product(m, n, k, real_of(d.scalar_type(), op, "d"), fast && both, scratch,
                  both ? Element::e4m3 : Element::bf16);
  if (bias) product.plan_bias(*bias, op, scratch);
  a.plan(one, false, scratch);
  b.plan(one, true, scratch);
  const int64_t alpha = scratch.add(2 * sizeof(float));
  if (one) product.set_alpha(kInScratch);
  const int64_t workspace =
      scratch.add(product.workspace(a.planned(), b.planned(), d.data_ptr(), on));
  scratch.allocate(on.device);
  float* const its_scale = scratch.at<float>(alpha);
  if (one) product.set_alpha(its_scale);
  const Operand a_ready = a.in(scratch, its_scale, on), b_ready = b.in(scratch, its_scale, on);
  product.run(a_ready, b_ready, d.data_ptr(), scratch, workspace, on);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> mixed_input_forward(const Tensor& x, const Tensor& w,
                                                       const std::optional<Tensor>& bias,
                                                       int64_t settings) {
  constexpr const char* op = "linear";
  const ForwardOperands given(x, w, op);
  const Launch& on = given.on;
  const int64_t m = given.x.rows, k = given.x.cols, n = given.w.rows;
  const auto [x_element, w_element, fast, save_x] = ForwardSettings(settings, op);
  const std::optional<Tensor> own_bias = bias_for(bias, n, x, op);
  Tensor y = empty(with_last(x, n), x.scalar_type(), on.device);
  Tensor scales = empty({kScales}, ScalarType::Float, on.device);
  float *const x_scale = static_cast<float*>(scales.data_ptr()), *const w_scale = x_scale + kWScale;
  NF_CUDA(cudaMemsetAsync(x_scale, 0, kScales * sizeof(float), on.stream));  // of what has none
  const Codes of_x = quantized(given.x, x_element, true, save_x, x_scale, false, nullptr, on);
  const Codes of_w = quantized(given.w, w_element, true, false, w_scale, false, nullptr, on);
  multiply(Factor::of(given.x, 0, x_element, of_x, x_scale),
           Factor::of(given.w, 0, w_element, of_w, w_scale), y, m, n, k, fast, own_bias, op, on);
  return {y, of_x.columns, scales};
}

std::tuple<Tensor, Tensor, Tensor> mixed_input_backward(const Tensor& dy,
                                                        const std::optional<Tensor>& x,
                                                        const std::optional<Tensor>& scales,
                                                        const std::optional<Tensor>& w,
                                                        int64_t in_features, int64_t settings) {
  constexpr const char* op = "linear_backward";
  const Launch on(dy, op, "dy");
  const Matrix dym(dy, op, "dy");
  const int64_t m = dym.rows, n = dym.cols, k = in_features;
  const BackwardSettings wanted(settings, op);
  const bool need_dx = wanted.need_dx, need_dw = wanted.dw.has_value(),
             need_db = wanted.db.has_value();

  // outputs, and scales of what is quantized here
  const auto none = [&](ScalarType dtype) { return empty({0}, dtype, on.device); };
  Tensor dx =
      need_dx ? empty(with_last(dy, k), dy.scalar_type(), on.device) : none(dy.scalar_type());
  Tensor dw = need_dw ? empty({n, k}, dtype_of(*wanted.dw), on.device) : none(dy.scalar_type());
  Tensor db = need_db ? empty({n}, dtype_of(*wanted.db), on.device) : none(dy.scalar_type());
  Tensor own_scales = empty({kScales}, ScalarType::Float, on.device);
  float *const dy_scale = static_cast<float*>(own_scales.data_ptr()), *w_scale = dy_scale + kWScale;

  const Codes of_dy =
      quantized(dym, wanted.dy, need_dx, need_dw, dy_scale, false, need_db ? &db : nullptr, on);
  if (need_dx) {
    const Matrix wm = weight_for_dx(w, dy, n, k, op);
    const bool known = wanted.w != Element::bf16 && scales && scales->numel() >= kScales;
    if (known) w_scale = scales_of(*scales, kScales, dy, op, "scales") + kWScale;
    const Codes of_w = quantized(wm, wanted.w, false, true, w_scale, known, nullptr, on);
    multiply(Factor::of(dym, 0, wanted.dy, of_dy, dy_scale),
             Factor::of(wm, 1, wanted.w, of_w, w_scale), dx, m, k, n, wanted.fast_dgrad,
             std::nullopt, op, on);
  }
  if (!need_dw) return {dx, dw, db};
  NF_CHECK(x, op, ": expected x_columns for dw, or x itself, got none");
  check_same_device(*x, dy, op, "x_columns");
  const Factor dy_columns = Factor::of(dym, 1, wanted.dy, of_dy, dy_scale);
  if (is_codes(*x)) {
    NF_CHECK(scales, op, ": expected scales for dw, got none");
    const Element element = element_of(*x, op, "x_columns");
    check_codes(*x, k, m, element, op, "x_columns");
    const float* x_scale = scales_of(*scales, kScale, dy, op, "scales");
    multiply(dy_columns, {k, m, element, x->data_ptr(), x_scale}, dw, n, k, m, wanted.fast_wgrad,
             std::nullopt, op, on);
  } else {
    const Matrix xm(*x, op, "x");
    NF_CHECK(xm.rows == m && xm.cols == k, op, ": expected x [..., ", k, "] of ", m, " rows, got ",
             shape_of(*x));
    multiply(dy_columns, {xm, 1}, dw, n, k, m, false, std::nullopt, op, on);
  }
  return {dx, dw, db};
}

}  // namespace narrowfloat
