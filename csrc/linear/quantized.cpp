// Codes and scales as tensors: how operators return them, and what is asked of those that are
// given.
#include "linear/quantized.h"

#include "quantize/block.h"
#include "quantize/fp4.h"

namespace narrowfloat {
namespace {

ScalarType codes_dtype(const Cast& cast) {
  return is_fp4(cast.scaling) ? ScalarType::Byte : dtype_of(cast.element);
}

ScalarType scales_dtype(const Cast& cast) {
  const bool bytes = is_fp4(cast.scaling) || cast.scaling == Scaling::mx;
  return bytes ? ScalarType::Byte : ScalarType::Float;
}

int64_t codes_width(const Cast& cast, int64_t cols) {  // bytes a row
  return codes_bytes(cast, 1, cols) / padded(1);
}

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; }

Tensor codes_like(const Cast& cast, Form form, int64_t rows, int64_t cols, int device) {
  if (cast.scaling == Scaling::none) return empty({0}, ScalarType::Float8_e4m3fn, device);
  if (form == Form::operand) {
    return empty({padded(rows), padded32(cols)}, ScalarType::BFloat16, device);
  }
  return empty({padded(rows), codes_width(cast, cols)}, codes_dtype(cast), device);
}

// Of the scales of rows or blocks of an operand [rows, cols].
struct ScalesShape {
  int64_t size[2];
  int dims;
};
ScalesShape scales_shape(const Cast& cast, int64_t rows, int64_t cols) {
  const Scaling s = cast.scaling;
  if (s == Scaling::block || s == Scaling::pow2) {
    const int64_t across = blocks_of(cols, kBlock);
    if (cast.square) return {{blocks_of(rows, kBlock), (across + 3) / 4 * 4}, 2};
    return {{across, padded(rows)}, 2};
  }
  const int64_t bytes = scales_bytes(cast, rows, cols);
  return {{s == Scaling::row ? bytes / 4 : bytes, 1}, 1};
}

std::string text_of(const ScalesShape& shape) {
  return shape.dims == 1 ? message("(", shape.size[0], ",)")
                         : message("(", shape.size[0], ", ", shape.size[1], ")");
}

bool has_shape(const Tensor& t, const ScalesShape& shape) {
  return t.dim() == shape.dims && t.size(0) == shape.size[0] &&
         (shape.dims == 1 || t.size(1) == shape.size[1]);
}

Tensor scales_like(const Cast& cast, Form form, int64_t rows, int64_t cols, int device) {
  const Scaling s = cast.scaling;
  if (s == Scaling::none || s == Scaling::tensor || form == Form::operand) {
    return empty({0}, ScalarType::Float, device);
  }
  const ScalesShape shape = scales_shape(cast, rows, cols);
  return shape.dims == 1 ? empty({shape.size[0]}, scales_dtype(cast), device)
                         : empty({shape.size[0], shape.size[1]}, scales_dtype(cast), device);
}

}  // namespace

float* scales_of(const Tensor& scales, int64_t least, const Tensor& as, const char* op,
                 const char* name) {
  check_same_device(scales, as, op, name);
  NF_CHECK(scales.numel() >= least && scales.is_contiguous() &&
               scales.scalar_type() == ScalarType::Float && is_aligned(scales),
           op, ": expected ", name, " as float32 [", least,
           "] at an address that is a multiple of 16, as narrowfloat's operators return it, got ",
           dtype_name(scales.scalar_type()), " ", shape_of(scales));
  return static_cast<float*>(scales.data_ptr());
}

const int64_t* seed_of(const std::optional<Tensor>& seed, const Tensor& as, const char* op) {
  NF_CHECK(seed && seed->is_cuda() && seed->scalar_type() == ScalarType::Long &&
               seed->numel() == 2 && seed->is_contiguous(),
           op, ": expected a seed, int64 [2], for stochastic rounding, got ",
           seed ? shape_of(*seed) : "none");
  check_same_device(*seed, as, op, "seed");
  return static_cast<const int64_t*>(seed->data_ptr());
}

GivenOperand checked(const GivenTensors& given, const Cast& cast, int64_t rows, int64_t cols,
                     const Tensor& as, const char* op) {
  const char* const name = given.codes_name;
  NF_CHECK(cast.scaling != Scaling::none, op, ": expected no quantized ", std::string(name, 1),
           " for a GEMM in bf16, got one (pass ", std::string(name, 1), " alone)");
  check_same_device(*given.codes, as, op, name);
  const Tensor& codes = *given.codes;
  GivenOperand operand{codes.data_ptr()};
  const int64_t width = codes_width(cast, cols);
  NF_CHECK(
      codes.dim() == 2 && codes.size(0) == padded(rows) && codes.size(1) == width &&
          codes.is_contiguous() && codes.scalar_type() == codes_dtype(cast) && is_aligned(codes),
      op, ": expected ", name, " as ", dtype_name(codes_dtype(cast)), " (", padded(rows), ", ",
      width,
      "), contiguous and on 16 bytes, as narrowfloat quantizes it in the recipe's format, got ",
      dtype_name(codes.scalar_type()), " ", shape_of(codes));
  if (cast.scaling != Scaling::tensor) {
    NF_CHECK(given.scales, op, ": expected ", given.scales_name, " for ", name, ", got none");
    const Tensor& scales = *given.scales;
    check_same_device(scales, as, op, given.scales_name);
    const ScalesShape shape = scales_shape(cast, rows, cols);
    NF_CHECK(scales.scalar_type() == scales_dtype(cast) && has_shape(scales, shape) &&
                 scales.is_contiguous() && is_aligned(scales),
             op, ": expected ", given.scales_name, " as ", dtype_name(scales_dtype(cast)), " ",
             text_of(shape),
             ", contiguous and on 16 bytes, as narrowfloat quantizes them in the recipe's format, "
             "got ",
             dtype_name(scales.scalar_type()), " ", shape_of(scales));
    operand.scales = scales.data_ptr();
  }
  if (has_tensor_scale(cast.scaling)) {
    NF_CHECK(given.scale, op, ": expected ", given.scale_name, " for ", name, ", got none");
    operand.scale = scales_of(*given.scale, kScale, as, op, given.scale_name);
    // more than a tensor has may be scales of rows or blocks, of which the first alone is taken
    NF_CHECK(
        given.scale_leads || given.scale->numel() == kScale || given.scale->numel() == 2 * kScale,
        op, ": expected ", given.scale_name, " as float32 [", kScale, "] or [", 2 * kScale,
        "], a tensor's scale, got ", shape_of(*given.scale));
  }
  return operand;
}

QuantizedTensors::QuantizedTensors(const Cast& cast, Form form, int64_t rows, int64_t cols,
                                   int device)
    : codes(codes_like(cast, form, rows, cols, device)),
      scales(scales_like(cast, form, rows, cols, device)) {}

void QuantizedTensors::fill(QuantizeSide& side, const Cast& cast, Form form, float* scale) const {
  side.form = form;
  side.cast = cast;
  side.data = codes.data_ptr();
  side.scales = scales.data_ptr();
  side.scale = scale;
}

}  // namespace narrowfloat
