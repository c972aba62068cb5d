// The choices of an operator's call as one integer: its bits are stated here, once.
// spec.py has the same, and a test compares them.
#pragma once

#include <cstdint>
#include <optional>

#include "quantize/cast.h"

namespace narrowfloat {

struct SpecField {
  const char* name;
  int shift, width;

  constexpr int64_t of(int64_t bits) const { return bits >> shift & ((int64_t{1} << width) - 1); }
  constexpr bool in(int64_t bits) const { return of(bits) != 0; }
};

constexpr int kCastBits = 10;

// group, name, first bit, bits. A dtype is 0 where there is none, else Real + 1.
#define NF_SPEC_FIELDS(FIELD)                                                   \
  FIELD(cast, scaling, 0, 4) /* Scaling */                                      \
  FIELD(cast, e5m2, 4, 1)    /* else e4m3; those of FP4 are e2m1 */             \
  FIELD(cast, square, 5, 1)                                                     \
  FIELD(cast, stochastic, 6, 1)                                                 \
  FIELD(cast, hadamard, 7, 1)                                                   \
  FIELD(cast, four_over_six, 8, 1)                                              \
  FIELD(cast, scale_up, 9, 1)                                                   \
  FIELD(forward, fprop_a, 0, kCastBits)  /* x [M,K] */                          \
  FIELD(forward, fprop_b, 10, kCastBits) /* w [N,K] */                          \
  FIELD(forward, wgrad_b, 20, kCastBits) /* x's columns [K,M] */                \
  FIELD(forward, fast, 30, 1)            /* accumulation */                     \
  FIELD(forward, save_x, 31, 1)          /* x's columns are wanted */           \
  FIELD(forward, keep_w, 32, 1)          /* what is measured of w is wanted */  \
  FIELD(forward, guarded, 33, 1)         /* History */                          \
  FIELD(forward, joins, 34, 1)                                                  \
  FIELD(forward, y_dtype, 35, 2)          /* where x is absent */               \
  FIELD(backward, dgrad_a, 0, kCastBits)  /* dy [M,N] */                        \
  FIELD(backward, dgrad_b, 10, kCastBits) /* w's columns [K,N] */               \
  FIELD(backward, wgrad_a, 20, kCastBits) /* dy's columns [N,M] */              \
  FIELD(backward, wgrad_b, 30, kCastBits) /* x's columns [K,M] */               \
  FIELD(backward, fast_dgrad, 40, 1)                                            \
  FIELD(backward, fast_wgrad, 41, 1)                                            \
  FIELD(backward, need_dx, 42, 1)                                               \
  FIELD(backward, dw_dtype, 43, 2)                                              \
  FIELD(backward, db_dtype, 45, 2)                                              \
  FIELD(backward, w_measured, 47, 1) /* scales end with what keep_w returned */ \
  FIELD(backward, guarded, 48, 1)                                               \
  FIELD(backward, joins, 49, 1)                                                 \
  FIELD(quantize, rows, 0, kCastBits)                                           \
  FIELD(quantize, columns, 10, kCastBits)                                       \
  FIELD(quantize, want_rows, 20, 1)                                             \
  FIELD(quantize, want_columns, 21, 1)                                          \
  FIELD(quantize, rows_as_operand, 22, 1) /* Form::operand */                   \
  FIELD(quantize, columns_as_operand, 23, 1)

namespace spec {
#define NF_SPEC_FIELD(group, field, shift, width) \
  inline constexpr SpecField group##_##field{#group "." #field, shift, width};
NF_SPEC_FIELDS(NF_SPEC_FIELD)
#undef NF_SPEC_FIELD
}  // namespace spec

#define NF_SPEC_FIELD(group, field, shift, width) spec::group##_##field,
inline constexpr SpecField kSpecLayout[] = {NF_SPEC_FIELDS(NF_SPEC_FIELD)};
#undef NF_SPEC_FIELD
#undef NF_SPEC_FIELDS

// Which kernels a GEMM's sums of dy belong to: of the operand that is quantized most finely.
constexpr Family family_of(const Cast& a, const Cast& b) {
  if (is_fp4(a.scaling) || is_fp4(b.scaling)) return Family::fp4;
  const bool tensor = a.scaling == Scaling::tensor || b.scaling == Scaling::tensor;
  return tensor ? Family::tensor : Family::block;
}

// The same rounding of the same numbers, so that one scale of the tensor does for both.
inline bool share_tensor_scale(const Cast& a, const Cast& b) {
  return a.scaling == Scaling::tensor && a == b;
}

// ValueError for a cast that there is not, here and below.
struct ForwardSpec {
  Cast fprop_a, fprop_b, wgrad_b;
  bool fast, save_x, keep_w, guarded, joins;
  std::optional<Real> y_type;

  ForwardSpec(int64_t bits, const char* op);
};

struct BackwardSpec {
  Cast dgrad_a, dgrad_b, wgrad_a, wgrad_b;
  bool fast_dgrad, fast_wgrad, need_dx, w_measured, guarded, joins;
  std::optional<Real> dw, db;  // types of the gradients that are wanted

  BackwardSpec(int64_t bits, const char* op);
};

struct QuantizeSpec {
  struct Side {
    Cast cast;  // none where it is not wanted
    bool as_operand = false;
  };
  Side side[2];  // rows, columns

  QuantizeSpec(int64_t bits, const char* op);
};

}  // namespace narrowfloat
