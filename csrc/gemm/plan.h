// What a plan of a GEMM is: what chooses its algorithm, and which ones there are.
// Private to the callers of cuBLASLt.
#pragma once

#include <cublasLt.h>

#include <cstring>
#include <string>
#include <vector>

#include "api/check.h"
#include "gemm/cublaslt.h"

namespace narrowfloat {

void check_cublas(cublasStatus_t status, const char* what);
#define NF_CUBLAS(call) check_cublas((call), #call)

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

struct Event {
  cudaEvent_t value = nullptr;
  Event() { NF_CUDA(cudaEventCreate(&value)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(value); }
};

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

Key key_of(const Matmul& problem);
std::string describe(const Matmul& problem);

// An algorithm, and the bytes that it needs beside.
struct Candidate {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

// A GEMM ready for launching, but for its pointers.
struct Plan {
  Descriptor descriptor;
  Layout a, b, d;
  Candidate chosen{};
  bool to_measure = false;  // at its next launch, whose workspace is most_workspace()
  bool measured = false;
  int64_t choices_seen = -1;  // how many had been measured or loaded when `chosen` was looked up

  explicit Plan(const Matmul& p);
  void set_pointers(const Matmul& p);
  cublasStatus_t launch(cublasLtHandle_t handle, const Matmul& p, const Candidate& candidate,
                        void* workspace, cudaStream_t stream) const;
};

// What an algorithm may ask for, by NVIDIA's advice 32 MiB from sm90 on and 4 MiB before. It is an
// input to the choice, and so to the bits.
size_t most_workspace(int device);

struct Offer {
  std::vector<Candidate> safe;  // cuBLASLt's favourite first
  int offered = 0;              // those that are not safe too
};

// Up to `most` algorithms that cuBLASLt offers and that are safe; at least one, or it throws with
// the whole problem. Each sums in fp32 and in an order of its own that is always the same: none
// adds up parts of K in the output's type or as they come. With `most` above 1 cuBLASLt is asked a
// second time, without being told so: what it then offers is looked at here.
Offer candidates_for(cublasLtHandle_t handle, const Plan& plan, const Matmul& problem, int device,
                     int most);

// Is this algorithm of another run one for the plan here too? Its workspace then is what it needs.
bool takes(cublasLtHandle_t handle, const Plan& plan, Candidate& candidate, int device);

bool capturing(cudaStream_t stream);

}  // namespace narrowfloat
