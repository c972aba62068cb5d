// What a GEMM is to the rest of the code. cublaslt.cpp, plan.cpp and tune.cpp
// are the only callers of cuBLASLt.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "quantize/tensor.h"

namespace narrowfloat {

// What an operand's scales are, by cuBLASLt's own numbers.
enum class ScaleMode : int {
  tensor = 0,       // fp32
  vec16_ue4m3 = 1,  // of e2m1: bytes of 16 neighbours, in 128x4 tiles
  vec32_ue8m0 = 2,  // bytes of 32 neighbours, in 128x4 tiles
  row = 3,          // fp32 [rows]
  vec128 = 4,       // fp32 [k/128, rows]
  square128 = 5,    // fp32 [rows/128, k/128 up to a multiple of 4]; not on both sides
};

// An operand [rows, k], k contracted.
struct Operand {
  const void* q;
  int64_t rows;
  int64_t ld;  // elements from row to row, a multiple of 16 bytes
  Element format;
  // On the device, 16-byte aligned, as `mode` has them; null: 1. bf16: none.
  const void* scale;
  bool k_first = false;                // stored [k, rows], ld from k to k + 1; bf16 only
  ScaleMode mode = ScaleMode::tensor;  // of FP8; e2m1 has one of its own
};

// d [M,N] = alpha a.scale b.scale (a [M,K] b [N,K]^T) + bias, row-major, summed in fp32.
struct Matmul {
  Operand a, b;
  int64_t k;  // a multiple of 16, of 32 for e2m1, any for bf16
  void* d;
  Real d_type;
  int64_t ldd;         // elements; ldd * size is a multiple of 16
  const void* bias;    // [N] in epilogue_bias_type(d_type), or null
  const float* alpha;  // on the device, {alpha, 0}; null: 1
  void* c;             // of d's size, where cuBLASLt wants one that is not d; null: d
  bool fast;           // FAST_ACCUM; not with blocks of 128
  bool accumulate;     // d += instead of d =
};

// What cuBLASLt's BIAS epilogue takes for an output type: fp16 for fp16, else bf16.
inline Real epilogue_bias_type(Real d_type) { return d_type == Real::f16 ? Real::f16 : Real::bf16; }

// How much workspace the GEMM needs, once its algorithm is chosen, which happens here the first
// time. Of the pointers in `problem` only the alignment matters. Throws with the whole problem
// where the library refuses it.
int64_t workspace_for(const Matmul& problem, int device, cudaStream_t stream);

// Does this version of the library have a GEMM of FP4 operands on chips of this capability
// (major x 10 + minor)? On this device?
bool has_fp4(int capability, int64_t version);
bool has_fp4(int device);

// Launches on `stream`. workspace: 256-byte aligned, workspace_for(problem), needed until the
// stream passes the call.
void matmul(const Matmul& problem, void* workspace, int device, cudaStream_t stream);

int64_t cublaslt_version();

struct PlanCacheCounters {
  int64_t hits, misses;
};
PlanCacheCounters plan_cache_counters();  // over all threads

}  // namespace narrowfloat
