// How tensors enter and leave C++: views, types, allocation, checks.
#include "api/tensors.h"

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace narrowfloat {

ScalarType dtype_of(Element element) {
  return element == Element::e4m3 ? ScalarType::Float8_e4m3fn : ScalarType::Float8_e5m2;
}

ScalarType dtype_of(Real type) {
  return type == Real::f32    ? ScalarType::Float
         : type == Real::bf16 ? ScalarType::BFloat16
                              : ScalarType::Half;
}

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    default:
      return "another dtype";
  }
}

std::string shape_of(const Tensor& t) {
  std::string text = "(";
  for (const int64_t size : t.sizes()) text += message(text.size() > 1 ? ", " : "", size);
  return text + (t.dim() == 1 ? ",)" : ")");
}

void throw_type_error(const std::string& text) {
  last_error = {ErrorKind::type, text};
  throw pybind11::type_error(text);
}

Element element_of(const Tensor& q, const char* op, const char* name) {
  if (q.scalar_type() == ScalarType::Float8_e4m3fn) return Element::e4m3;
  if (q.scalar_type() == ScalarType::Float8_e5m2) return Element::e5m2;
  throw_type_error(message(op, ": expected ", name, " in float8_e4m3fn or float8_e5m2, got ",
                           dtype_name(q.scalar_type()), " (quantize it first)"));
}

Real real_of(ScalarType dtype, const char* op, const char* name) {
  switch (dtype) {
    case ScalarType::Float:
      return Real::f32;
    case ScalarType::BFloat16:
      return Real::bf16;
    case ScalarType::Half:
      return Real::f16;
    default:
      throw_type_error(message(op, ": expected ", name, " in float32, bfloat16 or float16, got ",
                               dtype_name(dtype), " (convert it first)"));
  }
}

namespace {

std::string device_name(const Tensor& t) {
  return t.is_cuda() ? message("cuda:", t.get_device_index()) : t.is_cpu() ? "cpu" : "another";
}

int cuda_index(const Tensor& t, const char* op, const char* name) {
  NF_CHECK(t.is_cuda(), op, ": expected ", name,
           " on the CUDA device of another operand, got it on ", device_name(t),
           " (move it there)");
  return t.get_device_index();
}

}  // namespace

Launch::Launch(const Tensor& on, const char* op, const char* name)
    : device(cuda_index(on, op, name)) {
  int current_device = -1;
  NF_CUDA(cudaGetDevice(&current_device));
  if (current_device != device) guard_.emplace(device);
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  stream = static_cast<cudaStream_t>(current);
}

namespace {

[[noreturn]] void throw_out_of_memory(int64_t bytes, int device) {
  size_t free = 0, total = 0;
  const cudaError_t status = cudaMemGetInfo(&free, &total);
  cudaGetLastError();
  if (status != cudaSuccess && status != cudaErrorMemoryAllocation) {  // an earlier fault's
    throw std::runtime_error(message("narrowfloat: allocating ", bytes, " bytes on cuda:", device,
                                     " failed: ", cudaGetErrorString(status)));
  }
  pybind11::gil_scoped_acquire gil;
  const pybind11::object type = pybind11::module_::import("torch").attr("OutOfMemoryError");
  const std::string text =
      message("CUDA out of memory. narrowfloat tried to allocate ", bytes,
              " bytes on cuda:", device, "; the device has ", free, " of ", total, " bytes free");
  last_error = {ErrorKind::out_of_memory, text};
  PyErr_SetString(type.ptr(), text.c_str());
  throw pybind11::error_already_set();
}

// aoti_torch_empty_strided costs a quarter of stable::new_empty's time on the host.
Tensor empty(const int64_t* sizes, int64_t dims, ScalarType dtype, int device) {
  constexpr int64_t kMaxDims = 64;
  NF_CHECK(dims <= kMaxDims, "narrowfloat: expected at most ", kMaxDims, " dimensions, got ", dims);
  int64_t strides[kMaxDims], elements = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    strides[i] = elements;
    elements *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  if (aoti_torch_empty_strided(dims, sizes, strides, code, aoti_torch_device_type_cuda(), device,
                               &handle) != AOTI_TORCH_SUCCESS) {
    int64_t bytes = dtype == ScalarType::Float                                   ? 4
                    : dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ? 2
                                                                                 : 1;
    for (int64_t i = 0; i < dims; ++i) bytes *= sizes[i];
    throw_out_of_memory(bytes, device);
  }
  return Tensor(handle);
}

}  // namespace

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, int device) {
  return empty(sizes.begin(), static_cast<int64_t>(sizes.size()), dtype, device);
}

Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype, int device) {
  return empty(sizes.data(), static_cast<int64_t>(sizes.size()), dtype, device);
}

void Scratch::allocate(int device) {
  storage_ = empty({bytes_}, ScalarType::Byte, device);
  base_ = static_cast<uint8_t*>(storage_->data_ptr());
}

Matrix::Matrix(const Tensor& x, const char* op, const char* name)
    : owner(x), rows(1), row_stride(0), type(real_of(x.scalar_type(), op, name)) {
  const int64_t dims = x.dim();
  NF_CHECK(dims >= 1, op, ": expected ", name, " of at least one dimension, got a scalar");
  const auto sizes = x.sizes(), strides = x.strides();
  cols = sizes[dims - 1];
  col_stride = strides[dims - 1];
  // Leading dimensions fold into one where each strides over exactly the next one's extent.
  bool folds = true, first = true;
  int64_t extent = 0;
  for (int64_t i = dims - 2; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (first) {
      row_stride = strides[i];
      first = false;
    } else if (strides[i] != extent) {
      folds = false;
    }
    extent = strides[i] * sizes[i];
    rows *= sizes[i];
  }
  if (!folds && rows * cols != 0) {
    owner = torch::stable::contiguous(x);
    row_stride = cols;
    col_stride = 1;
  }
  if (cols == 1) col_stride = 1;  // any stride is right; this one is contiguous
  if (rows == 1) row_stride = cols;
}

std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  const auto sizes = x.sizes();
  std::vector<int64_t> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

void check_same_device(const Tensor& t, const Tensor& as, const char* op, const char* name) {
  const bool same = t.is_cuda() && as.is_cuda() && t.get_device_index() == as.get_device_index();
  NF_CHECK(same, op, ": expected ", name, " on ", device_name(as), " as the first operand is, got ",
           device_name(t), " (move it there)");
}

std::optional<Tensor> bias_for(const std::optional<Tensor>& bias, int64_t n, const Tensor& as,
                               const char* op) {
  if (!bias) return std::nullopt;
  check_same_device(*bias, as, op, "bias");
  NF_CHECK(bias->dim() == 1 && bias->size(0) == n, op, ": expected bias [", n, "], got ",
           shape_of(*bias));
  return bias->is_contiguous() ? *bias : torch::stable::contiguous(*bias);
}

}  // namespace narrowfloat
