// How ragged sizes and any bias reach cuBLASLt, and what is left to do after it.
#include "gemm/gemm.h"

#include "gemm/epilogue.h"

namespace narrowfloat {

Gemm::Gemm(int64_t m, int64_t n, int64_t k, Real d_type, bool fast, Scratch& scratch,
           Element element, EdgeRule edges)
    : m_(m), n_(n), k_(k), d_type_(d_type), out_type_(d_type), fast_(fast), edges_(edges) {
  if (element == Element::bf16 && d_type == Real::f16) d_type_ = Real::f32;
  if (edges == EdgeRule::row_scales) d_type_ = Real::f32;
  if (edges == EdgeRule::exact_k) k_pad_ = 1;
  // cuBLASLt writes rows that start on 16 bytes: others go through the scratch
  if (indirect()) d_first_ = scratch.add(padded(m) * padded(n) * size_of(d_type_));
  if (element == Element::e2m1) {
    k_pad_ = 32;
    apart_ = true;  // with beta on the device cuBLASLt takes no c that is d
    c_first_ = scratch.add(m * padded(n) * size_of(d_type_));
  }
}

void Gemm::plan_bias(const void* bias, Real type, Scratch& scratch) {
  bias_ = bias;
  bias_type_ = type;
  bias_apart_ = d_type_ == Real::f32;  // its epilogue takes no fp32 bias, and bf16 would round it
  bias_converted_ = !bias_apart_ && (type != epilogue_bias_type(d_type_) || ragged() ||
                                     reinterpret_cast<uintptr_t>(bias) % 16 != 0);
  if (bias_converted_) bias_first_ = scratch.add(padded(n_) * 2);
}

Matmul Gemm::problem(const Operand& a, const Operand& b, void* d, const void* bias) const {
  Matmul p{};
  p.a = a, p.b = b;
  p.a.rows = ragged_a() ? padded(m_) : m_;
  p.b.rows = ragged() ? padded(n_) : n_;
  p.k = (k_ + k_pad_ - 1) / k_pad_ * k_pad_;
  p.d = d;
  p.d_type = d_type_;
  p.ldd = p.b.rows;
  p.bias = bias;
  p.alpha = alpha_;
  p.fast = fast_;
  return p;
}

int64_t Gemm::workspace(const Operand& a, const Operand& b, void* d, const Launch& on) const {
  if (nothing()) return 0;
  const void* bias = bias_apart_ ? nullptr : bias_converted_ ? kInScratch : bias_;
  Matmul p = problem(a, b, indirect() ? kInScratch : d, bias);
  if (apart_) p.c = kInScratch;
  return workspace_for(p, on.device, on.stream);
}

void Gemm::run(const Operand& a, const Operand& b, void* d, const Scratch& scratch,
               int64_t workspace, const Launch& on) const {
  if (nothing()) {  // zeros and the bias
    finish_rows(nullptr, d_type_, n_, d, out_type_, m_, n_, bias_, bias_type_, on.stream);
    return;
  }
  if (bias_converted_) {
    convert_bias(bias_, bias_type_, n_, scratch.at(bias_first_), epilogue_bias_type(d_type_),
                 padded(n_), on.stream);
  }
  const void* bias = bias_apart_ ? nullptr : bias_converted_ ? scratch.at(bias_first_) : bias_;
  Matmul p = problem(a, b, indirect() ? scratch.at(d_first_) : d, bias);
  if (apart_) p.c = scratch.at(c_first_);
  matmul(p, scratch.at(workspace), on.device, on.stream);
  const void* rest = bias_apart_ ? bias_ : nullptr;
  if (indirect() || rest) {
    finish_rows(p.d, d_type_, p.ldd, d, out_type_, m_, n_, rest, bias_type_, on.stream, a_scales_,
                b_scales_);
  }
}

}  // namespace narrowfloat
