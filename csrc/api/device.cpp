// How a device's properties are cached.
#include "api/device.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "api/check.h"

namespace narrowfloat {
namespace {

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  NF_CUDA(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

}  // namespace

Device device_of(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int>, kMaxDevices> capability{}, multiprocessors{}, cooperative{};
  NF_CHECK(index >= 0 && index < kMaxDevices, "narrowfloat: expected a device below ", kMaxDevices,
           ", got ", index);
  if (multiprocessors[index] == 0) {
    capability[index] = attribute_of(cudaDevAttrComputeCapabilityMajor, index) * 10 +
                        attribute_of(cudaDevAttrComputeCapabilityMinor, index);
    cooperative[index] = attribute_of(cudaDevAttrCooperativeLaunch, index);
    multiprocessors[index] = attribute_of(cudaDevAttrMultiProcessorCount, index);  // last: all set
  }
  return {multiprocessors[index], capability[index], capability[index] >= 90,
          cooperative[index] != 0};
}

}  // namespace narrowfloat
