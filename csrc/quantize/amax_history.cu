// How amax histories roll on the device: a block a row.
#include "quantize/amax_history.h"

#include <algorithm>

#include "api/check.h"
#include "quantize/numerics.cuh"

namespace narrowfloat {
namespace {

constexpr int kRollThreads = 128;
constexpr int kMostLayers = 448;  // their addresses are a launch's parameters, 4 KB in all
constexpr int kEachThread = kLongestHistory / kRollThreads;

struct RollParams {
  float* layer[kMostLayers];
  HistoryRoll how;
};

__global__ void __launch_bounds__(kRollThreads)
    narrowfloat_roll(const __grid_constant__ RollParams p) {
  __shared__ uint32_t shared[kRollThreads / 32];
  const int layer = static_cast<int>(blockIdx.x) / p.how.rows;
  float* const row = p.layer[layer] +
                     static_cast<int64_t>(static_cast<int>(blockIdx.x) % p.how.rows) * p.how.width;
  const float covered = row[0], open = row[1];
  if (__float_as_uint(row[2]) != (kHistoryMark ^ __float_as_uint(covered)) || open == 0.f) return;

  const int length = p.how.width - kHistoryFirst;
  float value[kEachThread];
  uint32_t largest = __float_as_uint(open);
#pragma unroll
  for (int i = 0; i < kEachThread; ++i) {
    const int at = i * kRollThreads + static_cast<int>(threadIdx.x);
    value[i] = at + 1 < length ? row[kHistoryFirst + at] : 0.f;
    largest = max(largest, __float_as_uint(value[i]));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();  // every value is read, and of the row's beginning too
#pragma unroll
  for (int i = 0; i < kEachThread; ++i) {
    const int at = i * kRollThreads + static_cast<int>(threadIdx.x);
    if (at + 1 < length) row[kHistoryFirst + at + 1] = value[i];
  }
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kRollThreads / 32; ++i) largest = max(largest, shared[i]);
  const float amax = p.how.latest ? open : __uint_as_float(largest);
  const float next = fminf(amax * p.how.factor, kFltMax);
  row[kHistoryFirst] = open;
  row[0] = next;
  row[1] = 0.f;
  row[2] = __uint_as_float(kHistoryMark ^ __float_as_uint(next));
}

}  // namespace

void roll_histories(const std::vector<uintptr_t>& layers, const HistoryRoll& how,
                    cudaStream_t stream) {
  NF_CHECK(
      how.width > kHistoryFirst && how.width <= kHistoryFirst + kLongestHistory && how.rows > 0,
      "step: expected histories of 1 to ", kLongestHistory, " steps, got ",
      how.width - kHistoryFirst);
  for (size_t first = 0; first < layers.size(); first += kMostLayers) {
    RollParams params{};
    params.how = how;
    const size_t count = std::min<size_t>(layers.size() - first, kMostLayers);
    for (size_t i = 0; i < count; ++i) {
      params.layer[i] = reinterpret_cast<float*>(layers[first + i]);
    }
    const int blocks = static_cast<int>(count) * how.rows;
    narrowfloat_roll<<<blocks, kRollThreads, 0, stream>>>(params);
    NF_CUDA(cudaGetLastError());
  }
}

}  // namespace narrowfloat
