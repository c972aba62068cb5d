// Decides how errors leave C++: always by throwing, with what was expected, what came, what to do.
#pragma once

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace narrowfloat {

template <typename... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a launch error is not left for an innocent later call to find
  throw std::runtime_error(message("narrowfloat: ", what, " failed: ", cudaGetErrorName(status),
                                   ", ", cudaGetErrorString(status)));
}

}  // namespace narrowfloat

// A wrong argument; reaches Python as ValueError.
#define NF_CHECK(condition, ...)                                                      \
  do {                                                                                \
    if (!(condition)) throw std::invalid_argument(narrowfloat::message(__VA_ARGS__)); \
  } while (0)

#define NF_CUDA(call) narrowfloat::check_cuda((call), #call)
