// Decides how a linear layer's forward and backward are put together, each in one call.
#include "cublaslt.h"
#include "epilogue.h"
#include "ops.h"

namespace narrowfloat {
namespace {

// What one product of a layer needs beyond its operands, found before the scratch is allocated.
struct Product {
  int64_t m, n, k;  // d [m, n], k contracted; unpadded
  Real d_type;
  bool padded_d = false;    // n does not fill 16-byte rows: written to the scratch, then copied
  bool bias_apart = false;  // the bias is added after the product, in fp32
  bool bias_converted = false;
  int64_t d_first = 0, bias_first = 0;  // in the scratch

  void set(int64_t m_, int64_t n_, int64_t k_, Real d_type_, Scratch& scratch) {
    m = m_, n = n_, k = k_, d_type = d_type_;
    padded_d = n * size_of(d_type) % 16 != 0;
    if (padded_d) d_first = scratch.add(m * padded(n) * size_of(d_type));
  }

  void set_bias(const void* bias, Real type, Scratch& scratch) {
    bias_apart = d_type == Real::f32;  // cuBLASLt takes no fp32 bias
    bias_converted = !bias_apart && (type != bias_type(d_type) || padded_d ||
                                     reinterpret_cast<uintptr_t>(bias) % 16 != 0);
    if (bias_converted) bias_first = scratch.add(padded(n) * 2);
  }

  // d contiguous [m, n]; a [m, k] and b [n, k] padded with zeros to multiples of 16.
  void run(Operand a, Operand b, void* d, const void* bias, Real bias_real, bool fast,
           const Scratch& scratch, int64_t workspace, const Launch& on) const {
    if (m * n == 0) return;
    if (k == 0) {
      finish_rows(nullptr, n, d, d_type, m, n, bias, bias_real, on.stream);
      return;
    }
    Matmul p{};
    a.rows = m, a.ld = padded(k);
    b.rows = padded_d ? padded(n) : n, b.ld = padded(k);
    p.a = a, p.b = b, p.k = padded(k);
    p.d = padded_d ? scratch.at(d_first) : d;
    p.d_type = d_type, p.ldd = b.rows;
    p.fast = fast;
    if (bias_converted) {
      convert_bias(bias, bias_real, n, scratch.at(bias_first), bias_type(d_type), padded(n),
                   on.stream);
    }
    if (bias && !bias_apart) p.bias = bias_converted ? scratch.at(bias_first) : bias;
    matmul(p, scratch.at(workspace), on.device, on.stream);
    if (padded_d || bias_apart) {
      const bool add = bias && bias_apart;
      if (padded_d || add) {
        finish_rows(p.d, p.ldd, d, d_type, m, n, add ? bias : nullptr, bias_real, on.stream);
      }
    }
  }
};

const float* scale_of(const Tensor& scale, const char* op, const char* name) {
  NF_CHECK(scale.numel() == 2 && scale.is_contiguous() &&
               scale.scalar_type() == ScalarType::Float &&
               reinterpret_cast<uintptr_t>(scale.data_ptr()) % 16 == 0,
           op, ": expected ", name, " as float32 [2] on 16 bytes (scale and multiplier, as "
           "narrowfloat::quantize returns them)");
  return static_cast<const float*>(scale.data_ptr());
}

void check_codes(const Tensor& q, int64_t rows, int64_t cols, Element element, const char* op,
                 const char* name) {
  NF_CHECK(q.dim() == 2 && q.size(0) == padded(rows) && q.size(1) == padded(cols) &&
               q.is_contiguous() && element_of(q, op, name) == element &&
               reinterpret_cast<uintptr_t>(q.data_ptr()) % 16 == 0,
           op, ": expected ", name, " contiguous [", padded(rows), ", ", padded(cols),
           "] in the recipe's format, as narrowfloat::quantize returns it");
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_forward(
    const Tensor& x, const Tensor& w, std::optional<Tensor> bias, std::optional<Tensor> w_rows,
    std::optional<Tensor> w_scale, int64_t x_format, int64_t w_format, bool fast, bool save_x) {
  constexpr const char* op = "linear";
  const Launch on(x, op, "x");
  check_same_device(w, x, op, "w");
  NF_CHECK(w.dim() == 2, op, ": expected w [N,K], got ", w.dim(), " dimensions");
  const Matrix xm(x, op, "x");
  const int64_t m = xm.rows, k = xm.cols, n = w.size(0);
  NF_CHECK(w.size(1) == k, op, ": expected x [..., K] and w [N,K] with one K, got ", k, " and ",
           w.size(1));
  const Element x_element = element_of(x_format, op), w_element = element_of(w_format, op);
  const bool reused = w_rows.has_value() && w_scale.has_value();

  // outputs
  Tensor y = empty(with_last(x, n), x.scalar_type(), on.device);
  Tensor x_columns = save_x ? empty({padded(k), padded(m)}, dtype_of(x_element), on.device)
                            : empty({0}, dtype_of(x_element), on.device);
  Tensor x_scale = empty({2}, ScalarType::Float, on.device);
  Tensor new_w_scale = reused ? empty({0}, ScalarType::Float, on.device)
                              : empty({2}, ScalarType::Float, on.device);

  // scratch
  Scratch scratch;
  Product product;
  product.set(m, n, k, xm.type, scratch);
  Real bias_real = Real::f32;
  const void* bias_data = nullptr;
  std::optional<Tensor> bias_owner;
  if (bias) {
    check_same_device(*bias, x, op, "bias");
    NF_CHECK(bias->dim() == 1 && bias->size(0) == n, op, ": expected bias [", n, "], got ",
             bias->numel(), " elements");
    bias_owner = bias->is_contiguous() ? *bias : torch::stable::contiguous(*bias);
    bias_real = real_of(bias->scalar_type(), op, "bias");
    bias_data = bias_owner->data_ptr();
    product.set_bias(bias_data, bias_real, scratch);
  }
  const int64_t x_first = scratch.add(padded(m) * padded(k));
  const int64_t w_first = reused ? 0 : scratch.add(padded(n) * padded(k));
  const int64_t workspace = scratch.add(workspace_bytes(on.device));
  QuantizeJob jobs[kMaxJobs];
  int count = 0;
  jobs[count++] = xm.job(x_element, nullptr, save_x ? x_columns.data_ptr() : nullptr,
                         static_cast<float*>(x_scale.data_ptr()), false);
  std::optional<Matrix> wm;
  if (reused) {
    check_codes(*w_rows, n, k, w_element, op, "w_rows");
  } else {
    wm.emplace(w, op, "w");
    jobs[count++] = wm->job(w_element, nullptr, nullptr,
                            static_cast<float*>(new_w_scale.data_ptr()), false);
  }
  // A plan's size depends on which copies a job writes, not on where: any address will do.
  uint8_t* const somewhere = reinterpret_cast<uint8_t*>(uintptr_t{256});
  for (int j = 0; j < count; ++j) jobs[j].q_rows = somewhere;
  const int64_t partials = scratch.add(plan_quantize(jobs, count, on.device).scratch_bytes);
  scratch.allocate(on.device);

  // quantize, multiply
  jobs[0].q_rows = scratch.at(x_first);
  if (!reused) jobs[1].q_rows = scratch.at(w_first);
  quantize(plan_quantize(jobs, count, on.device), scratch.at(partials), on.stream);
  const Operand a{scratch.at(x_first), m, 0, x_element,
                  static_cast<const float*>(x_scale.data_ptr())};
  const Operand b = reused ? Operand{w_rows->data_ptr(), n, 0, w_element,
                                     scale_of(*w_scale, op, "w_scale")}
                           : Operand{scratch.at(w_first), n, 0, w_element,
                                     static_cast<const float*>(new_w_scale.data_ptr())};
  product.run(a, b, y.data_ptr(), bias_data, bias_real, fast, scratch, workspace, on);
  return {y, x_columns, x_scale, new_w_scale};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy, std::optional<Tensor> x_columns, std::optional<Tensor> x_scale,
    std::optional<Tensor> w, std::optional<Tensor> w_columns, std::optional<Tensor> w_scale,
    int64_t in_features, int64_t dy_format, int64_t w_format, bool fast_dgrad, bool fast_wgrad,
    bool need_dx, std::optional<ScalarType> dw_dtype, std::optional<ScalarType> db_dtype) {
  constexpr const char* op = "linear_backward";
  const Launch on(dy, op, "dy");
  const Matrix dym(dy, op, "dy");
  const int64_t m = dym.rows, n = dym.cols, k = in_features;
  const bool need_dw = dw_dtype.has_value(), need_db = db_dtype.has_value();
  const Element dy_element = element_of(dy_format, op), w_element = element_of(w_format, op);
  const bool held = w_columns.has_value();

  // operands
  const float* x_scale_data = nullptr;
  if (need_dw) {
    NF_CHECK(x_columns && x_scale, op, ": expected x_columns and x_scale for dw, got none");
    check_same_device(*x_columns, dy, op, "x_columns");
    check_codes(*x_columns, k, m, element_of(*x_columns, op, "x_columns"), op, "x_columns");
    x_scale_data = scale_of(*x_scale, op, "x_scale");
  }
  if (need_dx && held) {
    check_same_device(*w_columns, dy, op, "w_columns");
    check_codes(*w_columns, k, n, w_element, op, "w_columns");
    NF_CHECK(w_scale, op, ": expected w_scale with w_columns, got none");
  }
  std::optional<Matrix> wm;
  if (need_dx && !held) {
    NF_CHECK(w, op, ": expected w for dx, got none");
    check_same_device(*w, dy, op, "w");
    NF_CHECK(w->dim() == 2 && w->size(0) == n && w->size(1) == k, op, ": expected w [", n, ", ", k,
             "] for dy [..., ", n, "]");
    wm.emplace(*w, op, "w");
  }

  // outputs
  const auto none = [&](ScalarType dtype) { return empty({0}, dtype, on.device); };
  Tensor dx = need_dx ? empty(with_last(dy, k), dy.scalar_type(), on.device)
                      : none(dy.scalar_type());
  Tensor dw = need_dw ? empty({n, k}, *dw_dtype, on.device) : none(dy.scalar_type());
  Tensor db = need_db ? empty({n}, *db_dtype, on.device) : none(dy.scalar_type());

  // scratch
  Scratch scratch;
  Product dgrad, wgrad;
  if (need_dx) dgrad.set(m, k, n, dym.type, scratch);
  if (need_dw) wgrad.set(n, k, m, real_of(*dw_dtype, op, "dw_dtype"), scratch);
  const int64_t codes = padded(m) * padded(n);
  const int64_t rows_first = scratch.add(need_dx ? codes : 0);
  const int64_t columns_first = scratch.add(need_dw ? codes : 0);
  const int64_t w_first = scratch.add(wm ? padded(n) * padded(k) : 0);
  const int64_t dy_scale = scratch.add(2 * sizeof(float));
  const int64_t new_w_scale = scratch.add(2 * sizeof(float));
  const int64_t workspace = scratch.add(workspace_bytes(on.device));
  QuantizeJob jobs[kMaxJobs];
  const auto fill = [&](bool sized) {  // sized: the scratch exists and has addresses
    uint8_t* const somewhere = reinterpret_cast<uint8_t*>(uintptr_t{256});
    const auto at = [&](int64_t first) { return sized ? scratch.at(first) : somewhere; };
    const bool codes_needed = need_dx || need_dw;
    jobs[0] = dym.job(dy_element, need_dx ? at(rows_first) : nullptr,
                      need_dw ? at(columns_first) : nullptr,
                      codes_needed ? reinterpret_cast<float*>(at(dy_scale)) : nullptr,
                      !codes_needed);
    jobs[0].column_sums = need_db ? db.data_ptr() : nullptr;
    jobs[0].sums_type = need_db ? real_of(*db_dtype, op, "db_dtype") : Real::f32;
    if (!wm) return 1;
    float* scale = w_scale ? const_cast<float*>(scale_of(*w_scale, op, "w_scale"))
                           : reinterpret_cast<float*>(at(new_w_scale));
    jobs[1] = wm->job(w_element, nullptr, at(w_first), scale, w_scale.has_value());
    return 2;
  };
  const int64_t partials =
      scratch.add(plan_quantize(jobs, fill(false), on.device).scratch_bytes);
  scratch.allocate(on.device);

  // quantize dy both ways and w across, sum the bias gradient, multiply twice
  const int count = fill(true);
  quantize(plan_quantize(jobs, count, on.device), scratch.at(partials), on.stream);
  const float* dy_scale_data = scratch.at<float>(dy_scale);
  if (need_dx) {
    const Operand a{scratch.at(rows_first), m, 0, dy_element, dy_scale_data};
    const Operand b{held ? w_columns->data_ptr() : scratch.at(w_first), k, 0, w_element,
                    w_scale ? scale_of(*w_scale, op, "w_scale") : scratch.at<float>(new_w_scale)};
    dgrad.run(a, b, dx.data_ptr(), nullptr, Real::f32, fast_dgrad, scratch, workspace, on);
  }
  if (need_dw) {
    const Operand a{scratch.at(columns_first), n, 0, dy_element, dy_scale_data};
    const Operand b{x_columns->data_ptr(), k, 0, element_of(*x_columns, op, "x_columns"),
                    x_scale_data};
    wgrad.run(a, b, dw.data_ptr(), nullptr, Real::f32, fast_wgrad, scratch, workspace, on);
  }
  return {dx, dw, db};
}

}  // namespace narrowfloat
