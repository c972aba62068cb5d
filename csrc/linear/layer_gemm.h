// One GEMM of a layer: its operands as their casts want them, from a plan to d.
#pragma once

#include "gemm/gemm.h"
#include "linear/operand.h"

namespace narrowfloat {

// d [m,n] = a [m,k] b [n,k]^T. In steps: plan, fill the call that quantizes, run after it.
class LayerGemm {
 public:
  LayerGemm() = default;
  // fast: accumulation, where the scaling has it. may_be_ragged: operands in bf16 that lie as
  // cuBLASLt reads them are contracted along k itself, whatever its size.
  LayerGemm(int64_t m, int64_t n, int64_t k, const OperandSource& a, const OperandSource& b,
            Real d_type, bool fast, bool may_be_ragged, Scratch& scratch, const Launch& on,
            const char* op);

  void plan_bias(const Tensor& bias, const char* op, Scratch& scratch) {
    gemm_.plan_bias(bias, op, scratch);
  }

  int64_t workspace(void* d, const Scratch& scratch, const Launch& on);

  // Sides of the tensors that the operands are made of; null where they are not. b's is quantized
  // before a's: see QuantizeCall.
  void fill(QuantizeTensor* of_a, QuantizeTensor* of_b, const Scratch& scratch) const;

  void run(void* d, const Scratch& scratch, int64_t workspace, const Launch& on);

  OperandPlan a, b;

 private:
  bool both_fp4() const { return is_fp4(a_scaling_); }

  Gemm gemm_;
  Scaling a_scaling_ = Scaling::none;
  bool has_alpha_ = false, row_scales_ = false;
  int64_t alpha_first_ = 0;
};

}  // namespace narrowfloat
