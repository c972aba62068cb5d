// Decides how ragged sizes and any bias reach cuBLASLt, and what is left to do after it.
#include "product.h"

#include "epilogue.h"

namespace narrowfloat {

Product::Product(int64_t m, int64_t n, int64_t k, Real d_type, bool fast, Scratch& scratch)
    : m_(m), n_(n), k_(k), d_type_(d_type), fast_(fast) {
  // cuBLASLt writes rows that start on 16 bytes: others go through the scratch
  if (ragged()) d_first_ = scratch.add(m * padded(n) * size_of(d_type));
}

void Product::plan_bias(const void* bias, Real type, Scratch& scratch) {
  bias_ = bias;
  bias_type_ = type;
  bias_apart_ = d_type_ == Real::f32;  // its epilogue takes no fp32 bias, and bf16 would round it
  bias_converted_ = !bias_apart_ && (type != epilogue_bias_type(d_type_) || ragged() ||
                                     reinterpret_cast<uintptr_t>(bias) % 16 != 0);
  if (bias_converted_) bias_first_ = scratch.add(padded(n_) * 2);
}

Matmul Product::problem(const Operand& a, const Operand& b, void* d, const void* bias) const {
  Matmul p{};
  p.a = a, p.b = b;
  p.a.rows = m_;
  p.b.rows = ragged() ? padded(n_) : n_;
  p.k = padded(k_);
  p.d = d;
  p.d_type = d_type_;
  p.ldd = p.b.rows;
  p.bias = bias;
  p.fast = fast_;
  return p;
}

int64_t Product::workspace(const Operand& a, const Operand& b, void* d, const Launch& on) const {
  if (nothing()) return 0;
  const void* bias = bias_apart_ ? nullptr : bias_converted_ ? kInScratch : bias_;
  return workspace_for(problem(a, b, ragged() ? kInScratch : d, bias), on.device, on.stream);
}

void Product::run(const Operand& a, const Operand& b, void* d, const Scratch& scratch,
                  int64_t workspace, const Launch& on) const {
  if (nothing()) {  // zeros and the bias
    finish_rows(nullptr, n_, d, d_type_, m_, n_, bias_, bias_type_, on.stream);
    return;
  }
  if (bias_converted_) {
    convert_bias(bias_, bias_type_, n_, scratch.at(bias_first_), epilogue_bias_type(d_type_),
                 padded(n_), on.stream);
  }
  const void* bias = bias_apart_ ? nullptr : bias_converted_ ? scratch.at(bias_first_) : bias_;
  const Matmul p = problem(a, b, ragged() ? scratch.at(d_first_) : d, bias);
  matmul(p, scratch.at(workspace), on.device, on.stream);
  const void* rest = bias_apart_ ? bias_ : nullptr;
  if (ragged() || rest) {
    finish_rows(p.d, p.ldd, d, d_type_, m_, n_, rest, bias_type_, on.stream);
  }
}

}  // namespace narrowfloat
