// The choices of an operator's call as one integer: how it is read, and which casts there are.
#include "linear/spec.h"

#include "api/check.h"

namespace narrowfloat {
namespace {

// cast.py has the same table.
void check_cast(const Cast& c, bool e5m2, const char* op) {
  const Scaling s = c.scaling;
  const bool nvfp4 = s == Scaling::nvfp4, fp4 = is_fp4(s);
  const auto refuse = [&](const char* expected) {
    throw_value_error(message(op, ": expected ", expected, ", got it with scaling ", name_of(s)));
  };
  if (e5m2 && s != Scaling::tensor && s != Scaling::row)
    refuse("e5m2 with one scale a tensor or row");
  if (c.square && s != Scaling::block && s != Scaling::pow2 && !nvfp4) {
    refuse("square blocks with block, block_pow2 or nvfp4");
  }
  if (c.stochastic && !fp4) refuse("stochastic rounding with FP4");
  if (c.hadamard && !fp4) refuse("hadamard with FP4");
  if (c.four_over_six && !nvfp4) refuse("four over six with nvfp4");
  if (c.scale_up && !fp4) refuse("scale_up with FP4");
  NF_CHECK(!(c.four_over_six && c.stochastic), op,
           ": expected four over six with nearest rounding, got it with stochastic");
  NF_CHECK(!(c.square && c.hadamard), op, ": expected square blocks without hadamard, got both");
}

Cast cast_of(int64_t bits, const char* op) {
  Cast c;
  if (bits == 0) return c;
  const int64_t scaling = spec::cast_scaling.of(bits);
  NF_CHECK(scaling < kScalings, op, ": expected a scaling from 0 to ", kScalings - 1, ", got ",
           scaling);
  c.scaling = static_cast<Scaling>(scaling);
  c.square = spec::cast_square.in(bits);
  c.stochastic = spec::cast_stochastic.in(bits);
  c.hadamard = spec::cast_hadamard.in(bits);
  c.four_over_six = spec::cast_four_over_six.in(bits);
  c.scale_up = spec::cast_scale_up.in(bits);
  const bool e5m2 = spec::cast_e5m2.in(bits);
  if (c.scaling != Scaling::none) {
    c.element = is_fp4(c.scaling) ? Element::e2m1 : e5m2 ? Element::e5m2 : Element::e4m3;
  }
  check_cast(c, e5m2, op);
  return c;
}

// Of the operands of one GEMM.
void check_gemm(const Cast& a, const Cast& b, const char* op) {
  const auto beside_bf16 = [](Scaling s) { return s == Scaling::tensor || s == Scaling::none; };
  NF_CHECK(
      a.scaling == b.scaling || (beside_bf16(a.scaling) && beside_bf16(b.scaling)), op,
      ": expected two operands of one scaling, or one scaled by tensor beside one in bf16, got ",
      name_of(a.scaling), " and ", name_of(b.scaling), " (no tensor core multiplies the two)");
  const bool by_row = b.scaling == Scaling::row;
  NF_CHECK(b.element != Element::e5m2 || (a.element != Element::e5m2 && !by_row), op,
           ": expected e5m2 of one operand at most, by row of the first alone, got ",
           by_row ? "it of the second" : "two");
  NF_CHECK(!a.square, op, ": expected square blocks of a GEMM's second operand alone, got them of ",
           "the first");
  NF_CHECK(a.hadamard == b.hadamard, op,
           ": expected hadamard of both operands of a GEMM or of none, got it of one");
}

std::optional<Real> type_of(int64_t code) {
  if (code == 0) return std::nullopt;
  return static_cast<Real>(code - 1);
}

}  // namespace

ForwardSpec::ForwardSpec(int64_t bits, const char* op)
    : fprop_a(cast_of(spec::forward_fprop_a.of(bits), op)),
      fprop_b(cast_of(spec::forward_fprop_b.of(bits), op)),
      wgrad_b(cast_of(spec::forward_wgrad_b.of(bits), op)),
      fast(spec::forward_fast.in(bits)),
      save_x(spec::forward_save_x.in(bits)),
      keep_w(spec::forward_keep_w.in(bits)),
      guarded(spec::forward_guarded.in(bits)),
      joins(spec::forward_joins.in(bits)),
      y_type(type_of(spec::forward_y_dtype.of(bits))) {
  check_gemm(fprop_a, fprop_b, op);
}

BackwardSpec::BackwardSpec(int64_t bits, const char* op)
    : dgrad_a(cast_of(spec::backward_dgrad_a.of(bits), op)),
      dgrad_b(cast_of(spec::backward_dgrad_b.of(bits), op)),
      wgrad_a(cast_of(spec::backward_wgrad_a.of(bits), op)),
      wgrad_b(cast_of(spec::backward_wgrad_b.of(bits), op)),
      fast_dgrad(spec::backward_fast_dgrad.in(bits)),
      fast_wgrad(spec::backward_fast_wgrad.in(bits)),
      need_dx(spec::backward_need_dx.in(bits)),
      w_measured(spec::backward_w_measured.in(bits)),
      guarded(spec::backward_guarded.in(bits)),
      joins(spec::backward_joins.in(bits)),
      dw(type_of(spec::backward_dw_dtype.of(bits))),
      db(type_of(spec::backward_db_dtype.of(bits))) {
  if (need_dx) check_gemm(dgrad_a, dgrad_b, op);
  if (dw) check_gemm(wgrad_a, wgrad_b, op);
}

QuantizeSpec::QuantizeSpec(int64_t bits, const char* op) {
  const Cast rows = cast_of(spec::quantize_rows.of(bits), op),
             columns = cast_of(spec::quantize_columns.of(bits), op);
  side[0] = {spec::quantize_want_rows.in(bits) ? rows : Cast{},
             spec::quantize_rows_as_operand.in(bits)};
  side[1] = {spec::quantize_want_columns.in(bits) ? columns : Cast{},
             spec::quantize_columns_as_operand.in(bits)};
  for (const Side& s : side) {
    const Scaling scaling = s.cast.scaling;
    NF_CHECK(!s.as_operand || scaling == Scaling::none || power_of_two(scaling) || is_fp4(scaling),
             op, ": expected powers of two as scales of a bf16 operand, got ", name_of(scaling),
             " (code x scale is no bf16 with fp32 scales)");
  }
}

}  // namespace narrowfloat
