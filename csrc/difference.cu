// Decides how far apart two results of a product are, on the device.
#include "difference.h"

#include "check.h"
#include "numerics.cuh"

namespace narrowfloat {
namespace {

constexpr int kDifferenceThreads = 256;

__global__ void __launch_bounds__(kDifferenceThreads)
    narrowfloat_difference(const void* first, const void* second, Real type, int64_t rows,
                           int64_t cols, int64_t ld, double* sums) {
  double norm = 0, apart = 0;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    for (int64_t c = threadIdx.x; c < cols; c += kDifferenceThreads) {
      const float a = load_real(first, type, r * ld + c), b = load_real(second, type, r * ld + c);
      const double d = static_cast<double>(b) - a;
      norm += static_cast<double>(a) * a;
      apart += d * d;
    }
  }
  for (int o = 16; o; o >>= 1) {
    norm += __shfl_xor_sync(0xffffffffu, norm, o);
    apart += __shfl_xor_sync(0xffffffffu, apart, o);
  }
  if (threadIdx.x % 32 == 0) {  // in any order: what it decides is far from a rounding
    atomicAdd(sums, norm);
    atomicAdd(sums + 1, apart);
  }
}

}  // namespace

void difference(const void* first, const void* second, Real type, int64_t rows, int64_t cols,
                int64_t ld, double& norm, double& apart, cudaStream_t stream) {
  double* sums = nullptr;
  double both[2] = {};
  NF_CUDA(cudaMallocAsync(&sums, sizeof both, stream));
  NF_CUDA(cudaMemsetAsync(sums, 0, sizeof both, stream));
  const int blocks = static_cast<int>(rows < 1024 ? rows : 1024);
  narrowfloat_difference<<<blocks, kDifferenceThreads, 0, stream>>>(first, second, type, rows, cols,
                                                                    ld, sums);
  NF_CUDA(cudaGetLastError());
  NF_CUDA(cudaMemcpyAsync(both, sums, sizeof both, cudaMemcpyDeviceToHost, stream));
  NF_CUDA(cudaFreeAsync(sums, stream));
  NF_CUDA(cudaStreamSynchronize(stream));
  norm = both[0], apart = both[1];
}

}  // namespace narrowfloat
