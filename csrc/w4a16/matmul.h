// What a product with packed FP4 weights is: the structs between host and kernels, no torch
// headers. packed.cuh says how the weights lie.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "quantize/tensor.h"

namespace narrowfloat {

constexpr int64_t kFewTokens = 64;  // at most, of fp4_few_tokens

// y [M,N] = scale (x [M,K] w [N,K]^T) + bias, summed in fp32, one rounding.
struct FP4Matmul {
  const void* x;          // [M, K] bf16, row-major
  int64_t x_stride;       // elements from row to row
  const uint8_t* packed;  // [ceil(N/32), ceil(K/128), 2304], 16-byte aligned
  int64_t m, n, k;        // for fp4_few_tokens 1 to kFewTokens tokens; sizes 0 too
  const float* scale;     // on the device, one element
  const void* bias;       // [N] or null
  Real bias_type;
  void* y;  // [M, N] contiguous
  Real y_type;
  // The weights may be read before the launch that precedes in the stream has ended. That needs
  // more than stream order: what wrote them must have ended before any launch that can still be
  // running then. Weights that were made, and waited for, before inference began are so. With false
  // everything is read in stream order.
  bool constant;
};

// What a plan depends on beside the problem.
struct FP4Device {
  int multiprocessors;
  int shared_bytes;  // at most, a block
  int clusters[4];   // of 1, 2, 4, 8 blocks, that run at once; 0: none
  bool overlaps;     // a launch may start while the one before ends
};

// One launch.
struct FP4Plan {
  int groups;      // of 8 tokens: 1, 2, 4, 8
  int warp_tiles;  // 0: blocks hold x; 1, 2: x streams by, a warp has so many times 32 rows
  int warps;       // a block
  int split;       // blocks of a cluster, which share K: 1, 2, 4, 8
  int row_groups;  // a tile's, of 32 rows, or of a warp's; at most `warps`. 1, 2, 4, 8 and at most
                   // `split` where x is held; else warps / row_groups is a power of two
  int slab;        // units of K: where x is held, those whose x lies in shared memory; else a stage
  int stages;      // where x streams: slabs on their way or in use, 2 to 5
  int blocks;      // a multiple of `split`
  int shared_bytes;
  double cost;  // estimated, in microseconds
};

FP4Device fp4_device(int device);
// The cheapest plan for `tokens` (1 to kFewTokens) of the problem.
FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k);
// A plan of this shape; cost is infinite where there is none.
FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, int warp_tiles,
                 int warps, int split, int row_groups);

// Launches on `stream`, of the current device, which is `device`. No host synchronization, no
// memory beside; deterministic.
void fp4_few_tokens(const FP4Matmul& job, int device, cudaStream_t stream);
// With a plan for job.m tokens, at least one.
void fp4_few_tokens(const FP4Matmul& job, const FP4Plan& plan, int device, cudaStream_t stream);

// For a bf16 product with many tokens: operand [roundup(N, 32), roundup(K, 128)] bf16 = code x
// block scale, exact, zeros beyond N and K; alpha, if not null, = {*scale, 0}. Nothing where N or K
// is 0.
void fp4_unpack(const uint8_t* packed, int64_t n, int64_t k, void* operand, const float* scale,
                float* alpha, cudaStream_t stream);

}  // namespace narrowfloat
