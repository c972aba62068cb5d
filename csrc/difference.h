// Decides how far apart two results of a product are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "quantize.h"

namespace narrowfloat {

// norm = sum of first^2, apart = sum of (second - first)^2 over [rows, cols], leading dimension ld.
// Waits for the stream.
void difference(const void* first, const void* second, Real type, int64_t rows, int64_t cols,
                int64_t ld, double& norm, double& apart, cudaStream_t stream);

}  // namespace narrowfloat
