// Registers the operators that ops.py defines for CUDA.
#include "api/ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(narrowfloat, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&narrowfloat::quantize_op));
  m.impl("scaled_mm", TORCH_BOX(&narrowfloat::scaled_mm_op));
  m.impl("scaled_mm_accumulate_", TORCH_BOX(&narrowfloat::scaled_mm_accumulate_op));
  m.impl("linear_forward", TORCH_BOX(&narrowfloat::linear_forward));
  m.impl("linear_backward", TORCH_BOX(&narrowfloat::linear_backward));
  m.impl("delayed_linear_forward", TORCH_BOX(&narrowfloat::delayed_linear_forward));
  m.impl("delayed_linear_backward", TORCH_BOX(&narrowfloat::delayed_linear_backward));
}
