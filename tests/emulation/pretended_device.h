// Decides what the CUDA runtime says of the device that tests pretend to have: of compute
// capability 9.9, with as many multiprocessors as a test asks for.
#pragma once

#include <cuda_runtime.h>

namespace {
int g_multiprocessors = 2, g_cooperative = 1;
}

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? g_multiprocessors
           : attribute == cudaDevAttrCooperativeLaunch ? g_cooperative
                                                       : 9;  // compute capability
  return cudaSuccess;
}
}
