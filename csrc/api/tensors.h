// How tensors enter and leave C++: views, types, allocation, checks. Torch's stable headers only.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "api/check.h"
#include "quantize/tensor.h"

namespace narrowfloat {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

ScalarType dtype_of(Element element);
ScalarType dtype_of(Real type);
Element element_of(const Tensor& q, const char* op, const char* name);
Real real_of(ScalarType dtype, const char* op, const char* name);

// The current stream of a device, which also becomes the current device while this lives.
class Launch {
 public:
  Launch(const Tensor& on, const char* op, const char* name);
  int device;
  cudaStream_t stream;

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;  // where another one is current
};

// A contiguous tensor, uninitialized. An allocation that fails reaches Python as
// torch.OutOfMemoryError.
Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, int device);
Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype, int device);

// Stands for an address in a scratch that is still being planned: a plan depends on which copies
// are made, not on where.
inline float* const kInScratch = reinterpret_cast<float*>(uintptr_t{256});

// One allocation for all that a call needs only while it runs. Pieces are added first, allocated
// together, then addressed; addresses from before stand for those, as kInScratch does.
class Scratch {
 public:
  int64_t add(int64_t bytes) {  // where the piece begins, 256-byte aligned
    const int64_t first = bytes_;
    bytes_ += (bytes + 255) / 256 * 256;
    return first;
  }
  void allocate(int device);
  template <typename T = uint8_t>
  T* at(int64_t first) const {
    return reinterpret_cast<T*>(base_ + first);
  }

 private:
  int64_t bytes_ = 0;
  uint8_t* base_ = reinterpret_cast<uint8_t*>(uintptr_t{256});
  std::optional<Tensor> storage_;
};

// A tensor's scale in memory: {scale, multiplier, 0, 0}, 16 bytes as cuBLASLt wants it aligned.
constexpr int64_t kScale = 4;

// x [..., K] seen as [M, K]: a view where strides allow one, else of a contiguous copy that it
// owns.
struct Matrix {
  Tensor owner;
  int64_t rows, cols, row_stride, col_stride;
  Real type;

  Matrix(const Tensor& x, const char* op, const char* name);
};

// x's sizes with another last one.
std::vector<int64_t> with_last(const Tensor& x, int64_t last);

void check_same_device(const Tensor& t, const Tensor& as, const char* op, const char* name);

// bias [N] as it can be read, on the device of `as`: itself, or a contiguous copy; none if there is
// none.
std::optional<Tensor> bias_for(const std::optional<Tensor>& bias, int64_t n, const Tensor& as,
                               const char* op);

// A wrong dtype; reaches Python as TypeError.
[[noreturn]] void throw_type_error(const std::string& text);

const char* dtype_name(ScalarType dtype);
std::string shape_of(const Tensor& t);  // "(2, 3)"

}  // namespace narrowfloat
