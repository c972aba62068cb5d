// What cuBLASLt is for the tests of its callers: a pretended library of a version, on a
// device of a compute capability, that has the algorithms that a test makes up, takes FP4 as NVIDIA
// documents it (cuBLAS, "Using the cublasLt API", narrow precisions; "1D block scaling factors
// layout"), refuses what is not so, and multiplies in fp64. Nothing here comes from csrc or the
// reference.
#include "gemm/gemm.h"
#include "gemm/hold.h"
// torch's headers before it
#include "cuda_on_cpu.h"
// after it
#include <cublasLt.h>

#include <ctime>
#include <map>
#include <string>
#include <vector>

namespace {

int g_capability = 100;
size_t g_version = 130100;
bool g_offers = true, g_launches = true, g_capturing = false;
int64_t g_pieces = 0, g_most_bytes = INT64_MAX;  // of the device's pool: taken, of one at most

template <typename T>
T read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

struct Attributes {
  std::map<int, std::string> bytes;
  void set(int name, const void* value, size_t size) {
    bytes[name] = std::string(static_cast<const char*>(value), size);
  }
  template <typename T>
  T get(int name, T otherwise) const {
    const auto found = bytes.find(name);
    return found == bytes.end() ? otherwise : read<T>(found->second.data());
  }
};

struct Matrix {
  cudaDataType_t type;
  int64_t rows, cols, ld;  // column-major
};

float real_at(const void* p, cudaDataType_t type, int64_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(p)[i];
  if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}

double e2m1_at(const void* p, int64_t i) {  // the first of two in the low half
  const int code = static_cast<const uint8_t*>(p)[i / 2] >> (i % 2 * 4) & 15;
  constexpr double kValues[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

double ue4m3(int byte) {
  if ((byte & 0x7f) == 0x7f) return std::nan("");
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  return exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
}

// Of element `inner` along the contraction and `outer` across it: tiles of 128 outer by 4 blocks,
// those of an outer one after another.
double scale_at(const uint8_t* scales, int64_t inner, int64_t outer, int64_t k) {
  const int64_t block = inner / 16, tiles = (k + 63) / 64;
  const int64_t tile = outer / 128 * tiles + block / 4;
  return ue4m3(scales[tile * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 + block % 4]);
}

bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

struct Problem {
  const Attributes& d;
  const Matrix &a, &b, &out;

  cublasOperation_t transa() const { return d.get(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N); }
  cublasOperation_t transb() const { return d.get(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N); }
  bool is_fp4() const { return a.type == CUDA_R_4F_E2M1 || b.type == CUDA_R_4F_E2M1; }
  int64_t k() const { return transa() == CUBLAS_OP_T ? a.rows : a.cols; }

  // In words why there is no algorithm for FP4, or null.
  const char* refusal() const {
    if (!is_fp4()) return nullptr;
    constexpr auto kMode = static_cast<int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
    if (a.type != b.type) return "both operands in e2m1";
    if (transa() != CUBLAS_OP_T || transb() != CUBLAS_OP_N) return "TN";
    if (d.get(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, -1) != kMode) return "a's scale mode";
    if (d.get(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, -1) != kMode) return "b's scale mode";
    if (a.rows != b.rows || a.cols != out.rows || b.cols != out.cols) return "sizes that agree";
    if (k() % 32 != 0 || a.ld % 32 != 0 || b.ld % 32 != 0) return "K in words of 16 bytes";
    if (out.rows * (out.type == CUDA_R_32F ? 4 : 2) % 16 != 0) return "d in words of 16 bytes";
    if (d.bytes.count(CUBLASLT_MATMUL_DESC_FAST_ACCUM)) return "no FAST_ACCUM";
    return nullptr;
  }
};

struct Call {  // what the last GEMM was asked with; test_fp4_blackwell.py lays it out
  int64_t a, b, a_scale, b_scale, c, d;
  int64_t m, n, k, a_type, b_type, d_type, pointer_mode, epilogue;
  double alpha, beta;
} g_call;
const char* g_refusal = nullptr;

// What the library has for every GEMM, its favourite first; test_tune_emulated.py lays it out.
enum Outcome : int64_t { kRight, kWrong, kUnwritten, kFails };
struct Algorithm {
  int64_t outcome, splits, reduction, workspace;
  double us;
};
std::vector<Algorithm> g_algorithms{{kRight, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 4096, 10}};
int64_t g_last = -1;  // of the last GEMM
const Algorithm& of(const cublasLtMatmulAlgo_t* algorithm) {
  return g_algorithms[algorithm->data[0]];
}

// The device's time: it starts what the host gives it when it has done what came before. That in
// which the thread does not run does not count, or other work on the machine would be measured.
double now_us() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}
double g_done_us = 0;
double take_us(double us) { return g_done_us = std::max(g_done_us, now_us()) + us; }

}  // namespace

struct cublasLtContext {};

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? g_capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? g_capability % 10
                                                            : 1;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = g_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  if (static_cast<int64_t>(bytes) > g_most_bytes) return cudaErrorMemoryAllocation;
  *memory = std::malloc(bytes);
  ++g_pieces;
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  --g_pieces;
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  std::memset(to, byte, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new double(0));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<double*>(event) = take_us(0);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  while (now_us() < *reinterpret_cast<double*>(event)) {
  }
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = static_cast<float>((*reinterpret_cast<double*>(end) - *reinterpret_cast<double*>(begin)) /
                           1e3);
  return cudaSuccess;
}

size_t cublasLtGetVersion() { return g_version; }
const char* cublasLtGetStatusString(cublasStatus_t) { return "CUBLAS_STATUS_NOT_SUPPORTED"; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *d = reinterpret_cast<cublasLtMatmulDesc_t>(new Attributes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  delete reinterpret_cast<Attributes*>(d);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t name,
                                              const void* value, size_t size) {
  reinterpret_cast<Attributes*>(d)->set(name, value, size);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(
      new Matrix{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), ld});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<Matrix*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Attributes);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<Attributes*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void* value, size_t size) {
  reinterpret_cast<Attributes*>(preference)->set(name, value, size);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* count) {
  const Problem p{*reinterpret_cast<Attributes*>(d), *reinterpret_cast<Matrix*>(a),
                  *reinterpret_cast<Matrix*>(b), *reinterpret_cast<Matrix*>(out)};
  g_refusal = g_offers ? p.refusal() : "anything";
  *count = 0;
  if (g_refusal) return CUBLAS_STATUS_NOT_SUPPORTED;
  const auto& wanted = *reinterpret_cast<Attributes*>(preference);
  const auto reductions = wanted.get<uint32_t>(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                               CUBLASLT_REDUCTION_SCHEME_MASK);
  for (size_t i = 0; i < g_algorithms.size() && *count < asked; ++i) {
    const Algorithm& a = g_algorithms[i];
    if (a.reduction != CUBLASLT_REDUCTION_SCHEME_NONE && !(a.reduction & reductions)) continue;
    results[*count] = {};
    results[*count].algo.data[0] = i;
    results[*count].state = CUBLAS_STATUS_SUCCESS;
    results[(*count)++].workspaceSize = static_cast<size_t>(a.workspace);
  }
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  if (algorithm->data[0] >= g_algorithms.size()) return CUBLAS_STATUS_NOT_SUPPORTED;
  result->workspaceSize = static_cast<size_t>(of(algorithm).workspace);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t name,
                                                    void* value, size_t, size_t* written) {
  const auto number = static_cast<int32_t>(
      name == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? of(algorithm).splits : of(algorithm).reduction);
  std::memcpy(value, &number, sizeof number);
  *written = sizeof number;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t*,
                                                    cublasLtMatmulAlgoConfigAttributes_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t descriptor, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t, void* out, cublasLtMatrixLayout_t out_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t bytes,
                              cudaStream_t) {
  const Problem p{*reinterpret_cast<Attributes*>(descriptor), *reinterpret_cast<Matrix*>(a_layout),
                  *reinterpret_cast<Matrix*>(b_layout), *reinterpret_cast<Matrix*>(out_layout)};
  const Attributes& d = p.d;
  const auto* a_scale = d.get<const uint8_t*>(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, nullptr);
  const auto* b_scale = d.get<const uint8_t*>(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, nullptr);
  const auto number = [](const void* pointer) { return reinterpret_cast<intptr_t>(pointer); };
  const auto mode = d.get<int32_t>(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_HOST);
  const auto epilogue =
      d.get<cublasLtEpilogue_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
  g_call = {number(a), number(b),   number(a_scale),    number(b_scale),
            number(c), number(out), p.out.rows,         p.out.cols,
            p.k(),     p.a.type,    p.b.type,           p.out.type,
            mode,      epilogue,    read<float>(alpha), read<float>(beta)};
  if (!g_launches || !is_aligned(workspace, 256)) return CUBLAS_STATUS_NOT_SUPPORTED;
  const Algorithm& how = of(algorithm);
  if (bytes != static_cast<size_t>(how.workspace)) return CUBLAS_STATUS_INVALID_VALUE;
  if (how.outcome == kFails) return CUBLAS_STATUS_EXECUTION_FAILED;
  g_last = static_cast<int64_t>(algorithm->data[0]);
  take_us(how.us);
  if (p.is_fp4()) {
    if (!a_scale || !b_scale || !is_aligned(a_scale, 16) || !is_aligned(b_scale, 16)) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (!is_aligned(a, 16) || !is_aligned(b, 16) || !is_aligned(out, 16)) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (mode == CUBLASLT_POINTER_MODE_DEVICE && c == out) return CUBLAS_STATUS_INVALID_VALUE;
  }
  const void* bias = epilogue == CUBLASLT_EPILOGUE_BIAS
                         ? d.get<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr)
                         : nullptr;
  const auto bias_type = d.get(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, p.out.type);
  const auto value = [&](const void* from, const Matrix& m, const uint8_t* scales, int64_t i,
                         int64_t j) {
    if (m.type == CUDA_R_4F_E2M1) {
      return e2m1_at(from, j * m.ld + i) * scale_at(scales, i, j, p.k());
    }
    return static_cast<double>(real_at(from, m.type, j * m.ld + i));
  };
  for (int64_t column = how.outcome == kUnwritten; column < p.out.cols; ++column) {
    for (int64_t row = 0; row < p.out.rows; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < p.k(); ++i) {
        const bool t = p.transa() == CUBLAS_OP_T;
        sum += value(a, p.a, a_scale, t ? i : row, t ? row : i) * value(b, p.b, b_scale, i, column);
      }
      if (how.outcome == kWrong) sum *= 1.05;
      sum = sum * g_call.alpha + (bias ? real_at(bias, bias_type, row) : 0);
      const int64_t at = column * p.out.ld + row;
      const auto rounded = static_cast<float>(sum);
      if (p.out.type == CUDA_R_32F) static_cast<float*>(out)[at] = rounded;
      if (p.out.type == CUDA_R_16BF) {
        static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(rounded);
      }
      if (p.out.type == CUDA_R_16F) static_cast<__half*>(out)[at] = __float2half_rn(rounded);
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
}  // extern "C"

#include "api/device.cpp"
#include "gemm/cublaslt.cpp"
#include "gemm/difference.rewritten.h"
#include "gemm/epilogue.rewritten.h"
#include "gemm/gemm.cpp"
#include "gemm/plan.cpp"
#include "gemm/tune.cpp"

void narrowfloat::hold(double us, cudaStream_t) { take_us(us); }

void narrowfloat::Scratch::allocate(int) {  // as garbage
  static std::vector<uint8_t> bytes;
  bytes.assign(static_cast<size_t>(bytes_) + 512, 0xAB);
  base_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + 255) / 256 * 256);
}

extern "C" {

struct TestOperand {
  const void *data, *scales;  // packed, or bf16 without scales
  int64_t rows, ld;
};

struct TestGemm {
  int64_t m, n, k, d_type;
  TestOperand a, b;
  const float* alpha;  // {alpha, 0}
  const void* bias;
  int64_t bias_type, device;
  void* d;
};

// null, or the error
const char* run_gemm(const TestGemm* t) {
  static std::string problem;
  using namespace narrowfloat;
  try {
    const auto operand = [](const TestOperand& o) {
      return Operand{o.data, o.rows, o.ld, o.scales ? Element::e2m1 : Element::bf16, o.scales};
    };
    const Operand a = operand(t->a), b = operand(t->b);
    // what a launch is, without torch's guard
    alignas(Launch) unsigned char memory[sizeof(Launch)] = {};
    Launch& on = *reinterpret_cast<Launch*>(memory);
    on.device = static_cast<int>(t->device);
    Scratch scratch;
    Gemm gemm(t->m, t->n, t->k, static_cast<Real>(t->d_type), false, scratch, a.format);
    if (t->bias) gemm.plan_bias(t->bias, static_cast<Real>(t->bias_type), scratch);
    gemm.set_alpha(t->alpha);
    const int64_t workspace = scratch.add(gemm.workspace(a, b, t->d, on));
    scratch.allocate(0);
    gemm.run(a, b, t->d, scratch, workspace, on);
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

const Call* last_call() { return &g_call; }
const char* last_refusal() { return g_refusal; }

void pretend(int64_t capability, int64_t version, int64_t offers, int64_t launches,
             int64_t capturing) {
  g_capability = static_cast<int>(capability);
  g_version = static_cast<size_t>(version);
  g_offers = offers != 0, g_launches = launches != 0, g_capturing = capturing != 0;
}

int64_t plans(int64_t missed) {
  const auto counters = narrowfloat::plan_cache_counters();
  return missed ? counters.misses : counters.hits;
}

void offer(const Algorithm* algorithms, int64_t count) {
  g_algorithms.assign(algorithms, algorithms + count);
}
// How many pieces of the pool are taken; from now on one has so many bytes at most.
int64_t pool(int64_t most_bytes) {
  g_most_bytes = most_bytes;
  return g_pieces;
}
int64_t last_algorithm() { return g_last; }
void start_tuning() { narrowfloat::start_tuning(false); }
void stop_tuning() { narrowfloat::stop_tuning(false); }

struct Saved {
  double first_us, us;
  int64_t offered, tried, right;
};
// Of all that were measured or loaded; how many.
int64_t saved(Saved* to, int64_t most) {
  int64_t count = 0;
  for (const auto& s : narrowfloat::saved_choices()) {
    if (count < most) to[count] = {s.first_us, s.chosen_us, s.offered, s.tried, s.right};
    ++count;
  }
  return count;
}
// Takes the choices so far again, as from a file, with another algorithm.
void load_all(int64_t index) {
  for (const auto& s : narrowfloat::saved_choices()) {
    cublasLtMatmulAlgo_t algorithm{};
    algorithm.data[0] = static_cast<uint64_t>(index);
    narrowfloat::load_choice(s.device, s.key, narrowfloat::to_hex(algorithm), s.what);
  }
}
int64_t takes_fp4(int64_t device) { return narrowfloat::has_fp4(static_cast<int>(device)); }
int64_t would_take_fp4(int64_t capability, int64_t version) {
  return narrowfloat::has_fp4(static_cast<int>(capability), version);
}
}
