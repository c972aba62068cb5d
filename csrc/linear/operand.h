// An operand of a GEMM of a layer: what of it lies in the scratch, what quantizes it, and what is
// left to do to it before cuBLASLt takes it.
#pragma once

#include "gemm/cublaslt.h"
#include "linear/quantized.h"
#include "linear/route.h"

namespace narrowfloat {

// bf16 whose rows start on 16 bytes and are whole 16-byte words.
inline bool is_aligned(const Matrix& x) {
  return x.type == Real::bf16 && x.col_stride == 1 && x.row_stride % 8 == 0 && x.cols % 8 == 0 &&
         x.row_stride >= x.cols && reinterpret_cast<uintptr_t>(x.owner.data_ptr()) % 16 == 0;
}

// What an operand [rows, k] is made of: one orientation of a tensor, or what a caller quantized.
struct OperandSource {
  Cast cast;
  const Matrix* x = nullptr;
  int side = 0;                       // of x: 0 contracted along its columns, 1 its transpose
  std::optional<GivenOperand> given;  // instead of x
};

class OperandPlan {
 public:
  OperandPlan() = default;
  // as_it_lies: cuBLASLt reads x itself, which is_aligned().
  OperandPlan(const OperandSource& source, int64_t rows, int64_t k, Route route, bool as_it_lies,
              Scratch& scratch);

  // Does a call that quantizes make it?
  bool made() const { return origin_ == Origin::made; }

  // Where its tensor scale is written, instead of the scratch; where it is read from. Before
  // fill().
  void put_scale(float* scale) { scale_ = scale; }
  void take_scale(float* scale) { scale_ = scale, scale_given_ = true; }
  // With another orientation of the same tensor, see share_tensor_scale().
  void share_scale(const OperandPlan& other) {
    scale_ = other.scale_, scale_first_ = other.scale_first_;
  }
  float* tensor_scale(const Scratch& scratch) const {
    return scale_ ? scale_ : scratch.at<float>(scale_first_);
  }

  // Its side of the tensor that it is made of, which is returned; null where it is not made.
  QuantizeSide* fill(QuantizeTensor* tensor, const Scratch& scratch) const;

  Element format() const { return in_bf16() ? Element::bf16 : cast_.element; }

  // As cuBLASLt takes it; its addresses are right once the scratch is allocated.
  Operand operand(const Scratch& scratch) const;

  // After it was quantized: launches what is left to do. alpha: where its tensor scale goes, if it
  // is the only one of the GEMM.
  void finish(const Scratch& scratch, float* alpha, const Launch& on) const;

  // Of EdgeRule::row_scales.
  const float* row_scales(const Scratch& scratch) const {
    return static_cast<const float*>(scales(scratch));
  }

 private:
  enum class Origin { as_it_lies, made, given };

  bool in_bf16() const { return route_ == Route::bf16 || cast_.scaling == Scaling::none; }
  // bf16 is made of codes here, not by the call that quantizes
  bool dequantized() const {
    return in_bf16() && (origin_ == Origin::given || cast_.scaling == Scaling::tensor);
  }
  Form form() const { return in_bf16() && !dequantized() ? Form::operand : Form::codes; }
  const void* codes(const Scratch& scratch) const {
    return origin_ == Origin::given ? given_.codes : scratch.at(data_first_);
  }
  const void* scales(const Scratch& scratch) const {
    return origin_ == Origin::given ? given_.scales : scratch.at(scales_first_);
  }
  int64_t bf16_bytes() const;
  void reserve(Scratch& scratch);
  ScaleMode mode() const;

  Cast cast_;
  Route route_ = Route::native;
  Origin origin_ = Origin::as_it_lies;
  int64_t rows_ = 0, k_ = 0;
  GivenOperand given_;
  float* scale_ = nullptr;
  bool scale_given_ = false;
  int side_ = 0;          // of the tensor that it is made of
  bool k_first_ = false;  // it lies [k, rows]
  const void* x_ = nullptr;
  int64_t x_ld_ = 0;
  bool widened_ = false;  // its codes, to whole blocks of 32
  // in the scratch: codes, or the operand where a quantizing call makes it; ...
  int64_t data_first_ = 0, scales_first_ = 0, scale_first_ = 0;
  int64_t bf16_first_ = 0, mx_first_ = 0, wide_first_ = 0;
};

// A tensor to quantize.
QuantizeTensor& add(QuantizeCall& call, const Matrix& x);

}  // namespace narrowfloat
