// Decides how the operators' host code finds memory on the CPU: every allocation and every piece of
// a scratch begins as garbage, between bytes that nobody may write. emulated.py has host_on_cpu()
// called where csrc calls torch's CUDA allocator. It is compiled once for all of them, and so
// includes what most of them include.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace host_on_cpu {

AOTITorchError empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                             int32_t dtype, int32_t device_type, int32_t device_index,
                             AtenTensorHandle* tensor);

AOTITorchError current_stream(int32_t device_index, void** stream);

// A piece of `bytes` bytes that begins at `first` of a scratch; returns where the next one may.
int64_t piece(const void* scratch, int64_t first, int64_t bytes);
// The scratch's pieces are at `base` from now on. Returns it.
uint8_t* allocated(const void* scratch, void* base);

}  // namespace host_on_cpu
