// Decides what a product needs around cuBLASLt: operands padded, a bias it cannot take, ragged
// rows.
#pragma once

#include "cublaslt.h"
#include "ops.h"

namespace narrowfloat {

// d [m,n] = a [m,k] b [n,k]^T + bias [n]. Made in steps, since what it needs from the scratch must
// be known before the scratch is allocated: plan, then run.
class Product {
 public:
  Product() = default;
  // element: of both operands as far as it matters, FP8, e2m1 or bf16
  Product(int64_t m, int64_t n, int64_t k, Real d_type, bool fast, Scratch& scratch,
          Element element = Element::e4m3);

  // bias: any type, any alignment. A tensor is not kept: it has to live until the product has run.
  void plan_bias(const void* bias, Real type, Scratch& scratch);
  void plan_bias(const Tensor& bias, const char* op, Scratch& scratch) {
    plan_bias(bias.data_ptr(), real_of(bias.scalar_type(), op, "bias"), scratch);
  }

  // {alpha, 0} on the device. Before workspace().
  void set_alpha(const float* alpha) { alpha_ = alpha; }

  // Bytes that cuBLASLt wants beside. What will lie in the scratch is given as kInScratch.
  // d contiguous. Operands have rows of padded(k) bytes at least, zero beyond k; b has padded(n)
  // rows, zero beyond n.
  int64_t workspace(const Operand& a, const Operand& b, void* d, const Launch& on) const;

  void run(const Operand& a, const Operand& b, void* d, const Scratch& scratch, int64_t workspace,
           const Launch& on) const;

 private:
  // 16-bit rows must start on 16 bytes; fp32 with 4 or 12 beyond is taken on sm90, elsewhere
  // untried
  bool ragged() const { return n_ % 8 != 0; }
  // bf16 operands have no product in fp16: it is rounded from fp32
  bool indirect() const { return ragged() || out_type_ != d_type_; }
  bool nothing() const { return m_ * n_ == 0 || k_ == 0; }
  Matmul problem(const Operand& a, const Operand& b, void* d, const void* bias) const;

  int64_t m_ = 0, n_ = 0, k_ = 0;
  Real d_type_ = Real::f32, out_type_ = Real::f32;  // of the product, of what is returned
  bool fast_ = false;
  const float* alpha_ = nullptr;
  bool apart_ = false;  // d from c
  const void* bias_ = nullptr;
  Real bias_type_ = Real::f32;
  bool bias_apart_ = false;                             // added after the product, in fp32
  bool bias_converted_ = false;                         // to what the epilogue takes
  int64_t d_first_ = 0, bias_first_ = 0, c_first_ = 0;  // in the scratch
  int64_t k_pad_ = kPad;
};

}  // namespace narrowfloat
