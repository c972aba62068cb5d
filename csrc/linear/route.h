// Where a GEMM of two casts runs, and how.
#pragma once

#include <cstdint>

#include "gemm/gemm.h"
#include "quantize/cast.h"

namespace narrowfloat {

enum class Route {
  refused,
  native,    // cuBLASLt takes codes and scales, or both operands in bf16
  epilogue,  // it multiplies codes, our own pass their scales
  mx,        // it takes them as MXFP8's: each power of two of 128 four times
  bf16,      // codes x block scales as operands of a bf16 GEMM, exact; alpha has tensor scales
};

// Of operands whose scales are of rows or blocks of FP8, or both in bf16, on chips of a capability
// (major x 10 + minor), by a version of cuBLASLt.
Route block_route(Scaling scaling, int capability, int64_t version);

// "native" (mx too), "epilogue", "bf16", or "" where it is refused
const char* block_route_name(int64_t scaling, int capability, int64_t version);

// Of a legal pair of casts on this device; ValueError where it is refused.
Route route_of(const Cast& a, const Cast& b, int device, const char* op);

// Of both operands' scaling.
EdgeRule edges_of(Scaling scaling, Route route);

}  // namespace narrowfloat
