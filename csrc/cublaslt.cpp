// Decides how a product reaches cuBLASLt: the row/column swap, a cached plan, one launch.
//
// cuBLASLt is column-major and takes FP8 as op(A) = A^T times B only (TN, the one layout that sm89,
// sm90 and sm120 all have; bf16 may lie either way). Row-major d [M,N] = a [M,K] b [N,K]^T has the
// bytes of column-major D [N,M] with leading dimension ldd. The bytes of b are column-major [K,N],
// those of a [K,M], so D = b^T a: cuBLASLt's A is our b (m = N), its B is our a (n = M), and
// nothing is transposed. A bias of length N runs along D's rows, as its BIAS epilogue wants.
#include "cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "check.h"
#include "device.h"

namespace narrowfloat {
namespace {

std::atomic<int64_t> g_hits{0}, g_misses{0};

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(message("narrowfloat: ", what,
                                   " failed: ", cublasLtGetStatusString(status), " (cuBLASLt ",
                                   cublasLtGetVersion(), ")"));
}
#define NF_CUBLAS(call) check((call), #call)

// Objects made by *Create: the opaque structs differ in size between library versions, so *Init
// would tie the binary to one of them.
template <typename T, cublasStatus_t (*kDestroy)(T)>
struct Handle {
  T value = nullptr;
  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (value) kDestroy(value);
  }
};

struct Descriptor : Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> {
  Descriptor() { NF_CUBLAS(cublasLtMatmulDescCreate(&value, CUBLAS_COMPUTE_32F, CUDA_R_32F)); }
  template <typename V>
  void set(cublasLtMatmulDescAttributes_t attribute, const V& v) {
    NF_CUBLAS(cublasLtMatmulDescSetAttribute(value, attribute, &v, sizeof v));
  }
};

struct Layout : Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> {
  Layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld) {
    NF_CUBLAS(cublasLtMatrixLayoutCreate(&value, type, rows, cols, ld));
  }
};

struct Preference : Handle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> {
  Preference() { NF_CUBLAS(cublasLtMatmulPreferenceCreate(&value)); }
  template <typename V>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const V& v) {
    NF_CUBLAS(cublasLtMatmulPreferenceSetAttribute(value, attribute, &v, sizeof v));
  }
};

cudaDataType_t data_type(Element e) {
  switch (e) {
    case Element::e4m3:
      return CUDA_R_8F_E4M3;
    case Element::e5m2:
      return CUDA_R_8F_E5M2;
    case Element::e2m1:
      return CUDA_R_4F_E2M1;
    default:
      return CUDA_R_16BF;
  }
}
cudaDataType_t data_type(Real r) {
  return r == Real::f32 ? CUDA_R_32F : r == Real::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}
const char* name(Element e) {
  constexpr const char* kNames[] = {"e4m3", "e5m2", "e2m1", "bf16"};
  return kNames[static_cast<int>(e)];
}
const char* name(Real r) {
  return r == Real::f32 ? "float32" : r == Real::bf16 ? "bfloat16" : "float16";
}

// The largest power of two up to 256 that divides an address: what a kernel may assume.
uint32_t alignment(const void* p) {
  const auto bits = reinterpret_cast<uintptr_t>(p) | 256;
  return static_cast<uint32_t>(bits & -bits);
}

// Everything that chooses an algorithm, apart from the library, which is one a process, and the
// device, which has a cache of its own.
struct Key {
  int64_t m, n, k, lda, ldb, ldd;
  int32_t a_format, b_format, d_type;
  uint32_t a_align, b_align, d_align;
  uint32_t bias_align;              // 0 without one
  int32_t fast, accumulate, flags;  // no padding bytes: keys compare as bytes

  bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(sizeof(Key) == 6 * 8 + 10 * 4);

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t words[sizeof(Key) / 8], hash = 0x9e3779b97f4a7c15u;
    std::memcpy(words, &key, sizeof key);
    for (const uint64_t word : words) {
      hash = (hash ^ word) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

ScaleMode mode_of(const Operand& o) {
  return o.format == Element::e2m1 ? ScaleMode::vec16_ue4m3 : o.mode;
}
const char* scales_of(const Operand& o) {
  constexpr const char* kNames[] = {"per tensor", "vec16_ue4m3", "vec32_ue8m0",
                                    "per row",    "1x128",       "128x128"};
  if (o.format == Element::bf16) return "none";
  return o.format != Element::e2m1 && !o.scale ? "1" : kNames[static_cast<int>(mode_of(o))];
}

std::string describe(const Matmul& p) {
  return message("d [", p.a.rows, ", ", p.b.rows, "] = a [", p.a.rows, ", ", p.k, "] ",
                 name(p.a.format), " (ld ", p.a.ld, ", aligned ", alignment(p.a.q), ") x b [",
                 p.b.rows, ", ", p.k, "]^T ", name(p.b.format), " (ld ", p.b.ld, ", aligned ",
                 alignment(p.b.q), ") in ", name(p.d_type), " (ld ", p.ldd, ", aligned ",
                 alignment(p.d), "), scales ", scales_of(p.a), " x ", scales_of(p.b),
                 p.a.k_first ? ", a stored [k, rows]" : "",
                 p.b.k_first ? ", b stored [k, rows]" : "", p.alpha ? ", alpha on the device" : "",
                 ", ", p.fast ? "fast" : "exact", " accumulation", p.bias ? ", bias" : "",
                 p.accumulate ? ", beta 1" : "", "; cuBLASLt ", cublasLtGetVersion());
}

struct Plan {
  Descriptor descriptor;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace = 0;  // bytes it needs

  explicit Plan(const Matmul& p)
      : a(data_type(p.b.format), p.b.k_first ? p.b.rows : p.k, p.b.k_first ? p.k : p.b.rows,
          p.b.ld),
        b(data_type(p.a.format), p.a.k_first ? p.a.rows : p.k, p.a.k_first ? p.k : p.a.rows,
          p.a.ld),
        d(data_type(p.d_type), p.b.rows, p.a.rows, p.ldd) {
    descriptor.set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.k_first ? CUBLAS_OP_N : CUBLAS_OP_T);
    descriptor.set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.k_first ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.b.format == Element::e4m3 || p.b.format == Element::e5m2) {
      descriptor.set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast));
    }
    if (mode_of(p.b) != ScaleMode::tensor) {
      descriptor.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<int32_t>(mode_of(p.b)));
      descriptor.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<int32_t>(mode_of(p.a)));
    }
    if (p.alpha) {
      descriptor.set(CUBLASLT_MATMUL_DESC_POINTER_MODE,
                     static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE));
    }
    if (p.bias) {
      descriptor.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      descriptor.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(epilogue_bias_type(p.d_type)));
    }
    set_pointers(p);
  }

  void set_pointers(const Matmul& p) {
    if (p.b.scale) {
      descriptor.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale);
      descriptor.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale);
    }
    if (p.bias) descriptor.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  }
};

// Public reports (sm90, cuBLASLt 12.6.3 to 13.7) have wrong results where the number of splits
// along K does not divide K and a split is a whole number of the kernel's stages. Those are 32
// elements of K or a multiple, which one is not told for every kernel: all that could be meant are
// refused.
int32_t splits_of(const cublasLtMatmulAlgo_t& algorithm) {
  int32_t splits = 1;
  size_t written = 0;
  NF_CUBLAS(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
                                                 &splits, sizeof splits, &written));
  return splits;
}

bool splits_safely(int32_t splits, int64_t k) {
  return splits <= 1 || k % splits == 0 || k / splits % 32 != 0;
}

template <typename V>
void configure(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
               const V& v) {
  NF_CUBLAS(cublasLtMatmulAlgoConfigSetAttribute(&algorithm, attribute, &v, sizeof v));
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  NF_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// What an algorithm may ask for, by NVIDIA's advice 32 MiB from sm90 on and 4 MiB before. It is an
// input to the choice, and so to the bits.
size_t most_workspace(int device) {
  return size_t{device_of(device).capability >= 90 ? 32u : 4u} << 20;
}

// Handle and plans of one thread for one device: nothing is locked or shared.
class Context {
 public:
  int64_t workspace_for(const Matmul& p, int device, cudaStream_t stream) {
    return static_cast<int64_t>(find(p, device, stream).workspace);
  }

  void launch(const Matmul& p, void* workspace, int device, cudaStream_t stream) {
    Plan& plan = find(p, device, stream);
    plan.set_pointers(p);
    const float one = 1.f, own_beta = p.accumulate ? 1.f : 0.f;
    const float *alpha = p.alpha ? p.alpha : &one, *beta = p.alpha ? p.alpha + 1 : &own_beta;
    const cublasStatus_t status =
        cublasLtMatmul(handle(), plan.descriptor.value, alpha, p.b.q, plan.a.value, p.a.q,
                       plan.b.value, beta, p.c ? p.c : p.d, plan.d.value, p.d, plan.d.value,
                       &plan.algorithm, workspace, plan.workspace, stream);
    if (status != CUBLAS_STATUS_SUCCESS) {
      throw std::runtime_error(message("narrowfloat: cublasLtMatmul failed: ",
                                       cublasLtGetStatusString(status), " for ", describe(p)));
    }
  }

 private:
  Plan& find(const Matmul& p, int device, cudaStream_t stream) {
    const Key key{p.b.rows,
                  p.a.rows,
                  p.k,
                  p.b.ld,
                  p.a.ld,
                  p.ldd,
                  static_cast<int32_t>(p.b.format),
                  static_cast<int32_t>(p.a.format),
                  static_cast<int32_t>(p.d_type),
                  alignment(p.b.q),
                  alignment(p.a.q),
                  alignment(p.d),
                  p.bias ? alignment(p.bias) : 0,
                  p.fast,
                  p.accumulate,
                  p.b.k_first | (p.alpha != nullptr) << 1 | (p.c != nullptr) << 2 |
                      p.a.k_first << 3 | (p.b.scale != nullptr) << 4 |
                      static_cast<int32_t>(mode_of(p.b)) << 8 |
                      static_cast<int32_t>(mode_of(p.a)) << 12};
    const auto found = plans_.find(key);
    if (found != plans_.end()) {
      g_hits.fetch_add(1, std::memory_order_relaxed);
      return *found->second;
    }
    g_misses.fetch_add(1, std::memory_order_relaxed);
    // Token counts that never repeat would fill it without end; a plan is made anew in 0.2 ms.
    constexpr size_t kMostPlans = 4096;
    if (plans_.size() >= kMostPlans) plans_.clear();
    return *plans_.emplace(key, make(p, device, stream)).first->second;
  }

  std::unique_ptr<Plan> make(const Matmul& p, int device, cudaStream_t stream) {
    const size_t version = cublasLtGetVersion();
    if (version >= 130501 && version <= 130600 && capturing(stream)) {
      throw std::runtime_error(message(
          "narrowfloat: expected a product that ran before the capture, got a new one (cuBLASLt ",
          version,
          " breaks a capture in which it chooses an algorithm; run the model once with "
          "these shapes, in the capturing thread, before you capture): ",
          describe(p)));
    }
    auto plan = std::make_unique<Plan>(p);
    Preference preference;
    const size_t workspace = most_workspace(device);
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b.q));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a.q));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.d));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.d));
    std::array<cublasLtMatmulHeuristicResult_t, 8> candidates;
    int count = 0;
    if (cublasLtMatmulAlgoGetHeuristic(handle(), plan->descriptor.value, plan->a.value,
                                       plan->b.value, plan->d.value, plan->d.value,
                                       preference.value, static_cast<int>(candidates.size()),
                                       candidates.data(), &count) != CUBLAS_STATUS_SUCCESS) {
      count = 0;
    }
    std::string splits;
    for (int i = 0; i < count; ++i) {
      if (candidates[i].state != CUBLAS_STATUS_SUCCESS) continue;
      const int32_t number = splits_of(candidates[i].algo);
      if (splits_safely(number, p.k)) {
        plan->algorithm = candidates[i].algo;
        plan->workspace = candidates[i].workspaceSize;
        return plan;
      }
      splits += message(splits.empty() ? "" : ", ", number);
    }
    for (int i = 0; i < count; ++i) {  // none is safe: the first that runs without its split
      if (candidates[i].state != CUBLAS_STATUS_SUCCESS) continue;
      plan->algorithm = candidates[i].algo;
      configure(plan->algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, int32_t{1});
      configure(plan->algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
      cublasLtMatmulHeuristicResult_t result;
      if (cublasLtMatmulAlgoCheck(handle(), plan->descriptor.value, plan->a.value, plan->b.value,
                                  plan->d.value, plan->d.value, &plan->algorithm,
                                  &result) == CUBLAS_STATUS_SUCCESS &&
          result.workspaceSize <= workspace) {
        plan->workspace = result.workspaceSize;
        return plan;
      }
    }
    throw std::runtime_error(
        message("narrowfloat: cuBLASLt offers no algorithm for ", describe(p),
                splits.empty() ? "" : " but those that split K unsafely, into ", splits,
                ". CUBLASLT_LOG_LEVEL=5 makes it say why"));
  }

  cublasLtHandle_t handle() {
    if (!handle_.value) {
      // Making a handle may allocate, which a capture on another thread would otherwise forbid.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      NF_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
      const cublasStatus_t status = cublasLtCreate(&handle_.value);
      NF_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
      check(status, "cublasLtCreate");
    }
    return handle_.value;
  }

  Handle<cublasLtHandle_t, cublasLtDestroy> handle_;
  std::unordered_map<Key, std::unique_ptr<Plan>, KeyHash> plans_;
};

Context& context(int device) {
  thread_local std::unordered_map<int, Context> contexts;
  return contexts[device];
}

}  // namespace

int64_t workspace_for(const Matmul& problem, int device, cudaStream_t stream) {
  return context(device).workspace_for(problem, device, stream);
}

void matmul(const Matmul& problem, void* workspace, int device, cudaStream_t stream) {
  context(device).launch(problem, workspace, device, stream);
}

// Its release notes: sm100 and sm103 from 12.8 (12.8.3), sm120 and sm121 from update 1 (12.8.4).
bool has_fp4(int capability, int64_t version) {
  return capability >= 120 ? version >= 120804 : capability >= 100 && version >= 120803;
}

bool has_fp4(int device) {
  return has_fp4(device_of(device).capability, static_cast<int64_t>(cublasLtGetVersion()));
}

int64_t cublaslt_version() { return static_cast<int64_t>(cublasLtGetVersion()); }

PlanCacheCounters plan_cache_counters() { return {g_hits.load(), g_misses.load()}; }

}  // namespace narrowfloat
