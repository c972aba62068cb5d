// How errors leave C++: always by throwing, with what was expected, what came, what to do.
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

// The error that this thread threw last, for Python: from torch 2.15 on an exception that leaves a
// kernel keeps its text and loses its type (up to 2.14 it arrives as what it is).
enum class ErrorKind : int { runtime = 0, value = 1, type = 2, out_of_memory = 3 };
struct LastError {
  ErrorKind kind = ErrorKind::runtime;
  std::string text;
};
inline thread_local LastError last_error;

[[noreturn]] inline void throw_value_error(const std::string& text) {
  last_error = {ErrorKind::value, text};
  throw std::invalid_argument(text);
}

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a launch error is not left for an innocent later call to find
  throw std::runtime_error(message("narrowfloat: ", what, " failed: ", cudaGetErrorName(status),
                                   ", ", cudaGetErrorString(status)));
}

}  // namespace narrowfloat

// A wrong argument; reaches Python as ValueError.
#define NF_CHECK(condition, ...)                                                         \
  do {                                                                                   \
    if (!(condition)) narrowfloat::throw_value_error(narrowfloat::message(__VA_ARGS__)); \
  } while (0)

#define NF_CUDA(call) narrowfloat::check_cuda((call), #call)
