// How a tile that becomes FP8 lies in shared memory, in its own type: how it comes, how it
// is read.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "quantize/block_kernels.h"
#include "quantize/kernels.cuh"

namespace narrowfloat {

constexpr int kTile = static_cast<int>(kBlock);
constexpr int kRun = 16;             // elements a thread has of a row or of a column
constexpr int kRuns = kTile / kRun;  // of a row of a tile
constexpr int kLanesOfRow = kRuns;   // a thread a run
constexpr int kRowsAtOnce = kBlockThreads / kLanesOfRow;

// A unit is 16 bytes. Units of a row are swapped so that eight lanes on the runs of a row meet no
// bank twice; sixteen rows further lie `kSkew` words on, for lanes on eight runs of rows and four
// pairs of columns.
template <typename T>
struct TileLayout {
  static constexpr int kPerUnit = 16 / static_cast<int>(sizeof(T));
  static constexpr int kUnits = kTile / kPerUnit;
  static constexpr int kRowWords = kUnits * 4;
  static constexpr int kSkew = sizeof(T) == 2 ? 4 : 8;
  static constexpr int kWords = kTile * kRowWords + kRuns * kSkew;

  __device__ static int word(int row, int unit) {
    return row * kRowWords + row / kRun * kSkew + (unit ^ unit >> 3) * 4;
  }
};

// Any strides. What is not the usual way is kept small and apart.
template <typename T>
__device__ __noinline__ void load_slowly(const BlockJob& job, int64_t r0, int64_t c0,
                                         uint32_t* tile) {
  using L = TileLayout<T>;
  constexpr int kRows = kBlockThreads / L::kUnits;
  const int unit = threadIdx.x % L::kUnits;
  const int64_t c = c0 + unit * L::kPerUnit;
#pragma unroll 1
  for (int row = threadIdx.x / L::kUnits; row < kTile; row += kRows) {
    const int64_t r = r0 + row;
    const T* from = static_cast<const T*>(job.x) + r * job.row_stride + c * job.col_stride;
    uint32_t w[4] = {};
#pragma unroll
    for (int i = 0; i < L::kPerUnit; ++i) {
      if (r < job.rows && c + i < job.cols) {
        if constexpr (sizeof(T) == 4) {
          w[i] = __float_as_uint(from[i * job.col_stride]);
        } else {
          w[i / 2] |= bits_of(from + i * job.col_stride) << (16 * (i % 2));
        }
      }
    }
    *reinterpret_cast<uint4*>(tile + L::word(row, unit)) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// Starts to bring a tile, zeros outside of the matrix. One that is wholly inside is copied without
// looking at bounds.
template <typename T>
__device__ inline void load_tile(const BlockJob& job, bool aligned, int64_t r0, int64_t c0,
                                 uint32_t* tile) {
  if (!aligned) {
    load_slowly<T>(job, r0, c0, tile);
    return;
  }
  using L = TileLayout<T>;
  constexpr int kRows = kBlockThreads / L::kUnits;  // at once
  constexpr int kSteps = kTile / kRows;
  const int row = threadIdx.x / L::kUnits, unit = threadIdx.x % L::kUnits;
  const int64_t c = c0 + unit * L::kPerUnit;
  const T* from = static_cast<const T*>(job.x) + (r0 + row) * job.row_stride + c;
  const int64_t step = kRows * job.row_stride;
  if (r0 + kTile <= job.rows && c0 + kTile <= job.cols) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i, from += step) {
      __pipeline_memcpy_async(tile + L::word(row + i * kRows, unit), from, 16);
    }
    return;
  }
  const int64_t left = job.cols - c;
  const int bytes =
      left <= 0 ? 0
                : min(static_cast<int>(min(left, int64_t{16})) * static_cast<int>(sizeof(T)), 16);
#pragma unroll 1
  for (int i = 0; i < kSteps; ++i, from += step) {
    const int valid = r0 + row + i * kRows < job.rows ? bytes : 0;
    __pipeline_memcpy_async(tile + L::word(row + i * kRows, unit),
                            valid ? static_cast<const void*>(from) : job.x, 16, 16 - valid);
  }
}

// A run of a row in words as they lie.
template <typename T>
struct Run {
  static constexpr int kWords = kRun * static_cast<int>(sizeof(T)) / 4;
  uint32_t w[kWords];

  __device__ Run(const uint32_t* tile, int row, int run) {
    constexpr int kUnits = kWords / 4;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const uint4 q =
          *reinterpret_cast<const uint4*>(tile + TileLayout<T>::word(row, run * kUnits + i));
      w[4 * i] = q.x, w[4 * i + 1] = q.y, w[4 * i + 2] = q.z, w[4 * i + 3] = q.w;
    }
  }

  __device__ void values(float (&x)[kRun]) const {
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      float2 f;
      if constexpr (sizeof(T) == 4) {
        f = make_float2(__uint_as_float(w[2 * i]), __uint_as_float(w[2 * i + 1]));
      } else {
        f = pair_to_float(w[i], T());
      }
      x[2 * i] = f.x, x[2 * i + 1] = f.y;
    }
  }
};

// Two neighbouring columns of one row.
template <typename T>
__device__ inline float2 column_pair(const uint32_t* at) {
  if constexpr (sizeof(T) == 4) {
    const uint2 w = *reinterpret_cast<const uint2*>(at);
    return make_float2(__uint_as_float(w.x), __uint_as_float(w.y));
  } else {
    return pair_to_float(*at, T());
  }
}

// The word at which columns 2 * pair and the next lie in `row`.
template <typename T>
__device__ inline int column_word(int row, int pair) {
  using L = TileLayout<T>;
  constexpr int kPairs = L::kPerUnit / 2;  // in a unit
  return L::word(row, pair / kPairs) + pair % kPairs * (static_cast<int>(sizeof(T)) / 2);
}

// Magnitudes of neighbours, in words as they lie: 16-bit ones two a word. They order as the numbers
// do, with NaN above Inf.
template <typename T>
__device__ inline uint32_t max_magnitude(uint32_t m, uint32_t w) {
  if constexpr (sizeof(T) == 4) {
    return max(m, w & 0x7fffffffu);
  } else {
    using Pair = decltype(zero_pair(T()));
    const Pair r = __hmax2_nan(*reinterpret_cast<const Pair*>(&m),
                               __habs2(*reinterpret_cast<const Pair*>(&w)));
    return *reinterpret_cast<const uint32_t*>(&r);
  }
}

// The larger magnitude of a word, as the bits of its fp32.
template <typename T>
__device__ inline uint32_t magnitude_of(uint32_t m) {
  if constexpr (sizeof(T) == 4) {
    return m;
  } else {
    const float2 f = pair_to_float(m, T());
    return max(magnitude_bits(f.x), magnitude_bits(f.y));
  }
}

}  // namespace narrowfloat
