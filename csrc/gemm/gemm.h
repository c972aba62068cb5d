// What a GEMM needs around cuBLASLt: operands padded, a bias it cannot take, ragged
// rows, scales of rows where it has none.
#pragma once

#include "api/tensors.h"
#include "gemm/cublaslt.h"

namespace narrowfloat {

// What the edges of operands and d are like, and what is left to do to d.
enum class EdgeRule : int {
  plain,        // as operands with one scale have them
  padded_rows,  // scales that lie [blocks, padded(rows)]: both operands have that many rows
  row_scales,   // multiplied after it: operands without scales
  exact_k,      // bf16 operands that are not padded along k
};

// d [m,n] = a [m,k] b [n,k]^T + bias [n]. Made in steps, since what it needs from the scratch must
// be known before the scratch is allocated: plan, then run.
class Gemm {
 public:
  Gemm() = default;
  // element: of both operands as far as it matters, FP8, e2m1 or bf16
  Gemm(int64_t m, int64_t n, int64_t k, Real d_type, bool fast, Scratch& scratch,
       Element element = Element::e4m3, EdgeRule edges = EdgeRule::plain);

  // bias: any type, any alignment. A tensor is not kept: it has to live until the GEMM has run.
  void plan_bias(const void* bias, Real type, Scratch& scratch);
  void plan_bias(const Tensor& bias, const char* op, Scratch& scratch) {
    plan_bias(bias.data_ptr(), real_of(bias.scalar_type(), op, "bias"), scratch);
  }

  // {alpha, 0} on the device. Before workspace().
  void set_alpha(const float* alpha) { alpha_ = alpha; }

  // [m], [n] on the device, of EdgeRule::row_scales. Before run().
  void set_row_scales(const float* a, const float* b) { a_scales_ = a, b_scales_ = b; }

  // Bytes that cuBLASLt wants beside. What will lie in the scratch is given as kInScratch.
  // d contiguous. Operands have rows of padded(k) bytes at least, zero beyond k; b has padded(n)
  // rows, zero beyond n.
  int64_t workspace(const Operand& a, const Operand& b, void* d, const Launch& on) const;

  void run(const Operand& a, const Operand& b, void* d, const Scratch& scratch, int64_t workspace,
           const Launch& on) const;

 private:
  // 16-bit rows must start on 16 bytes; fp32 with 4 or 12 beyond is taken on sm90, elsewhere
  // untried
  bool ragged() const { return n_ % (edges_ == EdgeRule::padded_rows ? kPad : 8) != 0; }
  bool ragged_a() const { return edges_ == EdgeRule::padded_rows && m_ % kPad != 0; }
  // bf16 operands have no GEMM in fp16: it is rounded from fp32
  bool indirect() const {
    return ragged() || ragged_a() || out_type_ != d_type_ || edges_ == EdgeRule::row_scales;
  }
  bool nothing() const { return m_ * n_ == 0 || k_ == 0; }
  Matmul problem(const Operand& a, const Operand& b, void* d, const void* bias) const;

  int64_t m_ = 0, n_ = 0, k_ = 0;
  Real d_type_ = Real::f32, out_type_ = Real::f32;  // of the GEMM, of what is returned
  bool fast_ = false;
  EdgeRule edges_ = EdgeRule::plain;
  const float *a_scales_ = nullptr, *b_scales_ = nullptr;
  const float* alpha_ = nullptr;
  bool apart_ = false;  // d from c
  const void* bias_ = nullptr;
  Real bias_type_ = Real::f32;
  bool bias_apart_ = false;                             // added after the GEMM, in fp32
  bool bias_converted_ = false;                         // to what the epilogue takes
  int64_t d_first_ = 0, bias_first_ = 0, c_first_ = 0;  // in the scratch
  int64_t k_pad_ = kPad;
};

}  // namespace narrowfloat
