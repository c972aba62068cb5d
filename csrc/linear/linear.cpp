// A linear layer's forward and backward, each one call: quantize what its GEMMs take, then
// multiply.
#include <algorithm>
#include <utility>

#include "api/ops.h"
#include "linear/layer_gemm.h"
#include "linear/spec.h"

namespace narrowfloat {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char *kForward = "linear", *kBackward = "linear_backward";

// The amax histories of a layer's tensors, a row each.
constexpr int64_t kHistories = 3;
enum Tracked { kX = 0, kW = 1, kDy = 2 };

class LayerHistory {
 public:
  LayerHistory() = default;  // none: a tensor is measured before it is quantized
  LayerHistory(const Tensor& rows, const Tensor& as, bool guarded, bool joins, const char* op) {
    check_same_device(rows, as, op, "history");
    NF_CHECK(rows.dim() == 2 && rows.size(0) == kHistories && rows.size(1) > kHistoryFirst &&
                 rows.size(1) <= kHistoryFirst + kLongestHistory && rows.is_contiguous() &&
                 rows.scalar_type() == ScalarType::Int,
             op, ": expected history as int32 [", kHistories, ", 5 to ",
             kHistoryFirst + kLongestHistory, "], contiguous, got ", dtype_name(rows.scalar_type()),
             " ", shape_of(rows));
    first_.row = static_cast<float*>(rows.data_ptr());
    first_.width = static_cast<int>(rows.size(1));
    first_.guarded = guarded;
    first_.joins = joins;
  }
  History of(Tracked tensor) const {
    History h = first_;
    if (h.row) h.row += static_cast<int64_t>(tensor) * h.width;
    return h;
  }

 private:
  History first_;
};

void check_history_casts(const Cast& a, const Cast& b, const char* op) {
  NF_CHECK(a.scaling == Scaling::tensor && b.scaling == Scaling::tensor, op,
           ": expected formats with one scale a tensor with a history, got ", name_of(a.scaling),
           " and ", name_of(b.scaling));
}
void check_one_history(const Cast& rows, const Cast& columns, const char* op) {
  NF_CHECK(rows == columns, op,
           ": expected one format of both orientations of a tensor with a history, got two");
}

// What dgrad takes over of w from the forward, in floats: its scale, or the maxima of its columns.
int64_t measured_floats(const Cast& cast, int64_t columns) {
  return cast.scaling == Scaling::tensor ? kScale
         : cast.scaling == Scaling::row  ? padded(columns)
                                         : 0;
}

// ---- forward ----

struct ForwardArguments {
  const std::optional<Tensor>&x, &w, &bias;
  GivenTensors x_given, w_given;
  int64_t rows, out_features, in_features;
};

const Tensor& device_tensor(const ForwardArguments& given) {
  const std::optional<Tensor>& x = given.x ? given.x : given.x_given.codes;
  NF_CHECK(x, kForward, ": expected x, or x_codes, got none (pass it)");
  const std::optional<Tensor>& w = given.w ? given.w : given.w_given.codes;
  NF_CHECK(w, kForward, ": expected w, or w_codes, got none (pass it)");
  // before the launch, which only knows that x is not on a CUDA device
  NF_CHECK(x->is_cuda(), kForward, ": expected ", w->is_cuda() ? "w" : "bias",
           " on cpu as x is, got cuda (move one of them)");
  return *x;
}

// What the forward is called with, checked.
struct ForwardInputs {
  Launch on;
  std::optional<Matrix> x, w;  // where they are read
  int64_t m, n, k;
  std::optional<GivenOperand> x_given, w_given;
  std::optional<Tensor> bias;
  ScalarType y_dtype;

  ForwardInputs(const ForwardArguments& given, const ForwardSpec& spec)
      : ForwardInputs(given, spec, device_tensor(given)) {}
  ForwardInputs(const ForwardArguments& given, const ForwardSpec& spec, const Tensor& as)
      : on(as, kForward, given.x ? "x" : "x_codes") {
    read_x(given, spec);
    read_w(given, as);
    if (given.x_given.codes) x_given = checked(given.x_given, spec.fprop_a, m, k, as, kForward);
    if (given.w_given.codes) w_given = checked(given.w_given, spec.fprop_b, n, k, as, kForward);
    bias = bias_for(given.bias, n, as, kForward);
  }

 private:
  void read_x(const ForwardArguments& given, const ForwardSpec& spec) {
    if (given.x) {
      x.emplace(*given.x, kForward, "x");
      m = x->rows, k = x->cols;
      y_dtype = spec.y_type ? dtype_of(*spec.y_type) : given.x->scalar_type();
      return;
    }
    NF_CHECK(!spec.save_x, kForward,
             ": expected x itself for its columns, got none (give them yourself)");
    NF_CHECK(spec.y_type, kForward, ": expected y's dtype in the spec where x is absent, got none");
    NF_CHECK(given.rows >= 0 && given.in_features >= 0 && given.out_features >= 0, kForward,
             ": expected sizes from 0 on, got ", given.rows, ", ", given.out_features, " and ",
             given.in_features);
    m = given.rows;
    k = given.w && given.w->dim() == 2 ? given.w->size(1) : given.in_features;
    y_dtype = dtype_of(*spec.y_type);
  }

  void read_w(const ForwardArguments& given, const Tensor& as) {
    if (!given.w) {
      NF_CHECK(given.in_features == k, kForward, ": expected in_features ", k,
               ", the K of x, where w is absent, got ", given.in_features);
      n = given.out_features;
      return;
    }
    check_same_device(*given.w, as, kForward, "w");
    NF_CHECK(given.w->dim() == 2, kForward, ": expected w [N,K], got ", given.w->dim(),
             " dimensions ", shape_of(*given.w));
    w.emplace(*given.w, kForward, "w");
    NF_CHECK(w->cols == k, kForward, ": expected x [..., K] and w [N,K] with one K, got ",
             given.x ? shape_of(*given.x) : message("(", m, ", ", k, ")"), " and ",
             shape_of(*given.w), " (w is multiplied transposed)");
    n = w->rows;
  }
};

FourTensors forward(const ForwardArguments& given, const ForwardSpec& spec,
                    const LayerHistory& history) {
  const ForwardInputs in(given, spec);
  const Launch& on = in.on;
  const Cast columns_cast = spec.save_x ? spec.wgrad_b : Cast{};
  const bool saves = columns_cast.scaling != Scaling::none;

  // outputs
  Tensor y = given.x ? empty(with_last(*given.x, in.n), in.y_dtype, on.device)
                     : empty({in.m, in.n}, in.y_dtype, on.device);
  const QuantizedTensors columns(columns_cast, Form::codes, in.k, in.m, on.device);
  const int64_t x_floats = has_tensor_scale(columns_cast.scaling) ? kScale : 0;
  const bool keeps_w = spec.keep_w && !in.w_given;
  const int64_t w_floats = keeps_w ? measured_floats(spec.fprop_b, in.k) : 0;
  Tensor scales = empty({x_floats + w_floats}, ScalarType::Float, on.device);
  float *const x_scale = static_cast<float*>(scales.data_ptr()), *const w_kept = x_scale + x_floats;

  // plan
  Scratch scratch;
  LayerGemm fprop(in.m, in.n, in.k, {spec.fprop_a, in.x ? &*in.x : nullptr, 0, in.x_given},
                  {spec.fprop_b, in.w ? &*in.w : nullptr, 0, in.w_given},
                  real_of(in.y_dtype, kForward, "y"), spec.fast, false, scratch, on, kForward);
  if (in.bias) fprop.plan_bias(*in.bias, kForward, scratch);
  if (fprop.a.made() && share_tensor_scale(spec.fprop_a, columns_cast)) fprop.a.put_scale(x_scale);
  if (w_floats && spec.fprop_b.scaling == Scaling::tensor) fprop.b.put_scale(w_kept);
  const int64_t workspace = scratch.add(fprop.workspace(y.data_ptr(), scratch, on));
  QuantizeCall call{kForward, on.device};
  QuantizeTensor* const x = in.x ? &add(call, *in.x) : nullptr;
  QuantizeTensor* const w = in.w ? &add(call, *in.w) : nullptr;
  if (x) x->history = history.of(kX);
  if (w) w->history = history.of(kW);
  if (saves) columns.fill(x->side[1], columns_cast, Form::codes, x_scale);
  if (w_floats && spec.fprop_b.scaling == Scaling::row) {
    w->side[1].amax = reinterpret_cast<uint32_t*>(w_kept);
  }
  fprop.fill(x, w, scratch);
  const int64_t quantizing = scratch.add(call.scratch_bytes());
  scratch.allocate(on.device);

  // quantize, multiply
  fprop.fill(x, w, scratch);
  call.run(scratch.at(quantizing), on.stream);
  fprop.run(y.data_ptr(), scratch, workspace, on);
  return {y, columns.codes, columns.scales, scales};
}

// ---- backward ----

struct BackwardArguments {
  const Tensor& dy;
  const std::optional<Tensor>&scales, &w, &seed;
  GivenTensors x_given, w_given;
  int64_t in_features;
};

// What the backward is called with, checked.
struct BackwardInputs {
  Launch on;
  Matrix dy;
  int64_t m, n, k;
  std::optional<Matrix> x, w;  // where they are read
  std::optional<GivenOperand> x_given, w_given;
  float* w_measured = nullptr;  // see measured_floats()
  const int64_t* seed = nullptr;

  BackwardInputs(const BackwardArguments& given, const BackwardSpec& spec)
      : on(given.dy, kBackward, "dy"),
        dy(given.dy, kBackward, "dy"),
        m(dy.rows),
        n(dy.cols),
        k(given.in_features) {
    if (spec.need_dx) read_w(given, spec);
    if (spec.dw) read_x(given, spec);
    if ((spec.need_dx && spec.dgrad_a.stochastic) || (spec.dw && spec.wgrad_a.stochastic)) {
      seed = seed_of(given.seed, given.dy, kBackward);
    }
  }

 private:
  void read_w(const BackwardArguments& given, const BackwardSpec& spec) {
    if (given.w_given.codes) {
      w_given = checked(given.w_given, spec.dgrad_b, k, n, given.dy, kBackward);
      return;
    }
    const std::optional<Tensor>& from = given.w;
    NF_CHECK(from, kBackward, ": expected w for dx, got none");
    check_same_device(*from, given.dy, kBackward, "w");
    NF_CHECK(from->dim() == 2 && from->size(0) == n && from->size(1) == k, kBackward,
             ": expected w (", n, ", ", k, ") for dy [..., ", n, "], got ", shape_of(*from));
    w.emplace(*from, kBackward, "w");
    const int64_t floats = spec.w_measured ? measured_floats(spec.dgrad_b, k) : 0;
    if (floats == 0) return;
    NF_CHECK(given.scales, kBackward, ": expected scales with what was measured of w, got none");
    float* const first = scales_of(*given.scales, floats, given.dy, kBackward, "scales");
    const int64_t before = given.scales->numel() - floats;
    NF_CHECK(before % kScale == 0, kBackward, ": expected scales as the forward returns them, got ",
             shape_of(*given.scales));
    w_measured = first + before;
  }

  void read_x(const BackwardArguments& given, const BackwardSpec& spec) {
    NF_CHECK(given.x_given.codes, kBackward, ": expected x_columns for dw, got none");
    if (spec.wgrad_b.scaling != Scaling::none) {
      x_given = checked(given.x_given, spec.wgrad_b, k, m, given.dy, kBackward);
      return;
    }
    const Tensor& from = *given.x_given.codes;
    check_same_device(from, given.dy, kBackward, "x_columns");
    x.emplace(from, kBackward, "x");
    NF_CHECK(x->rows == m && x->cols == k, kBackward, ": expected x [..., ", k, "] of ", m,
             " rows, got ", shape_of(from));
  }
};

// dgrad and wgrad, as far as they are wanted.
struct BackwardGemms {
  LayerGemm dgrad, wgrad;

  BackwardGemms(const BackwardInputs& in, const BackwardSpec& spec, Scratch& scratch) {
    if (spec.need_dx) {
      dgrad = LayerGemm(in.m, in.k, in.n, {spec.dgrad_a, &in.dy, 0, {}},
                        {spec.dgrad_b, in.w ? &*in.w : nullptr, 1, in.w_given}, in.dy.type,
                        spec.fast_dgrad, false, scratch, in.on, kBackward);
      const bool scale_known = in.w_measured && spec.dgrad_b.scaling == Scaling::tensor;
      if (scale_known) dgrad.b.take_scale(in.w_measured);
    }
    if (spec.dw) {
      wgrad = LayerGemm(in.n, in.k, in.m, {spec.wgrad_a, &in.dy, 1, {}},
                        {spec.wgrad_b, in.x ? &*in.x : nullptr, 1, in.x_given}, *spec.dw,
                        spec.fast_wgrad, true, scratch, in.on, kBackward);
    }
    if (spec.need_dx && spec.dw && share_tensor_scale(spec.dgrad_a, spec.wgrad_a)) {
      wgrad.a.share_scale(dgrad.a);
    }
  }

  void fill(QuantizeTensor* dy, QuantizeTensor* x, QuantizeTensor* w,
            const Scratch& scratch) const {
    dgrad.fill(dy, w, scratch);
    wgrad.fill(dy, x, scratch);
  }
};

ThreeTensors backward(const BackwardArguments& given, const BackwardSpec& spec,
                      const LayerHistory& history) {
  const BackwardInputs in(given, spec);
  const Launch& on = in.on;

  // outputs
  const ScalarType dtype = given.dy.scalar_type();
  Tensor dx = spec.need_dx ? empty(with_last(given.dy, in.k), dtype, on.device)
                           : empty({0}, dtype, on.device);
  Tensor dw =
      spec.dw ? empty({in.n, in.k}, dtype_of(*spec.dw), on.device) : empty({0}, dtype, on.device);
  Tensor db = spec.db ? empty({in.n}, dtype_of(*spec.db), on.device) : empty({0}, dtype, on.device);

  // plan
  Scratch scratch;
  BackwardGemms gemms(in, spec, scratch);
  int64_t workspace_bytes = 0;
  if (spec.need_dx) workspace_bytes = gemms.dgrad.workspace(dx.data_ptr(), scratch, on);
  if (spec.dw) {
    workspace_bytes = std::max(workspace_bytes, gemms.wgrad.workspace(dw.data_ptr(), scratch, on));
  }
  const int64_t workspace = scratch.add(workspace_bytes);
  QuantizeCall call{kBackward, on.device};
  QuantizeTensor& dy = add(call, in.dy);
  QuantizeTensor* const x = in.x ? &add(call, *in.x) : nullptr;
  QuantizeTensor* const w = in.w ? &add(call, *in.w) : nullptr;
  dy.history = history.of(kDy);
  dy.seed = in.seed;
  if (spec.db) {
    dy.column_sums = db.data_ptr(), dy.sums_type = *spec.db;
    dy.sums_family = spec.dw || !spec.need_dx ? family_of(spec.wgrad_a, spec.wgrad_b)
                                              : family_of(spec.dgrad_a, spec.dgrad_b);
  }
  if (in.w_measured && spec.dgrad_b.scaling == Scaling::row) {
    w->side[1].amax = reinterpret_cast<uint32_t*>(in.w_measured);
    w->side[1].amax_given = true;
  }
  gemms.fill(&dy, x, w, scratch);
  const int64_t quantizing = scratch.add(call.scratch_bytes());
  scratch.allocate(on.device);

  // quantize dy both ways and w across, sum the bias gradient, multiply twice
  gemms.fill(&dy, x, w, scratch);
  call.run(scratch.at(quantizing), on.stream);
  if (spec.need_dx) gemms.dgrad.run(dx.data_ptr(), scratch, workspace, on);
  if (spec.dw) gemms.wgrad.run(dw.data_ptr(), scratch, workspace, on);
  return {dx, dw, db};
}

}  // namespace

FourTensors linear_forward(std::optional<Tensor> x, std::optional<Tensor> w,
                           std::optional<Tensor> bias, int64_t spec, std::optional<Tensor> x_codes,
                           std::optional<Tensor> x_scales, std::optional<Tensor> x_scale,
                           std::optional<Tensor> w_codes, std::optional<Tensor> w_scales,
                           std::optional<Tensor> w_scale, int64_t rows, int64_t out_features,
                           int64_t in_features) {
  const ForwardArguments given{x,
                               w,
                               bias,
                               {x_codes, x_scales, x_scale, "x_codes", "x_scales", "x_scale"},
                               {w_codes, w_scales, w_scale, "w_codes", "w_scales", "w_scale"},
                               rows,
                               out_features,
                               in_features};
  return forward(given, ForwardSpec(spec, kForward), {});
}

ThreeTensors linear_backward(const Tensor& dy, std::optional<Tensor> x_columns,
                             std::optional<Tensor> x_columns_scales, std::optional<Tensor> scales,
                             std::optional<Tensor> w, std::optional<Tensor> seed,
                             int64_t in_features, int64_t spec, std::optional<Tensor> x_scale,
                             std::optional<Tensor> w_codes, std::optional<Tensor> w_scales,
                             std::optional<Tensor> w_scale) {
  const BackwardArguments given{
      dy,
      scales,
      w,
      seed,
      {x_columns, x_columns_scales, x_scale ? x_scale : scales, "x_columns", "x_columns_scales",
       x_scale ? "x_scale" : "scales", !x_scale},
      {w_codes, w_scales, w_scale, "w_codes", "w_scales", "w_scale"},
      in_features};
  return backward(given, BackwardSpec(spec, kBackward), {});
}

FourTensors delayed_linear_forward(const Tensor& x, const Tensor& w, std::optional<Tensor> bias,
                                   Tensor history, int64_t bits) {
  const ForwardSpec spec(bits, kForward);
  NF_CHECK(x.is_cuda(), kForward, ": expected x on cuda as the layer is, got it on cpu (move it)");
  check_history_casts(spec.fprop_a, spec.fprop_b, kForward);
  if (spec.save_x) check_one_history(spec.fprop_a, spec.wgrad_b, kForward);
  const std::optional<Tensor> own_x = x, own_w = w, none;
  const GivenTensors nothing{none, none, none, "", "", ""};
  return forward({own_x, own_w, bias, nothing, nothing, 0, 0, 0}, spec,
                 LayerHistory(history, x, spec.guarded, spec.joins, kForward));
}

ThreeTensors delayed_linear_backward(const Tensor& dy, std::optional<Tensor> x_columns,
                                     std::optional<Tensor> scales, std::optional<Tensor> w,
                                     Tensor history, int64_t in_features, int64_t bits) {
  const BackwardSpec spec(bits, kBackward);
  if (spec.need_dx) check_history_casts(spec.dgrad_a, spec.dgrad_b, kBackward);
  if (spec.dw) check_history_casts(spec.wgrad_a, spec.wgrad_b, kBackward);
  if (spec.need_dx && spec.dw) check_one_history(spec.dgrad_a, spec.wgrad_a, kBackward);
  const std::optional<Tensor> none;
  const GivenTensors x_given{x_columns,          none,     scales, "x_columns",
                             "x_columns_scales", "scales", true};
  return backward({dy, scales, w, none, x_given, {none, none, none, "", "", ""}, in_features}, spec,
                  LayerHistory(history, dy, spec.guarded, spec.joins, kBackward));
}

}  // namespace narrowfloat
