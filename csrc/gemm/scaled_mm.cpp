// scaled_mm: one GEMM of operands that are quantized already, with one scale each.
#include "api/ops.h"
#include "gemm/cublaslt.h"
#include "gemm/epilogue.h"
#include "gemm/gemm.h"

namespace narrowfloat {
namespace {

// A quantized operand [rows, k] as cuBLASLt takes it: as it is where its rows, address and sizes
// are multiples of 16 (rows only of `b`, which is padded to whole 16-byte rows of d), else a
// zero-padded copy in the scratch. Its scale likewise.
class Prepared {
 public:
  Prepared(const Tensor& q, const Tensor& scale, bool pads_rows, const char* op, const char* name,
           Scratch& scratch)
      : q_(q), scale_(scale), element_(element_of(q, op, name)) {
    NF_CHECK(q.dim() == 2, op, ": expected ", name, " of two dimensions, got ", shape_of(q));
    // one, or as quantize returns it; more may be scales of rows, of which the first alone is taken
    const int64_t scales = scale.numel();
    NF_CHECK(scale.scalar_type() == ScalarType::Float &&
                 (scales == 1 || scales == kScale || scales == 2 * kScale),
             op, ": expected ", name, "_scale as float32 [1] or [", kScale, "] or [", 2 * kScale,
             "], a tensor's scale, got ", dtype_name(scale.scalar_type()), " ", shape_of(scale));
    rows_ = q.size(0), k_ = q.size(1);
    ld_ = rows_ <= 1 ? padded(k_) : q.stride(0);
    const bool aligned = reinterpret_cast<uintptr_t>(q.data_ptr()) % kPad == 0;
    as_is_ = k_ % kPad == 0 && q.stride(1) == 1 && ld_ % kPad == 0 && ld_ >= k_ && aligned &&
             !(pads_rows && rows_ % kPad != 0);
    if (!as_is_) q_first_ = scratch.add(padded(rows_) * padded(k_));
    scale_as_is_ = reinterpret_cast<uintptr_t>(scale.data_ptr()) % 16 == 0;
    if (!scale_as_is_) scale_first_ = scratch.add(sizeof(float));
  }

  // As it will be, for planning.
  Operand planned() const {
    if (as_is_) return {q_.data_ptr(), rows_, ld_, element_, kInScratch};
    return {kInScratch, rows_, padded(k_), element_, kInScratch};
  }

  Operand in(const Scratch& scratch, const Launch& on) const {
    const float* scale = static_cast<const float*>(scale_.data_ptr());
    if (!scale_as_is_) {
      NF_CUDA(cudaMemcpyAsync(scratch.at(scale_first_), scale, sizeof(float),
                              cudaMemcpyDeviceToDevice, on.stream));
      scale = scratch.at<float>(scale_first_);
    }
    if (as_is_) return {q_.data_ptr(), rows_, ld_, element_, scale};
    pad_codes(q_.data_ptr(), rows_, k_, q_.stride(0), q_.stride(1), scratch.at(q_first_),
              on.stream);
    return {scratch.at(q_first_), rows_, padded(k_), element_, scale};
  }

 private:
  const Tensor &q_, &scale_;
  Element element_;
  int64_t rows_ = 0, k_ = 0, ld_ = 0, q_first_ = 0, scale_first_ = 0;
  bool as_is_ = false, scale_as_is_ = false;
};

void check_operands(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                    const char* op) {
  check_same_device(b, a, op, "b");
  check_same_device(a_scale, a, op, "a_scale");
  check_same_device(b_scale, a, op, "b_scale");
  NF_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(1), op,
           ": expected a [M,K] and b [N,K] with one K, got ", shape_of(a), " and ", shape_of(b));
}

}  // namespace

Tensor scaled_mm_op(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                    std::optional<Tensor> bias, ScalarType out_dtype, bool fast) {
  constexpr const char* op = "scaled_mm";
  const Launch on(a, op, "a");
  check_operands(a, b, a_scale, b_scale, op);
  const int64_t m = a.size(0), n = b.size(0);
  const Real d_type = real_of(out_dtype, op, "out_dtype");
  Tensor d = empty({m, n}, out_dtype, on.device);
  Scratch scratch;
  Gemm gemm(m, n, a.size(1), d_type, fast, scratch);
  const std::optional<Tensor> own_bias = bias_for(bias, n, a, op);
  if (own_bias) gemm.plan_bias(*own_bias, op, scratch);
  const Prepared a_ready(a, a_scale, false, op, "a", scratch);
  const Prepared b_ready(b, b_scale, n % 8 != 0, op, "b", scratch);
  const int64_t workspace =
      scratch.add(gemm.workspace(a_ready.planned(), b_ready.planned(), d.data_ptr(), on));
  scratch.allocate(on.device);
  gemm.run(a_ready.in(scratch, on), b_ready.in(scratch, on), d.data_ptr(), scratch, workspace, on);
  return d;
}

void scaled_mm_accumulate_op(Tensor out, const Tensor& a, const Tensor& b, const Tensor& a_scale,
                             const Tensor& b_scale, bool fast) {
  constexpr const char* op = "scaled_mm_accumulate_";
  const Launch on(a, op, "a");
  check_operands(a, b, a_scale, b_scale, op);
  check_same_device(out, a, op, "out");
  const int64_t m = a.size(0), n = b.size(0);
  Matmul p{};
  p.d_type = real_of(out.scalar_type(), op, "out");
  NF_CHECK(out.dim() == 2 && out.size(0) == m && out.size(1) == n, op, ": expected out [", m, ", ",
           n, "] for a [M,K] and b [N,K], got ", shape_of(out));
  if (out.numel() == 0 || a.size(1) == 0) return;  // whatever its strides
  p.d = out.data_ptr();
  p.ldd = m <= 1 ? n : out.stride(0);
  NF_CHECK((n <= 1 || out.stride(1) == 1) && p.ldd >= n && p.ldd * size_of(p.d_type) % 16 == 0 &&
               n % 8 == 0 && reinterpret_cast<uintptr_t>(p.d) % 16 == 0,
           op,
           ": expected out row-major with rows on 16-byte boundaries and a multiple of 8 "
           "columns, got ",
           n, " columns and row stride ", p.ldd, " (accumulate with torch where it is not)");
  Scratch scratch;
  const Prepared a_ready(a, a_scale, false, op, "a", scratch);
  const Prepared b_ready(b, b_scale, false, op, "b", scratch);
  p.a = a_ready.planned(), p.b = b_ready.planned();
  p.k = padded(a.size(1));
  p.fast = fast;
  p.accumulate = true;
  const int64_t workspace = scratch.add(workspace_for(p, on.device, on.stream));
  scratch.allocate(on.device);
  p.a = a_ready.in(scratch, on), p.b = b_ready.in(scratch, on);
  matmul(p, scratch.at(workspace), on.device, on.stream);
}

}  // namespace narrowfloat
