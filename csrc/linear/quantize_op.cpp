// The operator quantize: both orientations of a tensor, each by a cast of its own.
#include <tuple>

#include "api/ops.h"
#include "linear/operand.h"
#include "linear/spec.h"

namespace narrowfloat {
namespace {

constexpr const char* kOp = "quantize";

Form form_of(const QuantizeSpec::Side& side) {
  return side.as_operand ? Form::operand : Form::codes;
}

void copy_scale(float* to, const void* from, const Launch& on) {
  NF_CUDA(cudaMemcpyAsync(to, from, kScale * sizeof(float), cudaMemcpyDeviceToDevice, on.stream));
}

const void* checked_scale(const Tensor& scale, const Tensor& x) {
  check_same_device(scale, x, kOp, "scale");
  NF_CHECK(
      scale.numel() == kScale && scale.is_contiguous() && scale.scalar_type() == ScalarType::Float,
      kOp, ": expected scale as float32 [4], contiguous, as an earlier call returned it");
  return scale.data_ptr();
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_op(const Tensor& x, int64_t bits,
                                                               std::optional<Tensor> scale,
                                                               std::optional<Tensor> seed) {
  const Launch on(x, kOp, "x");
  const Matrix m(x, kOp, "x");
  const QuantizeSpec spec(bits, kOp);
  const Cast &rows_cast = spec.side[0].cast, &columns_cast = spec.side[1].cast;
  const bool any_scale =
      has_tensor_scale(rows_cast.scaling) || has_tensor_scale(columns_cast.scaling);
  const bool shared = share_tensor_scale(rows_cast, columns_cast);
  const void* const known = scale ? checked_scale(*scale, x) : nullptr;

  // outputs
  const QuantizedTensors rows(rows_cast, form_of(spec.side[0]), m.rows, m.cols, on.device);
  const QuantizedTensors columns(columns_cast, form_of(spec.side[1]), m.cols, m.rows, on.device);
  Tensor scales = empty({any_scale ? 2 * kScale : 0}, ScalarType::Float, on.device);
  float* const first = static_cast<float*>(scales.data_ptr());
  if (any_scale && !shared) {
    NF_CUDA(cudaMemsetAsync(first, 0, 2 * kScale * sizeof(float), on.stream));
  }

  // plan
  QuantizeCall call{kOp, on.device};
  QuantizeTensor& t = add(call, m);
  for (int k = 0; k < 2; ++k) {
    const Cast& cast = spec.side[k].cast;
    if (cast.scaling == Scaling::none) continue;
    float* const its_scale = first + (shared ? 0 : k * kScale);
    (k ? columns : rows).fill(t.side[k], cast, form_of(spec.side[k]), its_scale);
    if (cast.stochastic) t.seed = seed_of(seed, x, kOp);
    if (known && cast.scaling == Scaling::tensor) {
      copy_scale(its_scale, known, on);
      t.side[k].scale_given = true;
    }
  }
  Scratch scratch;
  const int64_t quantizing = scratch.add(call.scratch_bytes());
  scratch.allocate(on.device);

  call.run(scratch.at(quantizing), on.stream);
  if (shared) copy_scale(first + kScale, first, on);
  return {rows.codes, rows.scales, columns.codes, columns.scales, scales};
}

}  // namespace narrowfloat
