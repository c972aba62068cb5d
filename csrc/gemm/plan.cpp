// Which algorithms a GEMM may have, and how it is told to cuBLASLt: the row/column swap.
//
// cuBLASLt is column-major and takes FP8 as op(A) = A^T times B only (TN, the one layout that sm89,
// sm90 and sm120 all have; bf16 may lie either way). Row-major d [M,N] = a [M,K] b [N,K]^T has the
// bytes of column-major D [N,M] with leading dimension ldd. The bytes of b are column-major [K,N],
// those of a [K,M], so D = b^T a: cuBLASLt's A is our b (m = N), its B is our a (n = M), and
// nothing is transposed. A bias of length N runs along D's rows, as its BIAS epilogue wants.
#include "gemm/plan.h"

#include <algorithm>

#include "api/device.h"

namespace narrowfloat {
namespace {

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

ScaleMode mode_of(const Operand& o) {
  return o.format == Element::e2m1 ? ScaleMode::vec16_ue4m3 : o.mode;
}
const char* scales_of(const Operand& o) {
  constexpr const char* kNames[] = {"per tensor", "vec16_ue4m3", "vec32_ue8m0",
                                    "per row",    "1x128",       "128x128"};
  if (o.format == Element::bf16) return "none";
  return o.format != Element::e2m1 && !o.scale ? "1" : kNames[static_cast<int>(mode_of(o))];
}

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

// How it adds up parts of K; what does not say counts as the worst.
uint32_t reduction_of(const cublasLtMatmulAlgo_t& algorithm) {
  uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_MASK;
  size_t written = 0;
  if (cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                           &scheme, sizeof scheme,
                                           &written) != CUBLAS_STATUS_SUCCESS) {
    return CUBLASLT_REDUCTION_SCHEME_MASK;
  }
  return scheme;
}

bool splits_safely(int32_t splits, int64_t k) {
  return splits <= 1 || k % splits == 0 || k / splits % 32 != 0;
}

template <typename V>
void configure(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
               const V& v) {
  NF_CUBLAS(cublasLtMatmulAlgoConfigSetAttribute(&algorithm, attribute, &v, sizeof v));
}

// Up to `count` algorithms of these ways to add up parts of K, as cuBLASLt orders them.
std::vector<Candidate> ask(cublasLtHandle_t handle, const Plan& plan, const Matmul& p, int device,
                           uint32_t reductions, int count) {
  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace(device));
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b.q));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a.q));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.d));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.d));
  std::vector<cublasLtMatmulHeuristicResult_t> results(count);
  int found = 0;
  if (cublasLtMatmulAlgoGetHeuristic(handle, plan.descriptor.value, plan.a.value, plan.b.value,
                                     plan.d.value, plan.d.value, preference.value, count,
                                     results.data(), &found) != CUBLAS_STATUS_SUCCESS) {
    found = 0;
  }
  std::vector<Candidate> candidates;
  for (int i = 0; i < found; ++i) {
    if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
    candidates.push_back({results[i].algo, results[i].workspaceSize});
  }
  return candidates;
}

bool among(const Candidate& candidate, const std::vector<Candidate>& known) {
  return std::any_of(known.begin(), known.end(), [&](const Candidate& k) {
    return std::memcmp(&k.algorithm, &candidate.algorithm, sizeof k.algorithm) == 0;
  });
}

}  // namespace

void check_cublas(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(message("narrowfloat: ", what,
                                   " failed: ", cublasLtGetStatusString(status), " (cuBLASLt ",
                                   cublasLtGetVersion(), ")"));
}
Key key_of(const Matmul& p) {
  return {p.b.rows,
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
          p.b.k_first | (p.alpha != nullptr) << 1 | (p.c != nullptr) << 2 | p.a.k_first << 3 |
              (p.b.scale != nullptr) << 4 | static_cast<int32_t>(mode_of(p.b)) << 8 |
              static_cast<int32_t>(mode_of(p.a)) << 12};
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

Plan::Plan(const Matmul& p)
    : a(data_type(p.b.format), p.b.k_first ? p.b.rows : p.k, p.b.k_first ? p.k : p.b.rows, p.b.ld),
      b(data_type(p.a.format), p.a.k_first ? p.a.rows : p.k, p.a.k_first ? p.k : p.a.rows, p.a.ld),
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

void Plan::set_pointers(const Matmul& p) {
  if (p.b.scale) {
    descriptor.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale);
    descriptor.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale);
  }
  if (p.bias) descriptor.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
}

cublasStatus_t Plan::launch(cublasLtHandle_t handle, const Matmul& p, const Candidate& candidate,
                            void* workspace, cudaStream_t stream) const {
  const float one = 1.f, own_beta = p.accumulate ? 1.f : 0.f;
  const float *alpha = p.alpha ? p.alpha : &one, *beta = p.alpha ? p.alpha + 1 : &own_beta;
  return cublasLtMatmul(handle, descriptor.value, alpha, p.b.q, a.value, p.a.q, b.value, beta,
                        p.c ? p.c : p.d, d.value, p.d, d.value, &candidate.algorithm, workspace,
                        candidate.workspace, stream);
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  NF_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

size_t most_workspace(int device) {
  return size_t{device_of(device).capability >= 90 ? 32u : 4u} << 20;
}

bool takes(cublasLtHandle_t handle, const Plan& plan, Candidate& candidate, int device) {
  cublasLtMatmulHeuristicResult_t result;
  if (cublasLtMatmulAlgoCheck(handle, plan.descriptor.value, plan.a.value, plan.b.value,
                              plan.d.value, plan.d.value, &candidate.algorithm,
                              &result) != CUBLAS_STATUS_SUCCESS ||
      result.workspaceSize > most_workspace(device)) {
    return false;
  }
  candidate.workspace = result.workspaceSize;
  return true;
}

Offer candidates_for(cublasLtHandle_t handle, const Plan& plan, const Matmul& p, int device,
                     int most) {
  constexpr uint32_t kInFp32 = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // or not in parts at all
  constexpr int kAsked = 8;
  Offer offer;
  const std::vector<Candidate> first = ask(handle, plan, p, device, kInFp32, kAsked);
  std::string splits;
  for (const Candidate& c : first) {
    const int32_t number = splits_of(c.algorithm);
    if (!splits_safely(number, p.k)) {
      splits += message(splits.empty() ? "" : ", ", number);
    } else if (static_cast<int>(offer.safe.size()) < most) {
      offer.safe.push_back(c);
    }
  }
  for (Candidate whole : first) {  // the first that runs without its split
    if (!offer.safe.empty()) break;
    configure(whole.algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, int32_t{1});
    configure(whole.algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
              static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
    if (takes(handle, plan, whole, device)) offer.safe.push_back(whole);
  }
  if (offer.safe.empty()) {
    throw std::runtime_error(
        message("narrowfloat: cuBLASLt offers no algorithm for ", describe(p),
                splits.empty() ? "" : " but those that split K unsafely, into ", splits,
                ". CUBLASLT_LOG_LEVEL=5 makes it say why"));
  }
  offer.offered = static_cast<int>(first.size());
  if (most == 1) return offer;
  for (const Candidate& c : ask(handle, plan, p, device, CUBLASLT_REDUCTION_SCHEME_MASK, most)) {
    if (among(c, first)) continue;
    ++offer.offered;
    const bool safe =
        splits_safely(splits_of(c.algorithm), p.k) && (reduction_of(c.algorithm) & ~kInFp32) == 0;
    if (safe && static_cast<int>(offer.safe.size()) < most) offer.safe.push_back(c);
  }
  return offer;
}

}  // namespace narrowfloat
