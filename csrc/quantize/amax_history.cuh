// When a delayed scale does for a call, and what the call leaves in the amax history.
// reference/delayed.py says the same.
#pragma once

#include <cstdint>

#include "quantize/tensor.h"

namespace narrowfloat {

// The amax that the scale of a tensor's history covers; 0 where it says nothing.
__device__ inline float covered_by(const History& history) {
  const float covered = __ldcg(history.row);
  const uint32_t mark = __float_as_uint(__ldcg(history.row + 2));
  return mark == (kHistoryMark ^ __float_as_uint(covered)) ? covered : 0.f;
}

// Does a scale for `covered` do for a tensor with this amax?
__device__ inline bool holds(const History& history, float covered, uint32_t amax_bits) {
  return covered > 0.f && amax_bits < 0x7f800000u &&
         (!history.guarded || __uint_as_float(amax_bits) <= covered);
}

// Counts a call's amax for the scales to come, by one thread a launch. What has an Inf or a NaN
// does not count: its step is skipped. Another launch may count at the same time.
__device__ inline void join(const History& history, uint32_t amax_bits) {
  if (!history.joins || amax_bits >= 0x7f800000u) return;
  float* const row = history.row;
  if (__float_as_uint(row[2]) == (kHistoryMark ^ __float_as_uint(row[0]))) {
    atomicMax(reinterpret_cast<uint32_t*>(row) + 1, amax_bits);
    return;
  }
  for (int i = 3; i < history.width; ++i) row[i] = 0.f;
  row[1] = __uint_as_float(amax_bits);
  row[0] = 0.f;
  __threadfence();  // a row never looks valid before it is
  row[2] = __uint_as_float(kHistoryMark);
}

}  // namespace narrowfloat
