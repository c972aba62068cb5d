// Decides where a product with a scaling runs, and how.
#pragma once

#include <cstdint>

#include "block_quantize.h"

namespace narrowfloat {

enum class Route {
  refused,
  native,    // cuBLASLt takes the scales
  epilogue,  // it multiplies codes, our own pass their scales
  mx,        // it takes them as MXFP8's: each power of two of 128 four times
  bf16,      // code x scale as operands of a bf16 product, exact
};

// On chips of a capability (major x 10 + minor), by a version of cuBLASLt.
Route block_route(Scaling scaling, int capability, int64_t version);

// "native" (mx too), "epilogue", "bf16", or "" where it is refused
const char* block_route_name(int64_t scaling, int capability, int64_t version);

}  // namespace narrowfloat
