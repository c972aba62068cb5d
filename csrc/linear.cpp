// Decides how a linear layer's forward and backward are put together, each in one call.
#include <algorithm>
#include <utility>

#include "cublaslt.h"
#include "linear_operands.h"
#include "mixed_input.h"
#include "product.h"

namespace narrowfloat {
namespace {

// The histories of a layer's tensors, a row each.
constexpr int64_t kHistories = 3;
enum Tracked { kX = 0, kW = 1, kDy = 2 };

class LayerHistory {
 public:
  LayerHistory() = default;  // none: a tensor is measured before it is quantized
  LayerHistory(const Tensor& rows, const Tensor& as, int64_t settings, const char* op) {
    check_same_device(rows, as, op, "history");
    NF_CHECK(!leaves_in_bf16(settings), op, ": expected formats of all operands with a history");
    NF_CHECK(rows.dim() == 2 && rows.size(0) == kHistories && rows.size(1) > kHistoryFirst &&
                 rows.size(1) <= kHistoryFirst + kLongestHistory && rows.is_contiguous() &&
                 rows.scalar_type() == ScalarType::Int,
             op, ": expected history as int32 [", kHistories, ", 5 to ",
             kHistoryFirst + kLongestHistory, "], contiguous, got ", dtype_name(rows.scalar_type()),
             " ", shape_of(rows));
    first_.row = static_cast<float*>(rows.data_ptr());
    first_.width = static_cast<int>(rows.size(1));
    first_.guarded = (settings & kGuarded) != 0;
    first_.joins = (settings & kJoins) != 0;
  }
  History of(Tracked tensor) const {
    History h = first_;
    if (h.row) h.row += static_cast<int64_t>(tensor) * h.width;
    return h;
  }

 private:
  History first_;
};

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const Tensor& w,
                                           std::optional<Tensor> bias, std::optional<Tensor> w_rows,
                                           std::optional<Tensor> w_scale,
                                           const LayerHistory& history, int64_t settings) {
  constexpr const char* op = "linear";
  const ForwardOperands given(x, w, op);
  const Launch& on = given.on;
  const int64_t m = given.x.rows, k = given.x.cols, n = given.w.rows;
  const auto [x_element, w_element, fast, save_x] = ForwardSettings(settings, op);
  const bool reused = w_rows.has_value() && w_scale.has_value();
  if (reused) {
    check_same_device(*w_rows, x, op, "w_rows");
    check_codes(*w_rows, n, k, w_element, op, "w_rows");
  }

  // outputs
  Tensor y = empty(with_last(x, n), x.scalar_type(), on.device);
  Tensor x_columns = save_x ? empty({padded(k), padded(m)}, dtype_of(x_element), on.device)
                            : empty({0}, dtype_of(x_element), on.device);
  Tensor scales = empty({reused ? kScale : kScales}, ScalarType::Float, on.device);
  float* const x_scale = static_cast<float*>(scales.data_ptr());

  // scratch
  Scratch scratch;
  Product product(m, n, k, given.x.type, fast, scratch);
  const std::optional<Tensor> own_bias = bias_for(bias, n, x, op);
  if (own_bias) product.plan_bias(*own_bias, op, scratch);
  const int64_t x_first = scratch.add(padded(m) * padded(k));
  const int64_t w_first = reused ? 0 : scratch.add(padded(n) * padded(k));
  Operand a{kInScratch, m, padded(k), x_element, x_scale};
  Operand b{kInScratch, n, padded(k), w_element, x_scale + kWScale};
  if (reused) b.q = w_rows->data_ptr(), b.scale = scales_of(*w_scale, kScale, x, op, "w_scale");
  const int64_t workspace = scratch.add(product.workspace(a, b, y.data_ptr(), on));
  QuantizeJob jobs[kMaxJobs];
  int count = 0;
  jobs[count++] =
      given.x.job(x_element, kInScratch, save_x ? x_columns.data_ptr() : nullptr, x_scale, false);
  jobs[0].history = history.of(kX);
  if (!reused) {
    jobs[count] = given.w.job(w_element, kInScratch, nullptr, x_scale + kWScale, false);
    jobs[count++].history = history.of(kW);
  }
  const int64_t partials = scratch.add(plan_quantize(jobs, count, on.device).scratch_bytes);
  scratch.allocate(on.device);

  // quantize, multiply
  a.q = jobs[0].q_rows = scratch.at(x_first);
  if (!reused) b.q = jobs[1].q_rows = scratch.at(w_first);
  quantize(plan_quantize(jobs, count, on.device), scratch.at(partials), on.stream);
  product.run(a, b, y.data_ptr(), scratch, workspace, on);
  return {y, x_columns, scales};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, std::optional<Tensor> x_columns,
                                            std::optional<Tensor> scales, std::optional<Tensor> w,
                                            std::optional<Tensor> w_columns,
                                            std::optional<Tensor> w_scale,
                                            const LayerHistory& history, int64_t in_features,
                                            int64_t settings) {
  constexpr const char* op = "linear_backward";
  const Launch on(dy, op, "dy");
  const Matrix dym(dy, op, "dy");
  const int64_t m = dym.rows, n = dym.cols, k = in_features;
  const BackwardSettings wanted(settings, op);
  const bool need_dx = wanted.need_dx, need_dw = wanted.dw.has_value(),
             need_db = wanted.db.has_value();
  const Element dy_element = wanted.dy, w_element = wanted.w;
  const bool held = w_columns.has_value();
  const bool w_measured = scales && scales->numel() >= kScales;  // in the forward

  // operands
  const float* x_scale = nullptr;
  Element x_element = Element::e4m3;
  if (need_dw) {
    NF_CHECK(x_columns && scales, op, ": expected x_columns and scales for dw, got none");
    check_same_device(*x_columns, dy, op, "x_columns");
    x_element = element_of(*x_columns, op, "x_columns");
    check_codes(*x_columns, k, m, x_element, op, "x_columns");
    x_scale = scales_of(*scales, kScale, dy, op, "scales");
  }
  std::optional<Matrix> wm;
  if (need_dx && held) {
    check_same_device(*w_columns, dy, op, "w_columns");
    check_codes(*w_columns, k, n, w_element, op, "w_columns");
    NF_CHECK(w_scale, op, ": expected w_scale with w_columns, got none");
  } else if (need_dx) {
    wm = weight_for_dx(w, dy, n, k, op);
  }

  // outputs
  const auto none = [&](ScalarType dtype) { return empty({0}, dtype, on.device); };
  Tensor dx =
      need_dx ? empty(with_last(dy, k), dy.scalar_type(), on.device) : none(dy.scalar_type());
  Tensor dw = need_dw ? empty({n, k}, dtype_of(*wanted.dw), on.device) : none(dy.scalar_type());
  Tensor db = need_db ? empty({n}, dtype_of(*wanted.db), on.device) : none(dy.scalar_type());

  // scratch
  Scratch scratch;
  const int64_t codes = padded(m) * padded(n);
  const int64_t rows_first = scratch.add(need_dx ? codes : 0);
  const int64_t columns_first = scratch.add(need_dw ? codes : 0);
  const int64_t w_first = scratch.add(wm ? padded(n) * padded(k) : 0);
  const int64_t scales_first = scratch.add(kScales * sizeof(float));
  Product dgrad, wgrad;
  Operand dgrad_a{kInScratch, m, padded(n), dy_element, kInScratch};
  Operand dgrad_b{kInScratch, k, padded(n), w_element, kInScratch};
  Operand wgrad_a{kInScratch, n, padded(m), dy_element, kInScratch};
  Operand wgrad_b{nullptr, k, padded(m), x_element, x_scale};
  int64_t workspace_bytes = 0;
  if (need_dx) {
    dgrad = Product(m, k, n, dym.type, wanted.fast_dgrad, scratch);
    if (held) {
      dgrad_b.q = w_columns->data_ptr();
      dgrad_b.scale = scales_of(*w_scale, kScale, dy, op, "w_scale");
    }
    workspace_bytes = dgrad.workspace(dgrad_a, dgrad_b, dx.data_ptr(), on);
  }
  if (need_dw) {
    wgrad = Product(n, k, m, *wanted.dw, wanted.fast_wgrad, scratch);
    wgrad_b.q = x_columns->data_ptr();
    workspace_bytes =
        std::max(workspace_bytes, wgrad.workspace(wgrad_a, wgrad_b, dw.data_ptr(), on));
  }
  const int64_t workspace = scratch.add(workspace_bytes);
  QuantizeJob jobs[kMaxJobs];
  int count = 0;
  jobs[count++] = dym.job(dy_element, need_dx ? kInScratch : nullptr,
                          need_dw ? kInScratch : nullptr, nullptr, !(need_dx || need_dw));
  if (need_dx || need_dw) jobs[0].history = history.of(kDy);
  if (need_db) {
    jobs[0].column_sums = db.data_ptr();
    jobs[0].sums_type = *wanted.db;
  }
  if (wm) {
    jobs[count] = wm->job(w_element, nullptr, kInScratch, kInScratch, w_measured);
    if (!w_measured) jobs[count].history = history.of(kW);
    ++count;
  }
  const int64_t partials = scratch.add(plan_quantize(jobs, count, on.device).scratch_bytes);
  scratch.allocate(on.device);

  // quantize dy both ways and w across, sum the bias gradient, multiply twice
  float* const dy_scale = scratch.at<float>(scales_first);
  if (need_dx || need_dw) jobs[0].scale = dy_scale;
  if (need_dx) dgrad_a.q = jobs[0].q_rows = scratch.at(rows_first);
  if (need_dw) wgrad_a.q = jobs[0].q_columns = scratch.at(columns_first);
  if (wm) {
    dgrad_b.q = jobs[1].q_columns = scratch.at(w_first);
    jobs[1].scale =
        w_measured ? scales_of(*scales, kScales, dy, op, "scales") + kWScale : dy_scale + kWScale;
    dgrad_b.scale = jobs[1].scale;
  }
  dgrad_a.scale = wgrad_a.scale = dy_scale;
  quantize(plan_quantize(jobs, count, on.device), scratch.at(partials), on.stream);
  if (need_dx) dgrad.run(dgrad_a, dgrad_b, dx.data_ptr(), scratch, workspace, on);
  if (need_dw) wgrad.run(wgrad_a, wgrad_b, dw.data_ptr(), scratch, workspace, on);
  return {dx, dw, db};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> linear_forward(const Tensor& x, const Tensor& w,
                                                  std::optional<Tensor> bias,
                                                  std::optional<Tensor> w_rows,
                                                  std::optional<Tensor> w_scale, int64_t settings) {
  if (leaves_in_bf16(settings)) {
    NF_CHECK(!w_rows, "linear: expected no quantized w beside an operand in bf16, got one");
    return mixed_input_forward(x, w, bias, settings);
  }
  return forward(x, w, std::move(bias), std::move(w_rows), std::move(w_scale), {}, settings);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy, std::optional<Tensor> x_columns, std::optional<Tensor> scales,
    std::optional<Tensor> w, std::optional<Tensor> w_columns, std::optional<Tensor> w_scale,
    int64_t in_features, int64_t settings) {
  if (leaves_in_bf16(settings) || (x_columns && !is_codes(*x_columns))) {
    NF_CHECK(!w_columns,
             "linear_backward: expected no quantized w beside an operand in bf16, got one");
    return mixed_input_backward(dy, x_columns, scales, w, in_features, settings);
  }
  return backward(dy, std::move(x_columns), std::move(scales), std::move(w), std::move(w_columns),
                  std::move(w_scale), {}, in_features, settings);
}

std::tuple<Tensor, Tensor, Tensor> delayed_linear_forward(const Tensor& x, const Tensor& w,
                                                          std::optional<Tensor> bias,
                                                          Tensor history, int64_t settings) {
  return forward(x, w, std::move(bias), std::nullopt, std::nullopt,
                 LayerHistory(history, x, settings, "linear"), settings);
}

std::tuple<Tensor, Tensor, Tensor> delayed_linear_backward(const Tensor& dy,
                                                           std::optional<Tensor> x_columns,
                                                           std::optional<Tensor> scales,
                                                           std::optional<Tensor> w, Tensor history,
                                                           int64_t in_features, int64_t settings) {
  return backward(dy, std::move(x_columns), std::move(scales), std::move(w), std::nullopt,
                  std::nullopt, LayerHistory(history, dy, settings, "linear_backward"), in_features,
                  settings);
}

}  // namespace narrowfloat
