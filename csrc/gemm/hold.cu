// How a stream waits while launches line up behind: for the device's own clock.
#include "gemm/hold.h"

#include <algorithm>
#include <cstdint>

#include "api/check.h"

namespace narrowfloat {
namespace {

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void narrowfloat_hold(uint64_t length) {
  const uint64_t first = nanoseconds();
  while (nanoseconds() - first < length) __nanosleep(200);
}

}  // namespace

void hold(double us, cudaStream_t stream) {
  narrowfloat_hold<<<1, 1, 0, stream>>>(static_cast<uint64_t>(std::min(us, 1e3) * 1e3));
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
