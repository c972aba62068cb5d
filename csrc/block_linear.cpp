// Decides how a linear layer in FP8 with finer scales is put together, each product by its own
// scaling.
#include <algorithm>

#include "block_operand.h"
#include "cublaslt.h"
#include "device.h"
#include "linear_operands.h"

namespace narrowfloat {
namespace {

// settings.py gives the same bits
constexpr int64_t kScalingBits = 7, kOperandForm = 8, kE5m2 = 16, kSquare = 32;
constexpr int kColumnsShift = 8;
constexpr int64_t kDyE5m2 = 1 << 9, kFastFprop = 1 << 11, kFastOfDgrad = 1 << 20,
                  kFastOfWgrad = 1 << 21, kKeepW = 1 << 22;

Scaling scaling_of(int64_t code, const char* op) {
  NF_CHECK(code >= 0 && code <= 4, op, ": expected a scaling from 0 to 4, got ", code);
  return static_cast<Scaling>(code);
}

const char* name_of(Scaling s) {  // formats.py gives the same
  constexpr const char* kNames[] = {"bf16", "row", "block", "block_pow2", "mx"};
  return kNames[static_cast<int>(s)];
}

struct Choices {
  Scaling fprop, dgrad, wgrad;
  Element dy;
  bool fast_fprop, fast_dgrad, fast_wgrad, wanted, keep_w;

  Choices(int64_t bits, const char* op)
      : fprop(scaling_of(bits & kScalingBits, op)),
        dgrad(scaling_of(bits >> 3 & kScalingBits, op)),
        wgrad(scaling_of(bits >> 6 & kScalingBits, op)),
        dy(bits & kDyE5m2 ? Element::e5m2 : Element::e4m3),
        fast_fprop((bits & kFastFprop) && fprop == Scaling::row),
        fast_dgrad((bits & kFastOfDgrad) && dgrad == Scaling::row),
        fast_wgrad((bits & kFastOfWgrad) && wgrad == Scaling::row),
        wanted(bits & kSaveX),
        keep_w((bits & kKeepW) && fprop == Scaling::row && dgrad == Scaling::row) {}

  Element dy_for(Scaling scaling) const { return scaling == Scaling::row ? dy : Element::e4m3; }
};
static_assert(kSaveX == kNeedDx);

Route route_on(Scaling scaling, int device, const char* op) {
  const int capability = device_of(device).capability;
  const Route route = block_route(scaling, capability, cublaslt_version());
  NF_CHECK(route != Route::refused, op,
           ": expected fp32 scales by blocks of 128 on sm_90 with cuBLASLt 12.9 or newer, got sm_",
           capability, " with ", cublaslt_version(),
           " (fp8_block_pow2 runs everywhere from sm_89 on)");
  return route;
}

// Of a product whose w is given quantized.
void check_held(Scaling scaling, const char* op) {
  NF_CHECK(scaling != Scaling::none, op,
           ": expected no quantized w for a product in bf16, got one (pass w alone)");
}

// Codes of [rows, cols] and their scales, as block_quantize returns them.
void check_quantized(const Tensor& codes, const std::optional<Tensor>& scales, Scaling scaling,
                     bool square, int64_t rows, int64_t cols, const Tensor& as, const char* op,
                     const char* name) {
  NF_CHECK(scales, op, ": expected ", name, "_scales for ", name, ", got none");
  check_same_device(codes, as, op, name);
  check_same_device(*scales, as, op, (std::string(name) + "_scales").c_str());
  const ScalarType scale_dtype = scaling == Scaling::mx ? ScalarType::Byte : ScalarType::Float;
  const int64_t bytes = scale_bytes(scaling, square, rows, cols);
  NF_CHECK(codes.dim() == 2 && codes.size(0) == padded(rows) &&
               codes.size(1) == codes_cols(scaling, cols) && codes.is_contiguous() &&
               codes.scalar_type() == ScalarType::Float8_e4m3fn &&
               reinterpret_cast<uintptr_t>(codes.data_ptr()) % 16 == 0 &&
               scales->scalar_type() == scale_dtype && scales->is_contiguous() &&
               scales->numel() * (scaling == Scaling::mx ? 1 : 4) == bytes &&
               reinterpret_cast<uintptr_t>(scales->data_ptr()) % 16 == 0,
           op, ": expected ", name, " as float8_e4m3fn [", padded(rows), ", ",
           codes_cols(scaling, cols), "] with ", bytes,
           " bytes of scales, as narrowfloat quantizes them, got ", shape_of(codes), " with ",
           shape_of(*scales));
}

// Codes of [rows, cols] and their scales, as operators return them.
struct Returned {
  Tensor codes, scales;

  static Returned none(int device) {
    return {empty({0}, ScalarType::Float8_e4m3fn, device), empty({0}, ScalarType::Float, device)};
  }
  static Returned of(Scaling scaling, Element element, bool square, int64_t rows, int64_t cols,
                     int device) {
    Tensor codes = empty({padded(rows), codes_cols(scaling, cols)}, dtype_of(element), device);
    const int64_t across = blocks_of(cols, kBlock);
    if (scaling == Scaling::mx) {
      return {codes, empty({mx_scale_bytes(rows, cols)}, ScalarType::Byte, device)};
    }
    if (scaling == Scaling::row) return {codes, empty({padded(rows)}, ScalarType::Float, device)};
    if (square) {
      return {codes,
              empty({blocks_of(rows, kBlock), (across + 3) / 4 * 4}, ScalarType::Float, device)};
    }
    return {codes, empty({across, padded(rows)}, ScalarType::Float, device)};
  }
  void fill(BlockSide& side, Scaling scaling, Element element, bool square) const {
    side.form = BlockForm::codes;
    side.scaling = scaling;
    side.element = element;
    side.square = square;
    side.data = codes.data_ptr();
    side.scales = scales.data_ptr();
  }
};

void quantize(const BlockJob& job, const Scratch& scratch, int64_t first, const Launch& on) {
  block_quantize(job, scratch.at(first), on.device, on.stream);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> block_quantize_op(const Tensor& x, int64_t settings) {
  constexpr const char* op = "block_quantize";
  const Launch on(x, op, "x");
  const Matrix m(x, op, "x");
  BlockJob job = job_of(m);
  std::vector<Returned> made;
  for (int k = 0; k < 2; ++k) {
    const int64_t bits = settings >> (k * kColumnsShift) & 0xff;
    const Scaling scaling = scaling_of(bits & kScalingBits, op);
    const bool operand = bits & kOperandForm, square = bits & kSquare;
    const Element element = bits & kE5m2 ? Element::e5m2 : Element::e4m3;
    const int64_t rows = k ? m.cols : m.rows, cols = k ? m.rows : m.cols;
    NF_CHECK(!operand || power_of_two(scaling), op,
             ": expected powers of two as scales of a bf16 operand, got ", name_of(scaling),
             " (code x scale is no bf16 with fp32 scales)");
    NF_CHECK(element == Element::e4m3 || scaling == Scaling::row, op,
             ": expected e5m2 with scales by row, got ", name_of(scaling));
    NF_CHECK(!square || has_square(scaling), op, ": expected squares with blocks of 128, got ",
             name_of(scaling));
    if (scaling == Scaling::none) {
      made.push_back(Returned::none(on.device));
    } else if (operand) {
      made.push_back({empty({padded(rows), padded32(cols)}, ScalarType::BFloat16, on.device),
                      empty({0}, ScalarType::Float, on.device)});
      made[k].fill(job.side[k], scaling, element, square);
      job.side[k].form = BlockForm::operand;
    } else {
      made.push_back(Returned::of(scaling, element, square, rows, cols, on.device));
      made[k].fill(job.side[k], scaling, element, square);
    }
  }
  Scratch scratch;
  const int64_t first = scratch.add(block_scratch_bytes(job));
  scratch.allocate(on.device);
  quantize(job, scratch, first, on);
  return {made[0].codes, made[0].scales, made[1].codes, made[1].scales};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> block_linear_forward(
    const Tensor& x, const Tensor& w, std::optional<Tensor> bias, int64_t settings,
    std::optional<Tensor> w_rows, std::optional<Tensor> w_rows_scales) {
  constexpr const char* op = "linear";
  const ForwardOperands given(x, w, op);
  const Launch& on = given.on;
  const Matrix &xm = given.x, &wm = given.w;
  const int64_t m = xm.rows, k = xm.cols, n = wm.rows;
  const Choices choices(settings, op);
  const Scaling scaling = choices.fprop;
  const Route route = route_on(scaling, on.device, op);
  const bool save_x = choices.wanted && choices.wgrad != Scaling::none;
  const bool keep_w = choices.keep_w && !w_rows;
  if (w_rows) {
    check_held(scaling, op);
    check_quantized(*w_rows, w_rows_scales, scaling, has_square(scaling), n, k, x, op, "w_rows");
  }

  // outputs
  Tensor y = empty(with_last(x, n), x.scalar_type(), on.device);
  const Returned columns = save_x
                               ? Returned::of(choices.wgrad, Element::e4m3, false, k, m, on.device)
                               : Returned::none(on.device);
  Tensor w_columns = empty({keep_w ? padded(k) : 0}, ScalarType::Float, on.device);

  // scratch
  Scratch scratch;
  Step fprop;
  const bool direct = scaling == Scaling::none && k % kPad == 0;
  fprop.a = direct && lies_well(xm) ? Side::direct(xm, 0)
                                    : Side(xm, 0, scaling, route, Element::e4m3, false, scratch);
  if (w_rows) {
    fprop.b = Side::quantized(w_rows->data_ptr(), w_rows_scales->data_ptr(), n, k, scaling, route,
                              true, scratch);
  } else {
    fprop.b = direct && lies_well(wm) && n % 8 == 0
                  ? Side::direct(wm, 0)
                  : Side(wm, 0, scaling, route, Element::e4m3, true, scratch);
  }
  fprop.row_scales = route == Route::epilogue;
  fprop.product = Product(m, n, k, xm.type, choices.fast_fprop, scratch, fprop.a.format(),
                          around(scaling, route));
  const std::optional<Tensor> own_bias = bias_for(bias, n, x, op);
  if (own_bias) fprop.product.plan_bias(*own_bias, op, scratch);
  const int64_t workspace = scratch.add(fprop.workspace(y.data_ptr(), on));
  BlockJob xj = job_of(xm), wj = job_of(wm);
  if (save_x) columns.fill(xj.side[1], choices.wgrad, Element::e4m3, false);
  if (keep_w) wj.side[1].amax = static_cast<uint32_t*>(w_columns.data_ptr());
  fprop.a.fill(xj.side[0], scratch);  // without addresses, for planning
  fprop.b.fill(wj.side[0], scratch);
  const int64_t x_first = scratch.add(block_scratch_bytes(xj));
  const int64_t w_first = scratch.add(block_scratch_bytes(wj));
  scratch.allocate(on.device);

  // quantize, multiply
  fprop.a.fill(xj.side[0], scratch);
  fprop.b.fill(wj.side[0], scratch);
  if (fprop.b.made() || keep_w) quantize(wj, scratch, w_first, on);
  quantize(xj, scratch, x_first, on);
  fprop.run(y.data_ptr(), scratch, workspace, on);
  return {y, columns.codes, columns.scales, w_columns};
}

std::tuple<Tensor, Tensor, Tensor> block_linear_backward(
    const Tensor& dy, std::optional<Tensor> x, std::optional<Tensor> x_scales,
    std::optional<Tensor> w, std::optional<Tensor> w_columns_amax, int64_t in_features,
    int64_t settings, std::optional<Tensor> w_columns, std::optional<Tensor> w_columns_scales) {
  constexpr const char* op = "linear_backward";
  const Launch on(dy, op, "dy");
  const Matrix dym(dy, op, "dy");
  const int64_t m = dym.rows, n = dym.cols, k = in_features;
  const Choices choices(settings, op);
  const bool need_dx = choices.wanted;
  const std::optional<Real> dw_type = real_of(settings >> kDwShift & kTypeBits, op),
                            db_type = real_of(settings >> kDbShift & kTypeBits, op);
  const Route dgrad_route = need_dx ? route_on(choices.dgrad, on.device, op) : Route::native,
              wgrad_route = dw_type ? route_on(choices.wgrad, on.device, op) : Route::native;

  // operands
  std::optional<Matrix> wm, xm;
  const uint32_t* w_amax = nullptr;
  const bool held = need_dx && w_columns;
  if (held) {
    check_held(choices.dgrad, op);
    check_quantized(*w_columns, w_columns_scales, choices.dgrad, has_square(choices.dgrad), k, n,
                    dy, op, "w_columns");
  } else if (need_dx) {
    wm = weight_for_dx(w, dy, n, k, op);
    if (w_columns_amax && w_columns_amax->numel() > 0 && choices.dgrad == Scaling::row) {
      check_same_device(*w_columns_amax, dy, op, "w_columns_amax");
      NF_CHECK(w_columns_amax->numel() == padded(k) && w_columns_amax->is_contiguous() &&
                   w_columns_amax->scalar_type() == ScalarType::Float,
               op, ": expected w_columns_amax as float32 [", padded(k),
               "], as the forward returns it, got ", shape_of(*w_columns_amax));
      w_amax = static_cast<const uint32_t*>(w_columns_amax->data_ptr());
    }
  }
  if (dw_type) {
    NF_CHECK(x, op, ": expected x for dw, got none");
    check_same_device(*x, dy, op, "x");
    if (choices.wgrad == Scaling::none) {
      xm.emplace(*x, op, "x");
      NF_CHECK(xm->rows == m && xm->cols == k, op, ": expected x [..., ", k, "] of ", m,
               " rows, got ", shape_of(*x));
    } else {
      check_quantized(*x, x_scales, choices.wgrad, false, k, m, dy, op, "x_columns");
    }
  }

  // outputs
  const auto nothing = [&](ScalarType dtype) { return empty({0}, dtype, on.device); };
  Tensor dx =
      need_dx ? empty(with_last(dy, k), dy.scalar_type(), on.device) : nothing(dy.scalar_type());
  Tensor dw = dw_type ? empty({n, k}, dtype_of(*dw_type), on.device) : nothing(dy.scalar_type());
  Tensor db = db_type ? empty({n}, dtype_of(*db_type), on.device) : nothing(dy.scalar_type());

  // scratch
  Scratch scratch;
  Step dgrad, wgrad;
  int64_t workspace_bytes = 0;
  if (need_dx) {
    const Scaling s = choices.dgrad;
    const bool direct = s == Scaling::none && n % kPad == 0;
    dgrad.a = direct && lies_well(dym)
                  ? Side::direct(dym, 0)
                  : Side(dym, 0, s, dgrad_route, choices.dy_for(s), false, scratch);
    if (held) {
      dgrad.b = Side::quantized(w_columns->data_ptr(), w_columns_scales->data_ptr(), k, n, s,
                                dgrad_route, true, scratch);
    } else {
      dgrad.b = direct && lies_well(*wm)
                    ? Side::direct(*wm, 1)
                    : Side(*wm, 1, s, dgrad_route, Element::e4m3, true, scratch);
    }
    dgrad.row_scales = dgrad_route == Route::epilogue;
    dgrad.product = Product(m, k, n, dym.type, choices.fast_dgrad, scratch, dgrad.a.format(),
                            around(s, dgrad_route));
    workspace_bytes = dgrad.workspace(dx.data_ptr(), on);
  }
  if (dw_type) {
    const Scaling s = choices.wgrad;
    Around how = around(s, wgrad_route);
    if (s == Scaling::none) {
      const bool both = lies_well(dym) && lies_well(*xm);
      if (both) how = Around::exact_k;
      const bool direct = both || m % kPad == 0;
      wgrad.a = direct && lies_well(dym)
                    ? Side::direct(dym, 1)
                    : Side(dym, 1, s, wgrad_route, Element::e4m3, false, scratch);
      wgrad.b = direct && lies_well(*xm)
                    ? Side::direct(*xm, 1)
                    : Side(*xm, 1, s, wgrad_route, Element::e4m3, false, scratch);
    } else {
      wgrad.a = Side(dym, 1, s, wgrad_route, choices.dy_for(s), false, scratch);
      wgrad.b = Side::quantized(x->data_ptr(), x_scales->data_ptr(), k, m, s, wgrad_route, false,
                                scratch);
    }
    wgrad.row_scales = wgrad_route == Route::epilogue;
    wgrad.product = Product(n, k, m, *dw_type, choices.fast_wgrad, scratch, wgrad.a.format(), how);
    workspace_bytes = std::max(workspace_bytes, wgrad.workspace(dw.data_ptr(), on));
  }
  const int64_t workspace = scratch.add(workspace_bytes);
  BlockJob dyj = job_of(dym), wj{}, xj{};
  if (db_type) dyj.column_sums = db.data_ptr(), dyj.sums_type = *db_type;
  if (wm) {
    wj = job_of(*wm);
    wj.side[1].amax = const_cast<uint32_t*>(w_amax);
    wj.side[1].amax_given = w_amax != nullptr;
  }
  if (xm) xj = job_of(*xm);
  const auto fill = [&] {
    dgrad.a.fill(dyj.side[0], scratch);
    wgrad.a.fill(dyj.side[1], scratch);
    dgrad.b.fill(wj.side[1], scratch);
    if (xm) wgrad.b.fill(xj.side[1], scratch);
  };
  fill();  // without addresses, for planning
  const int64_t dy_first = scratch.add(block_scratch_bytes(dyj));
  const int64_t w_first = scratch.add(block_scratch_bytes(wj));
  const int64_t x_first = scratch.add(block_scratch_bytes(xj));
  scratch.allocate(on.device);

  // quantize w across, dy both ways with its sums; multiply twice
  fill();
  if (dgrad.b.made()) quantize(wj, scratch, w_first, on);
  if (xm && wgrad.b.made()) quantize(xj, scratch, x_first, on);
  quantize(dyj, scratch, dy_first, on);
  if (need_dx) dgrad.run(dx.data_ptr(), scratch, workspace, on);
  if (dw_type) wgrad.run(dw.data_ptr(), scratch, workspace, on);
  return {dx, dw, db};
}

}  // namespace narrowfloat
