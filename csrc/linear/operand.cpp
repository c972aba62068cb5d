// An operand of a GEMM of a layer: what of it lies in the scratch, what quantizes it, and what is
// left to do to it before cuBLASLt takes it.
#include "linear/operand.h"

#include "quantize/block.h"
#include "quantize/fp4.h"

namespace narrowfloat {

OperandPlan::OperandPlan(const OperandSource& source, int64_t rows, int64_t k, Route route,
                         bool as_it_lies, Scratch& scratch)
    : cast_(source.cast),
      route_(route),
      rows_(rows),
      k_(k),
      given_(source.given.value_or(GivenOperand{})),
      scale_(const_cast<float*>(given_.scale)),
      side_(source.side) {
  origin_ = source.given ? Origin::given : as_it_lies ? Origin::as_it_lies : Origin::made;
  if (origin_ == Origin::as_it_lies) {
    x_ = source.x->owner.data_ptr();
    x_ld_ = source.x->row_stride;
    k_first_ = side_ == 1;
  }
  // Blocks of 16 x 16 are the same numbers in both orientations: a bf16 GEMM takes w's rows.
  if (made() && side_ == 1 && in_bf16() && cast_.square && is_fp4(cast_.scaling)) {
    side_ = 0;
    k_first_ = true;
  }
  reserve(scratch);
}

int64_t OperandPlan::bf16_bytes() const {
  if (k_first_) return padded(k_) * padded32(rows_) * 2;
  return padded(rows_) * (cast_.scaling == Scaling::tensor ? padded(k_) : padded32(k_)) * 2;
}

void OperandPlan::reserve(Scratch& scratch) {
  if (origin_ == Origin::as_it_lies) return;
  if (made()) {
    const bool codes = form() == Form::codes;
    data_first_ = scratch.add(codes ? codes_bytes(cast_, rows_, k_) : bf16_bytes());
    if (codes && cast_.scaling != Scaling::tensor) {
      scales_first_ = scratch.add(scales_bytes(cast_, rows_, k_));
    }
    if (has_tensor_scale(cast_.scaling)) scale_first_ = scratch.add(kScale * sizeof(float));
  }
  if (dequantized()) bf16_first_ = scratch.add(bf16_bytes());
  if (route_ == Route::mx) {
    mx_first_ = scratch.add(mx_scale_bytes(rows_, k_));
    widened_ = padded(k_) % 32 != 0;
    if (widened_) wide_first_ = scratch.add(padded(rows_) * padded32(k_));
  }
}

QuantizeSide* OperandPlan::fill(QuantizeTensor* tensor, const Scratch& scratch) const {
  if (!made()) return nullptr;
  QuantizeSide& side = tensor->side[side_];
  side.form = form();
  side.cast = cast_;
  side.data = scratch.at(data_first_);
  if (side.form == Form::codes) side.scales = scratch.at(scales_first_);
  if (has_tensor_scale(cast_.scaling)) side.scale = tensor_scale(scratch);
  side.scale_given = scale_given_;
  return &side;
}

ScaleMode OperandPlan::mode() const {
  switch (cast_.scaling) {
    case Scaling::row:
      return ScaleMode::row;
    case Scaling::mx:
      return ScaleMode::vec32_ue8m0;
    case Scaling::block:
    case Scaling::pow2:
      return route_ == Route::mx ? ScaleMode::vec32_ue8m0
             : cast_.square      ? ScaleMode::square128
                                 : ScaleMode::vec128;
    default:
      return ScaleMode::tensor;
  }
}

Operand OperandPlan::operand(const Scratch& scratch) const {
  Operand o{};
  o.rows = rows_;
  o.format = format();
  o.k_first = k_first_;
  if (origin_ == Origin::as_it_lies) {
    o.q = x_, o.ld = x_ld_;
    return o;
  }
  if (in_bf16()) {
    o.q = scratch.at(dequantized() ? bf16_first_ : data_first_);
    o.ld = k_first_                           ? padded32(rows_)
           : cast_.scaling == Scaling::tensor ? padded(k_)
                                              : padded32(k_);
    return o;
  }
  o.q = widened_ ? scratch.at(wide_first_) : codes(scratch);
  o.ld = widened_ ? padded32(k_) : codes_ld(cast_, k_);
  if (route_ == Route::epilogue) return o;
  o.mode = mode();
  o.scale = cast_.scaling == Scaling::tensor ? tensor_scale(scratch)
            : route_ == Route::mx            ? scratch.at(mx_first_)
                                             : scales(scratch);
  return o;
}

void OperandPlan::finish(const Scratch& scratch, float* alpha, const Launch& on) const {
  if (dequantized()) {
    uint8_t* const to = scratch.at(bf16_first_);
    const auto *from = static_cast<const uint8_t*>(codes(scratch)),
               *its_scales = static_cast<const uint8_t*>(scales(scratch));
    switch (family_of(cast_.scaling)) {
      case Family::tensor:
        tensor_dequantize(cast_.element, from, tensor_scale(scratch), rows_, k_, to, alpha,
                          on.stream);
        break;
      case Family::fp4:
        fp4_dequantize(from, its_scales, rows_, k_, to, on.device, on.stream);
        break;
      case Family::block:
        block_dequantize(cast_.scaling, cast_.square, from, its_scales, rows_, k_, to, on.stream);
        break;
    }
  }
  if (route_ == Route::mx) {
    block_spread_scales(scales(scratch), cast_.square, rows_, k_, scratch.at(mx_first_), on.stream);
  }
  if (widened_) {
    const int64_t from = padded(k_), to = padded32(k_);
    uint8_t* const wide = scratch.at(wide_first_);
    NF_CUDA(cudaMemsetAsync(wide, 0, padded(rows_) * to, on.stream));
    NF_CUDA(cudaMemcpy2DAsync(wide, to, codes(scratch), from, from, padded(rows_),
                              cudaMemcpyDeviceToDevice, on.stream));
  }
}

QuantizeTensor& add(QuantizeCall& call, const Matrix& x) {
  QuantizeTensor& t = call.tensor[call.count++];
  t.x = x.owner.data_ptr();
  t.type = x.type;
  t.rows = x.rows, t.cols = x.cols;
  t.row_stride = x.row_stride, t.col_stride = x.col_stride;
  return t;
}

}  // namespace narrowfloat
