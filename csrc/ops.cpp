// Decides how the operators that ops.py defines are bound to CUDA, and how C++ sees tensors.
#include "ops.h"

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "cublaslt.h"
#include "epilogue.h"
#include "linear_operands.h"
#include "product.h"

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

QuantizeJob Matrix::job(Element format, void* q_rows, void* q_columns, float* scale,
                        bool scale_given) const {
  QuantizeJob job{};
  job.x = owner.data_ptr();
  job.type = type;
  job.rows = rows, job.cols = cols;
  job.row_stride = row_stride, job.col_stride = col_stride;
  job.format = format;
  job.q_rows = static_cast<uint8_t*>(q_rows);
  job.q_columns = static_cast<uint8_t*>(q_columns);
  job.scale = scale;
  job.scale_given = scale_given;
  return job;
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

std::tuple<Tensor, Tensor, Tensor> quantize_op(const Tensor& x, int64_t format, bool rows,
                                               bool columns, std::optional<Tensor> scale) {
  const Launch on(x, "quantize", "x");
  const Matrix m(x, "quantize", "x");
  const Element element = element_of(format, "quantize");
  const ScalarType dtype = dtype_of(element);
  Tensor q_rows = rows ? empty({padded(m.rows), padded(m.cols)}, dtype, on.device)
                       : empty({0}, dtype, on.device);
  Tensor q_columns = columns ? empty({padded(m.cols), padded(m.rows)}, dtype, on.device)
                             : empty({0}, dtype, on.device);
  Tensor scales = empty({kScale}, ScalarType::Float, on.device);
  if (scale) {
    check_same_device(*scale, x, "quantize", "scale");
    NF_CHECK(scale->numel() == kScale && scale->is_contiguous() &&
                 scale->scalar_type() == ScalarType::Float,
             "quantize: expected scale as float32 [4], contiguous, as an earlier call returned it");
    NF_CUDA(cudaMemcpyAsync(scales.data_ptr(), scale->data_ptr(), kScale * sizeof(float),
                            cudaMemcpyDeviceToDevice, on.stream));
  }
  const QuantizeJob job =
      m.job(element, rows ? q_rows.data_ptr() : nullptr, columns ? q_columns.data_ptr() : nullptr,
            static_cast<float*>(scales.data_ptr()), scale.has_value());
  const QuantizePlan plan = plan_quantize(&job, 1, on.device);
  Scratch scratch;
  const int64_t partials = scratch.add(plan.scratch_bytes);
  scratch.allocate(on.device);
  quantize(plan, scratch.at(partials), on.stream);
  return {q_rows, q_columns, scales};
}

namespace {

// A quantized operand [rows, k] as cuBLASLt takes it: as it is where its rows, address and sizes
// are multiples of 16 (rows only of `b`, which is padded to whole 16-byte rows of d), else a
// zero-padded copy in the scratch. Its scale likewise.
class Prepared {
 public:
  Prepared(const Tensor& q, const Tensor& scale, bool pads_rows, const char* op, const char* name,
           Scratch& scratch)
      : q_(q), scale_(scale), element_(element_of(q, op, name)) {
    NF_CHECK(q.dim() == 2, op, ": expected ", name, " of two dimensions, got ", shape_of(q));
    NF_CHECK(scale.scalar_type() == ScalarType::Float && scale.numel() >= 1, op,
             ": expected the scale of ", name, " in float32 with one element, got ",
             dtype_name(scale.scalar_type()), " ", shape_of(scale));
    rows_ = q.size(0), k_ = q.size(1);
    ld_ = rows_ <= 1 ? padded(k_) : q.stride(0);
    const bool aligned = reinterpret_cast<uintptr_t>(q.data_ptr()) % kPad == 0;
    as_is_ = k_ % kPad == 0 && q.stride(1) == 1 && ld_ % kPad == 0 && ld_ >= k_ && aligned &&
             !(pads_rows && rows_ % kPad != 0);
    if (!as_is_) q_first_ = scratch.add(padded(rows_) * padded(k_));
    scale_as_is_ = reinterpret_cast<uintptr_t>(scale.data_ptr()) % 16 == 0;
    if (!scale_as_is_) scale_first_ = scratch.add(sizeof(float));
  }

  // As it will be, for planning.
  Operand planned() const {
    if (as_is_) return {q_.data_ptr(), rows_, ld_, element_, kInScratch};
    return {kInScratch, rows_, padded(k_), element_, kInScratch};
  }

  Operand in(const Scratch& scratch, const Launch& on) const {
    const float* scale = static_cast<const float*>(scale_.data_ptr());
    if (!scale_as_is_) {
      NF_CUDA(cudaMemcpyAsync(scratch.at(scale_first_), scale, sizeof(float),
                              cudaMemcpyDeviceToDevice, on.stream));
      scale = scratch.at<float>(scale_first_);
    }
    if (as_is_) return {q_.data_ptr(), rows_, ld_, element_, scale};
    pad_codes(q_.data_ptr(), rows_, k_, q_.stride(0), q_.stride(1), scratch.at(q_first_),
              on.stream);
    return {scratch.at(q_first_), rows_, padded(k_), element_, scale};
  }

 private:
  const Tensor &q_, &scale_;
  Element element_;
  int64_t rows_ = 0, k_ = 0, ld_ = 0, q_first_ = 0, scale_first_ = 0;
  bool as_is_ = false, scale_as_is_ = false;
};

void check_product(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                   const char* op) {
  check_same_device(b, a, op, "b");
  check_same_device(a_scale, a, op, "a_scale");
  check_same_device(b_scale, a, op, "b_scale");
  NF_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(1), op,
           ": expected a [M,K] and b [N,K] with one K, got ", shape_of(a), " and ", shape_of(b));
}

}  // namespace

Tensor scaled_mm_op(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                    std::optional<Tensor> bias, ScalarType out_dtype, bool fast) {
  constexpr const char* op = "scaled_mm";
  const Launch on(a, op, "a");
  check_product(a, b, a_scale, b_scale, op);
  const int64_t m = a.size(0), n = b.size(0);
  const Real d_type = real_of(out_dtype, op, "out_dtype");
  Tensor d = empty({m, n}, out_dtype, on.device);
  Scratch scratch;
  Product product(m, n, a.size(1), d_type, fast, scratch);
  const std::optional<Tensor> own_bias = bias_for(bias, n, a, op);
  if (own_bias) product.plan_bias(*own_bias, op, scratch);
  const Prepared a_ready(a, a_scale, false, op, "a", scratch);
  const Prepared b_ready(b, b_scale, n % 8 != 0, op, "b", scratch);
  const int64_t workspace =
      scratch.add(product.workspace(a_ready.planned(), b_ready.planned(), d.data_ptr(), on));
  scratch.allocate(on.device);
  product.run(a_ready.in(scratch, on), b_ready.in(scratch, on), d.data_ptr(), scratch, workspace,
              on);
  return d;
}

void scaled_mm_accumulate_op(Tensor out, const Tensor& a, const Tensor& b, const Tensor& a_scale,
                             const Tensor& b_scale, bool fast) {
  constexpr const char* op = "scaled_mm_accumulate_";
  const Launch on(a, op, "a");
  check_product(a, b, a_scale, b_scale, op);
  check_same_device(out, a, op, "out");
  const int64_t m = a.size(0), n = b.size(0);
  Matmul p{};
  p.d_type = real_of(out.scalar_type(), op, "out");
  NF_CHECK(out.dim() == 2 && out.size(0) == m && out.size(1) == n, op, ": expected out [", m, ", ",
           n, "] for a [M,K] and b [N,K], got ", shape_of(out));
  p.d = out.data_ptr();
  p.ldd = m <= 1 ? n : out.stride(0);
  NF_CHECK((n <= 1 || out.stride(1) == 1) && p.ldd >= n && p.ldd * size_of(p.d_type) % 16 == 0 &&
               n % 8 == 0 && reinterpret_cast<uintptr_t>(p.d) % 16 == 0,
           op,
           ": expected out row-major with rows on 16-byte boundaries and a multiple of 8 "
           "columns, got ",
           n, " columns and row stride ", p.ldd, " (accumulate with torch where it is not)");
  if (out.numel() == 0 || a.size(1) == 0) return;
  Scratch scratch;
  const Prepared a_ready(a, a_scale, false, op, "a", scratch);
  const Prepared b_ready(b, b_scale, false, op, "b", scratch);
  p.a = a_ready.planned(), p.b = b_ready.planned();
  p.k = padded(a.size(1));
  p.fast = fast;
  p.accumulate = true;
  const int64_t workspace = scratch.add(workspace_for(p, on.device, on.stream));
  scratch.allocate(on.device);
  p.a = a_ready.in(scratch, on), p.b = b_ready.in(scratch, on);
  matmul(p, scratch.at(workspace), on.device, on.stream);
}

}  // namespace narrowfloat

STABLE_TORCH_LIBRARY_IMPL(narrowfloat, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&narrowfloat::quantize_op));
  m.impl("scaled_mm", TORCH_BOX(&narrowfloat::scaled_mm_op));
  m.impl("scaled_mm_accumulate_", TORCH_BOX(&narrowfloat::scaled_mm_accumulate_op));
  m.impl("linear_forward", TORCH_BOX(&narrowfloat::linear_forward));
  m.impl("linear_backward", TORCH_BOX(&narrowfloat::linear_backward));
  m.impl("delayed_linear_forward", TORCH_BOX(&narrowfloat::delayed_linear_forward));
  m.impl("delayed_linear_backward", TORCH_BOX(&narrowfloat::delayed_linear_backward));
  m.impl("fp4_quantize", TORCH_BOX(&narrowfloat::fp4_quantize_op));
  m.impl("fp4_linear_forward", TORCH_BOX(&narrowfloat::fp4_linear_forward));
  m.impl("fp4_linear_backward", TORCH_BOX(&narrowfloat::fp4_linear_backward));
  m.impl("block_quantize", TORCH_BOX(&narrowfloat::block_quantize_op));
  m.impl("block_linear_forward", TORCH_BOX(&narrowfloat::block_linear_forward));
  m.impl("block_linear_backward", TORCH_BOX(&narrowfloat::block_linear_backward));
}
