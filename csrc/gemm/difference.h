// How far apart two results of a GEMM are.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "quantize/tensor.h"

namespace narrowfloat {

// Memory of the device's own pool, given back when the stream passes the end of its scope.
class PoolMemory {
 public:
  PoolMemory(size_t bytes, cudaStream_t stream);
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;
  ~PoolMemory();
  void* get() const { return memory_; }

 private:
  cudaStream_t stream_;
  void* memory_ = nullptr;
};

// norm = sum of first^2, apart = sum of (second - first)^2 over [rows, cols], leading dimension ld.
// Waits for the stream.
void difference(const void* first, const void* second, Real type, int64_t rows, int64_t cols,
                int64_t ld, double& norm, double& apart, cudaStream_t stream);

}  // namespace narrowfloat
