// How far apart two results of a GEMM are, on the device.
#include "gemm/difference.h"

#include "api/check.h"
#include "quantize/numerics.cuh"

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

PoolMemory::PoolMemory(size_t bytes, cudaStream_t stream) : stream_(stream) {
  const cudaError_t status = cudaMallocAsync(&memory_, bytes, stream);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw std::runtime_error(message("tune: expected ", bytes,
                                     " bytes of the device beside what torch holds, to compare "
                                     "results, got none (torch.cuda.empty_cache() before it)"));
  }
  check_cuda(status, "cudaMallocAsync");
}

PoolMemory::~PoolMemory() { cudaFreeAsync(memory_, stream_); }

void difference(const void* first, const void* second, Real type, int64_t rows, int64_t cols,
                int64_t ld, double& norm, double& apart, cudaStream_t stream) {
  double both[2] = {};
  const PoolMemory memory(sizeof both, stream);
  double* const sums = static_cast<double*>(memory.get());
  NF_CUDA(cudaMemsetAsync(sums, 0, sizeof both, stream));
  const int blocks = static_cast<int>(rows < 1024 ? rows : 1024);
  narrowfloat_difference<<<blocks, kDifferenceThreads, 0, stream>>>(first, second, type, rows, cols,
                                                                    ld, sums);
  NF_CUDA(cudaGetLastError());
  NF_CUDA(cudaMemcpyAsync(both, sums, sizeof both, cudaMemcpyDeviceToHost, stream));
  NF_CUDA(cudaStreamSynchronize(stream));
  norm = both[0], apart = both[1];
}

}  // namespace narrowfloat
