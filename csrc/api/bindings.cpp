// What Python can ask the binary that is not about tensors: versions and counters.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <utility>
#include <vector>

#include "api/check.h"
#include "gemm/cublaslt.h"
#include "gemm/tune.h"
#include "linear/route.h"
#include "linear/spec.h"
#include "quantize/amax_history.h"

namespace py = pybind11;

namespace {

// 0 outside a capture, else a number that no other capture has.
uint64_t capture_id(uintptr_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  NF_CUDA(cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(stream), &status, &id, nullptr,
                                   nullptr, nullptr, nullptr));
#else
  NF_CUDA(cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(stream), &status, &id));
#endif
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

py::dict plan_cache() {
  const auto counters = narrowfloat::plan_cache_counters();
  py::dict result;
  result["hits"] = counters.hits;
  result["misses"] = counters.misses;
  return result;
}

int driver_version() {
  int version = 0;
  NF_CUDA(cudaDriverGetVersion(&version));
  return version;
}

py::list plans() {
  py::list list;
  for (const narrowfloat::SavedChoice& c : narrowfloat::saved_choices()) {
    list.append(py::make_tuple(c.device, c.key, c.algorithm, c.what, c.first_us, c.chosen_us,
                               c.offered, c.tried, c.right));
  }
  return list;
}

py::list spec_layout() {
  py::list list;
  for (const narrowfloat::SpecField& f : narrowfloat::kSpecLayout) {
    list.append(py::make_tuple(f.name, f.shift, f.width));
  }
  return list;
}

// (kind, text) of the error that the calling thread threw last; it is then forgotten.
py::tuple take_error() {
  const narrowfloat::LastError error = std::exchange(narrowfloat::last_error, {});
  return py::make_tuple(static_cast<int>(error.kind), error.text);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled half of narrowfloat: loading it registers the CUDA operators.";
  m.def("cuda_version", [] { return CUDART_VERSION; }, "CUDART_VERSION it was compiled with.");
  m.def("cublaslt_version", &narrowfloat::cublaslt_version, "Of the library that is loaded.");
  m.def("archs", [] { return NARROWFLOAT_ARCHS; }, "Compiled architectures, space-separated.");
  m.def(
      "torch_target", [] { return static_cast<uint64_t>(TORCH_TARGET_VERSION); },
      "The oldest torch it runs on, a byte a part: 0x020a... is 2.10.");
  m.def("has_fp4", py::overload_cast<int, int64_t>(&narrowfloat::has_fp4), py::arg("capability"),
        py::arg("cublaslt"), "GEMMs of FP4 on chips of a capability, 89 or 120, by a version.");
  m.def("block_route", &narrowfloat::block_route_name, py::arg("scaling"), py::arg("capability"),
        py::arg("cublaslt"),
        "How GEMMs of a scaling run there: 'native', 'epilogue', 'bf16', '' where refused.");
  m.def("spec_layout", &spec_layout,
        "[(name, first bit, bits)] of what an operator is asked for, as spec.py has it.");
  m.def("plan_cache", &plan_cache, "GEMMs that found a cached plan (hits) or made one (misses).");
  m.def("take_error", &take_error,
        "(kind, text) of this thread's last error: 1 ValueError, 2 TypeError, 3 OutOfMemoryError.");
  m.def("driver_version", &driver_version, "The newest CUDA that the driver takes, as 13000.");
  m.def("start_tuning", &narrowfloat::start_tuning, py::arg("older_devices"),
        "From now on GEMMs measure cuBLASLt's candidates, those before sm90 only if told to.");
  m.def("stop_tuning", &narrowfloat::stop_tuning, py::arg("older_devices"));
  m.def("plans", &plans,
        "[(device, key, algorithm, product, first_us, us, offered, tried, right)] of all that were "
        "measured or loaded; the numbers are 0 of those that were loaded.");
  m.def("load_plan", &narrowfloat::load_choice, py::arg("device"), py::arg("key"),
        py::arg("algorithm"), py::arg("product"), "A plan of another process, for a device.");
  m.def(
      "roll_histories",
      [](const std::vector<uintptr_t>& layers, int rows, int width, bool latest, int margin,
         uintptr_t stream) {
        narrowfloat::roll_histories(layers, {rows, width, latest, std::ldexp(1.f, margin)},
                                    reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("layers"), py::arg("rows"), py::arg("width"), py::arg("latest"), py::arg("margin"),
      py::arg("stream"),
      "New scales from the histories at these addresses, of the current device, on a raw stream.");
  m.def("capture_id", &capture_id, py::arg("stream"),
        "Of the capture that the raw stream is in, 0 if it is in none.");
}
