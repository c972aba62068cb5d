// Decides how a linear layer in FP4 is put together: quantized operands into FP4 tensor cores where
// the library has them, elsewhere the same numbers as bf16 operands into bf16 ones.
#include <algorithm>

#include "cublaslt.h"
#include "fp4_quantize.h"
#include "linear_operands.h"
#include "product.h"

namespace narrowfloat {
namespace {

// settings.py gives the same bits
constexpr int64_t kMx = 1, kTwoD = 2, kRotate = 4, kStochasticDy = 8, kSixX = 16, kSixW = 32,
                  kScaleUpDy = 64;
constexpr int kColumnsShift = 8;
static_assert(kScale == kFp4Scales);
constexpr int64_t kWanted = 1, kOperand = 2, kStochastic = 4, kRotated = 8, kFourOverSix = 16,
                  kScaleUp = 32, kQuantizeMx = 1 << 16, kQuantizeTwoD = 1 << 17;

struct Choices {
  bool mx, two_d_w, rotate, stochastic_dy, six_x, six_w, scale_up_dy;

  explicit Choices(int64_t bits)
      : mx(bits & kMx),
        two_d_w((bits & kTwoD) && !mx),
        rotate(bits & kRotate),
        stochastic_dy(bits & kStochasticDy),
        six_x((bits & kSixX) && !mx),
        six_w((bits & kSixW) && !mx),
        scale_up_dy((bits & kScaleUpDy) && !mx) {}
};

Fp4Job job_of(const Matrix& m, bool mx) {
  Fp4Job job{};
  job.x = m.owner.data_ptr();
  job.type = m.type;
  job.rows = m.rows, job.cols = m.cols;
  job.row_stride = m.row_stride, job.col_stride = m.col_stride;
  job.mx = mx;
  return job;
}

const int64_t* seed_of(const std::optional<Tensor>& seed, const Tensor& as, const char* op) {
  NF_CHECK(seed && seed->is_cuda() && seed->scalar_type() == ScalarType::Long &&
               seed->numel() == 2 && seed->is_contiguous(),
           op, ": expected seed as int64 [2] on the device of x for stochastic rounding, got ",
           seed ? shape_of(*seed) : "none");
  check_same_device(*seed, as, op, "seed");
  return static_cast<const int64_t*>(seed->data_ptr());
}

// A side's memory in the scratch: codes and scales, or bf16.
struct SideMemory {
  Fp4Form form;
  int64_t rows, cols;
  int64_t first = 0, scales_first = 0;

  SideMemory(Fp4Form f, int64_t r, int64_t c, Scratch& scratch) : form(f), rows(r), cols(c) {
    const int64_t elements = padded(r) * fp4_padded(c);
    if (f == Fp4Form::operand) first = scratch.add(elements * 2);
    if (f == Fp4Form::packed) {
      first = scratch.add(elements / 2);
      scales_first = scratch.add(fp4_scale_bytes(r, c));
    }
  }
  void fill(Fp4Side& side, const Scratch& scratch) const {
    side.form = form;
    if (form == Fp4Form::operand) side.operand = scratch.at(first);
    if (form == Fp4Form::packed) {
      side.codes = scratch.at(first);
      side.scales = scratch.at(scales_first);
    }
  }
  Operand planned() const {
    const bool packed = form == Fp4Form::packed;
    return {kInScratch, rows, fp4_padded(cols), packed ? Element::e2m1 : Element::bf16,
            packed ? kInScratch : nullptr};
  }
  Operand in(const Scratch& scratch) const {
    Operand o = planned();
    o.q = scratch.at(first);
    if (form == Fp4Form::packed) o.scale = scratch.at(scales_first);
    return o;
  }
};

Element element_of_form(Fp4Form form) {
  return form == Fp4Form::packed ? Element::e2m1 : Element::bf16;
}

Fp4Form form_on(int device) { return has_fp4(device) ? Fp4Form::packed : Fp4Form::operand; }

void check_packed(const Tensor& codes, const Tensor& scales, int64_t rows, int64_t cols,
                  const char* op, const char* name) {
  NF_CHECK(codes.dim() == 2 && codes.size(0) == padded(rows) &&
               codes.size(1) == fp4_padded(cols) / 2 && codes.is_contiguous() &&
               codes.scalar_type() == ScalarType::Byte &&
               reinterpret_cast<uintptr_t>(codes.data_ptr()) % 16 == 0 &&
               scales.numel() == fp4_scale_bytes(rows, cols) && scales.is_contiguous() &&
               scales.scalar_type() == ScalarType::Byte,
           op, ": expected ", name, " as uint8 [", padded(rows), ", ", fp4_padded(cols) / 2,
           "] with ", fp4_scale_bytes(rows, cols), " scale bytes, as narrowfloat returns it, got ",
           shape_of(codes), " with ", scales.numel());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fp4_quantize_op(const Tensor& x,
                                                                   std::optional<Tensor> seed,
                                                                   int64_t settings) {
  constexpr const char* op = "fp4_quantize";
  const Launch on(x, op, "x");
  const Matrix m(x, op, "x");
  Fp4Job job = job_of(m, settings & kQuantizeMx);
  job.two_d = settings & kQuantizeTwoD;
  NF_CHECK(!(job.mx && job.two_d), op, ": expected blocks of 16 x 16 or mx, got both");
  Tensor scale = empty({kScale}, ScalarType::Float, on.device);
  std::vector<Tensor> data, scales;
  for (int k = 0; k < 2; ++k) {
    const int64_t bits = settings >> (k * kColumnsShift) & 0xff;
    const int64_t rows = k ? m.cols : m.rows, cols = k ? m.rows : m.cols;
    Fp4Side& side = job.side[k];
    side.form = !(bits & kWanted)   ? Fp4Form::none
                : (bits & kOperand) ? Fp4Form::operand
                                    : Fp4Form::packed;
    side.stochastic = bits & kStochastic;
    side.rotated = bits & kRotated;
    side.four_over_six = bits & kFourOverSix;
    side.scale_up = bits & kScaleUp;
    side.tensor_scale = static_cast<float*>(scale.data_ptr()) + k;
    NF_CHECK(!(side.four_over_six && (side.stochastic || job.mx)), op,
             ": expected four over six with nearest rounding and without mx");
    NF_CHECK(!(job.two_d && side.rotated), op, ": expected blocks of 16 x 16 without a rotation");
    const bool packed = side.form == Fp4Form::packed, operand = side.form == Fp4Form::operand;
    data.push_back(packed ? empty({padded(rows), fp4_padded(cols) / 2}, ScalarType::Byte, on.device)
                   : operand
                       ? empty({padded(rows), fp4_padded(cols)}, ScalarType::BFloat16, on.device)
                       : empty({0}, ScalarType::Byte, on.device));
    scales.push_back(
        empty({packed ? fp4_scale_bytes(rows, cols) : 0}, ScalarType::Byte, on.device));
    if (packed) {
      side.codes = static_cast<uint8_t*>(data[k].data_ptr());
      side.scales = static_cast<uint8_t*>(scales[k].data_ptr());
    }
    if (operand) side.operand = data[k].data_ptr();
    if (side.form != Fp4Form::none && side.stochastic) job.seed = seed_of(seed, x, op);
  }
  job.scales = static_cast<float*>(scale.data_ptr());
  Scratch scratch;
  const int64_t partials = scratch.add(fp4_scratch_bytes(job, on.device));
  scratch.allocate(on.device);
  fp4_quantize(job, scratch.at(partials), on.device, on.stream);
  return {data[0], scales[0], data[1], scales[1], scale};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fp4_linear_forward(const Tensor& x, const Tensor& w,
                                                              std::optional<Tensor> bias,
                                                              int64_t settings) {
  constexpr const char* op = "linear";
  const ForwardOperands given(x, w, op);
  const Launch& on = given.on;
  const int64_t m = given.x.rows, k = given.x.cols, n = given.w.rows;
  const Choices wanted(settings);
  const bool save_x = settings & kSaveX;

  // outputs
  Tensor y = empty(with_last(x, n), x.scalar_type(), on.device);
  Tensor x_columns = save_x ? empty({padded(k), fp4_padded(m) / 2}, ScalarType::Byte, on.device)
                            : empty({0}, ScalarType::Byte, on.device);
  Tensor x_scales = empty({save_x ? fp4_scale_bytes(k, m) : 0}, ScalarType::Byte, on.device);
  Tensor scales = empty({kScale}, ScalarType::Float, on.device);

  // scratch
  const Fp4Form form = form_on(on.device);
  Scratch scratch;
  Product product(m, n, k, given.x.type, false, scratch, element_of_form(form));
  const std::optional<Tensor> own_bias = bias_for(bias, n, x, op);
  if (own_bias) product.plan_bias(*own_bias, op, scratch);
  const SideMemory x_rows(form, m, k, scratch), w_rows(form, n, k, scratch);
  const int64_t floats = scratch.add(12 * sizeof(float));  // w's scale, x's, alpha: 16 bytes each
  product.set_alpha(kInScratch);
  const int64_t workspace =
      scratch.add(product.workspace(x_rows.planned(), w_rows.planned(), y.data_ptr(), on));
  Fp4Job wj = job_of(given.w, wanted.mx), xj = job_of(given.x, wanted.mx);
  xj.side[1].form = save_x ? Fp4Form::packed : Fp4Form::none;
  xj.side[1].rotated = wanted.rotate;
  const int64_t partials =
      scratch.add(std::max(fp4_scratch_bytes(wj, on.device), fp4_scratch_bytes(xj, on.device)));
  scratch.allocate(on.device);

  // quantize, multiply
  float* const w_scale = scratch.at<float>(floats);
  float* const alpha = w_scale + 8;
  wj.two_d = wanted.two_d_w;
  wj.side[0].four_over_six = wanted.six_w;
  wj.side[0].tensor_scale = w_scale;
  w_rows.fill(wj.side[0], scratch);
  fp4_quantize(wj, scratch.at(partials), on.device, on.stream);
  xj.side[0].four_over_six = xj.side[1].four_over_six = wanted.six_x;
  xj.side[0].tensor_scale = w_scale + 4;
  xj.side[0].alpha = alpha, xj.side[0].other_scale = w_scale;
  x_rows.fill(xj.side[0], scratch);
  if (save_x) {
    xj.side[1].codes = static_cast<uint8_t*>(x_columns.data_ptr());
    xj.side[1].scales = static_cast<uint8_t*>(x_scales.data_ptr());
    xj.side[1].tensor_scale = static_cast<float*>(scales.data_ptr());
  }
  xj.scales = static_cast<float*>(scales.data_ptr());
  fp4_quantize(xj, scratch.at(partials), on.device, on.stream);
  product.set_alpha(alpha);
  product.run(x_rows.in(scratch), w_rows.in(scratch), y.data_ptr(), scratch, workspace, on);
  return {y, x_columns, x_scales, scales};
}

std::tuple<Tensor, Tensor, Tensor> fp4_linear_backward(
    const Tensor& dy, std::optional<Tensor> x_columns, std::optional<Tensor> x_scales,
    std::optional<Tensor> scales, std::optional<Tensor> w, std::optional<Tensor> seed,
    int64_t in_features, int64_t settings) {
  constexpr const char* op = "linear_backward";
  const Launch on(dy, op, "dy");
  const Matrix dym(dy, op, "dy");
  const int64_t m = dym.rows, n = dym.cols, k = in_features;
  const Choices wanted(settings);
  const bool need_dx = settings & kNeedDx;
  const std::optional<Real> dw_type = real_of(settings >> kDwShift & kTypeBits, op),
                            db_type = real_of(settings >> kDbShift & kTypeBits, op);
  const Fp4Form form = form_on(on.device), none = Fp4Form::none;

  // operands
  std::optional<Matrix> wm;
  if (need_dx) wm = weight_for_dx(w, dy, n, k, op);
  if (dw_type) {
    NF_CHECK(x_columns && x_scales && scales, op,
             ": expected x_columns, their scales and scales for dw, got none");
    check_same_device(*x_columns, dy, op, "x_columns");
    check_same_device(*x_scales, dy, op, "x_columns_scales");
    check_same_device(*scales, dy, op, "scales");
    check_packed(*x_columns, *x_scales, k, m, op, "x_columns");
    NF_CHECK(scales->numel() >= 1 && scales->scalar_type() == ScalarType::Float, op,
             ": expected scales as float32 [4], as the forward returns it");
  }

  // outputs
  const auto nothing = [&](ScalarType dtype) { return empty({0}, dtype, on.device); };
  Tensor dx =
      need_dx ? empty(with_last(dy, k), dy.scalar_type(), on.device) : nothing(dy.scalar_type());
  Tensor dw = dw_type ? empty({n, k}, dtype_of(*dw_type), on.device) : nothing(dy.scalar_type());
  Tensor db = db_type ? empty({n}, dtype_of(*db_type), on.device) : nothing(dy.scalar_type());

  // scratch
  Scratch scratch;
  Product dgrad, wgrad;
  const SideMemory dy_rows(need_dx ? form : none, m, n, scratch);
  const SideMemory dy_columns(dw_type ? form : none, n, m, scratch);
  // 16 x 16 blocks are the same numbers across: bf16 products take them as they lie
  const bool w_as_rows = need_dx && wanted.two_d_w && form == Fp4Form::operand;
  const SideMemory w_rows(w_as_rows ? form : none, n, k, scratch);
  const SideMemory w_columns(need_dx && !w_as_rows ? form : none, k, n, scratch);
  const SideMemory x_operand(dw_type && form == Fp4Form::operand ? form : none, k, m, scratch);
  const int64_t floats =
      scratch.add(20 * sizeof(float));  // w, dy twice, alpha twice: 16 bytes each
  const auto w_operand = [&](bool planned) {
    Operand o = w_as_rows ? (planned ? w_rows.planned() : w_rows.in(scratch))
                          : (planned ? w_columns.planned() : w_columns.in(scratch));
    if (w_as_rows) o.rows = k, o.k_first = true;
    return o;
  };
  Operand saved{nullptr, k, fp4_padded(m), Element::e2m1, nullptr};
  if (dw_type) saved.q = x_columns->data_ptr(), saved.scale = x_scales->data_ptr();
  int64_t workspace_bytes = 0;
  if (need_dx) {
    dgrad = Product(m, k, n, dym.type, false, scratch, element_of_form(form));
    dgrad.set_alpha(kInScratch);
    workspace_bytes = dgrad.workspace(dy_rows.planned(), w_operand(true), dx.data_ptr(), on);
  }
  if (dw_type) {
    wgrad = Product(n, k, m, *dw_type, false, scratch, element_of_form(form));
    wgrad.set_alpha(kInScratch);
    workspace_bytes = std::max(
        workspace_bytes,
        wgrad.workspace(dy_columns.planned(),
                        form == Fp4Form::operand ? x_operand.planned() : saved, dw.data_ptr(), on));
  }
  const int64_t workspace = scratch.add(workspace_bytes);
  Fp4Job dyj = job_of(dym, wanted.mx), wj{};
  if (db_type) dyj.column_sums = db.data_ptr(), dyj.sums_type = *db_type;
  int64_t partial_bytes = fp4_scratch_bytes(dyj, on.device);
  if (need_dx) {
    wj = job_of(*wm, wanted.mx);
    partial_bytes = std::max(partial_bytes, fp4_scratch_bytes(wj, on.device));
  }
  const int64_t partials = scratch.add(partial_bytes);
  scratch.allocate(on.device);

  // quantize w across, dy both ways with its sums; restore x; multiply twice
  float* const w_scale = scratch.at<float>(floats);
  float *const dx_alpha = w_scale + 12, *const dw_alpha = w_scale + 16;
  if (need_dx) {
    wj.two_d = wanted.two_d_w;
    Fp4Side& side = wj.side[w_as_rows ? 0 : 1];
    side.four_over_six = wanted.six_w;
    side.tensor_scale = w_scale;
    (w_as_rows ? w_rows : w_columns).fill(side, scratch);
    fp4_quantize(wj, scratch.at(partials), on.device, on.stream);
  }
  if (wanted.stochastic_dy && (need_dx || dw_type)) dyj.seed = seed_of(seed, dy, op);
  for (Fp4Side& side : dyj.side) {
    side.stochastic = wanted.stochastic_dy;
    side.scale_up = wanted.scale_up_dy;
  }
  dyj.side[0].tensor_scale = w_scale + 4;
  dyj.side[1].tensor_scale = w_scale + 8;
  dyj.side[1].rotated = wanted.rotate;
  if (need_dx) dyj.side[0].alpha = dx_alpha, dyj.side[0].other_scale = w_scale;
  if (dw_type) {
    dyj.side[1].alpha = dw_alpha;
    dyj.side[1].other_scale = static_cast<const float*>(scales->data_ptr());
  }
  dy_rows.fill(dyj.side[0], scratch);
  dy_columns.fill(dyj.side[1], scratch);
  if (need_dx || dw_type || db_type) {
    fp4_quantize(dyj, scratch.at(partials), on.device, on.stream);
  }
  if (need_dx) {
    dgrad.set_alpha(dx_alpha);
    dgrad.run(dy_rows.in(scratch), w_operand(false), dx.data_ptr(), scratch, workspace, on);
  }
  if (dw_type) {
    if (form == Fp4Form::operand) {
      fp4_restore(static_cast<const uint8_t*>(x_columns->data_ptr()),
                  static_cast<const uint8_t*>(x_scales->data_ptr()), k, m,
                  scratch.at(x_operand.first), on.device, on.stream);
      saved = x_operand.in(scratch);
    }
    wgrad.set_alpha(dw_alpha);
    wgrad.run(dy_columns.in(scratch), saved, dw.data_ptr(), scratch, workspace, on);
  }
  return {dx, dw, db};
}

}  // namespace narrowfloat
