// How a product with packed FP4 weights runs: a few tokens on the kernels for them, more in
// tiles where the chip has warpgroups' products, many as a bf16 product with the weights unpacked.
#include "api/device.h"
#include "api/tensors.h"
#include "gemm/cublaslt.h"
#include "gemm/gemm.h"
#include "w4a16/matmul.h"
#include "w4a16/tiles.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

namespace narrowfloat {
namespace {

constexpr const char* kOp = "fp4_weight_matmul";

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check(const Tensor& x, const Tensor& packed, const Tensor& scale,
           const std::optional<Tensor>& bias, int64_t n, int64_t k) {
  check_same_device(packed, x, kOp, "packed");
  check_same_device(scale, x, kOp, "scale");
  NF_CHECK(n >= 0 && packed.scalar_type() == ScalarType::Byte && packed.dim() == 3 &&
               packed.size(0) == ceil_div(n, kUnitRows) &&
               packed.size(1) == ceil_div(k, kUnitCols) && packed.size(2) == kUnitBytes,
           kOp, ": expected packed weights in uint8 (", ceil_div(n, kUnitRows), ", ",
           ceil_div(k, kUnitCols), ", ", kUnitBytes, ") for N ", n, " and K ", k, ", got ",
           dtype_name(packed.scalar_type()), " ", shape_of(packed), " (w4a16.pack makes them)");
  NF_CHECK(packed.is_contiguous() && reinterpret_cast<uintptr_t>(packed.data_ptr()) % 16 == 0, kOp,
           ": expected packed weights contiguous and on 16 bytes (clone them)");
  NF_CHECK(scale.scalar_type() == ScalarType::Float && scale.numel() == 1, kOp,
           ": expected the scale in float32 with one element, got ",
           dtype_name(scale.scalar_type()), " ", shape_of(scale));
  if (bias) {
    check_same_device(*bias, x, kOp, "bias");
    NF_CHECK(bias->dim() == 1 && bias->size(0) == n, kOp, ": expected bias [", n, "], got ",
             shape_of(*bias));
  }
}

// x as a bf16 operand: as it is where its rows start on 16 bytes and are whole multiples of them,
// else a copy padded with zeros.
class Activations {
 public:
  Activations(const void* x, int64_t stride, int64_t m, int64_t k, Scratch& scratch)
      : x_(x), stride_(stride), m_(m), k_(k) {
    as_is_ = k % kPad == 0 && stride % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    if (!as_is_) first_ = scratch.add(m * padded(k) * 2);
  }
  Operand planned() const {
    return as_is_ ? Operand{x_, m_, stride_, Element::bf16, nullptr}
                  : Operand{kInScratch, m_, padded(k_), Element::bf16, nullptr};
  }
  Operand in(const Scratch& scratch, const Launch& on) const {
    Operand o = planned();
    if (as_is_) return o;
    uint8_t* to = scratch.at(first_);
    NF_CUDA(cudaMemsetAsync(to, 0, m_ * padded(k_) * 2, on.stream));
    NF_CUDA(cudaMemcpy2DAsync(to, padded(k_) * 2, x_, stride_ * 2, k_ * 2, m_,
                              cudaMemcpyDeviceToDevice, on.stream));
    o.q = to;
    return o;
  }

 private:
  const void* x_;
  int64_t stride_, m_, k_, first_ = 0;
  bool as_is_ = false;
};

void many_tokens(const FP4Matmul& job, const Launch& on) {
  Scratch scratch;
  Gemm gemm(job.m, job.n, job.k, job.y_type, false, scratch, Element::bf16);
  if (job.bias) gemm.plan_bias(job.bias, job.bias_type, scratch);
  const Activations x(job.x, job.x_stride, job.m, job.k, scratch);
  const int64_t w_ld = ceil_div(job.k, kUnitCols) * kUnitCols;
  const int64_t w_first = scratch.add(ceil_div(job.n, kUnitRows) * kUnitRows * w_ld * 2);
  const int64_t alpha_first = scratch.add(2 * sizeof(float));
  Operand w{kInScratch, job.n, w_ld, Element::bf16, nullptr};
  gemm.set_alpha(kInScratch);
  const int64_t workspace = scratch.add(gemm.workspace(x.planned(), w, job.y, on));
  scratch.allocate(on.device);
  w.q = scratch.at(w_first);
  float* const alpha = scratch.at<float>(alpha_first);
  fp4_unpack(job.packed, job.n, job.k, scratch.at(w_first), job.scale, alpha, on.stream);
  gemm.set_alpha(alpha);
  gemm.run(x.in(scratch, on), w, job.y, scratch, workspace, on);
}

constexpr int64_t kVeryFewTokens = 8, kManyWeights = int64_t{40} << 20;

// Microseconds on an H200, of unpacking and the bf16 product; in the terms of FP4TilesPlan::cost.
double unpacking_cost(int64_t m, int64_t n, int64_t k) {
  const double weights = static_cast<double>(n) * static_cast<double>(k);
  const double tokens = static_cast<double>(m);
  const double l2 = 40e6;  // bytes of bf16 that stay there until they are used
  const double unpack = 2.56 * weights / (2 * weights < l2 ? 5.2e6 : 3.8e6) + 1;
  return 8 + unpack + std::max(2 * tokens * weights / 780e6, 2 * weights / 4.3e6);
}

void in_tiles(const FP4Matmul& job, const FP4TilesPlan& plan, const Launch& on) {
  Scratch scratch;
  const int64_t first = scratch.add(FP4TilesScratch(plan, job.m, job.k).bytes);
  scratch.allocate(on.device);
  fp4_tiles(job, plan, scratch.at(first), on.stream);
}

// The way that costs least, as measured on an H200: see benchmarks/README.md.
void multiply(const FP4Matmul& job, const Launch& on) {
  const bool few = job.m <= kFewTokens;
  if (job.k > 0 && job.m > kVeryFewTokens && fits_fp4_tiles(job.m, job.n, job.k) &&
      has_fp4_tiles(on.device)) {
    // up to 16 tokens the kernel for few starts sooner, and reads weights more slowly
    const bool tiles = job.m > 16 || job.n * job.k > kManyWeights;
    const FP4TilesPlan plan =
        plan_fp4_tiles(device_of(on.device).multiprocessors, job.m, job.n, job.k);
    if (tiles && (few || plan.cost < unpacking_cost(job.m, job.n, job.k))) {
      return in_tiles(job, plan, on);
    }
  }
  if (few) {
    fp4_few_tokens(job, on.device, on.stream);
  } else {
    many_tokens(job, on);
  }
}

}  // namespace

Tensor fp4_weight_matmul(const Tensor& x, const Tensor& packed, const Tensor& scale,
                         std::optional<Tensor> bias, int64_t n, ScalarType out_dtype,
                         bool constant) {
  const Launch on(x, kOp, "x");
  std::optional<Matrix> m(std::in_place, x, kOp, "x");
  if (m->type != Real::bf16) {
    throw_type_error(message(kOp, ": expected x in bfloat16, got ", dtype_name(x.scalar_type()),
                             " (convert it first)"));
  }
  check(x, packed, scale, bias, n, m->cols);
  if (bias && !bias->is_contiguous()) bias = torch::stable::contiguous(*bias);
  // expanded rows too: a product and a copy want rows apart
  if (m->col_stride != 1 || (m->rows > 1 && m->row_stride < m->cols)) {
    m.emplace(torch::stable::contiguous(x), kOp, "x");
  }
  Tensor y = empty(with_last(x, n), out_dtype, on.device);

  FP4Matmul job{};
  job.x = m->owner.data_ptr();
  job.x_stride = m->row_stride;
  job.packed = static_cast<const uint8_t*>(packed.data_ptr());
  job.m = m->rows, job.n = n, job.k = m->cols;
  job.scale = static_cast<const float*>(scale.data_ptr());
  if (bias) {
    job.bias = bias->data_ptr();
    job.bias_type = real_of(bias->scalar_type(), kOp, "bias");
  }
  job.y = y.data_ptr();
  job.y_type = real_of(out_dtype, kOp, "out_dtype");
  job.constant = constant;
  if (job.m == 0 || job.n == 0) return y;
  multiply(job, on);
  return y;
}

}  // namespace narrowfloat

STABLE_TORCH_LIBRARY_IMPL(narrowfloat, CUDA, m) {
  m.impl("fp4_weight_matmul", TORCH_BOX(&narrowfloat::fp4_weight_matmul));
}
