// Tensors to FP8 by rows or blocks: both orientations from one read, as a block of scales lies
// within a tile.
#include "api/check.h"
#include "quantize/block_tile.cuh"

namespace narrowfloat {
namespace {

constexpr uint32_t kInf = 0x7f800000u, kNan = 0x7fc00000u;
constexpr int kMxBlocks = kTile / static_cast<int>(kMxBlock);

template <typename T>
struct Shared {
  uint32_t tile[TileLayout<T>::kWords];
  // maxima of a warp's 16 rows in each column, as words lie; later partial sums
  uint32_t column_max[kBlockWarps][kTile * sizeof(T) / 4];
  uint32_t row_max[kMxBlocks][kTile + 1];  // of 32 neighbours, as bits of fp32
  uint32_t warp_max[kBlockWarps];
  float multiplier[2][kMxBlocks][kTile + 4];  // of each side; the first alone where one a row
};

enum class Out { e4m3, e5m2, operand, plain };
template <Out O>
constexpr int kRunBytes = O == Out::operand || O == Out::plain ? 2 * kRun : kRun;

__device__ inline bool needs_tile_amax(const BlockSide& side) {
  return side.form != Form::none && side.scaling > Scaling::row;
}

__device__ inline int inside(int64_t size, int64_t first) {
  return static_cast<int>(max(int64_t{0}, min(size - first, int64_t{kTile})));
}

// Maxima of a tile: of 32 neighbours in a row, of 16 in a column, of 16 rows. A thread takes a run
// of four rows.
template <typename T>
__device__ inline void tile_amax(Shared<T>& s) {
  constexpr int kWords = Run<T>::kWords;
  const int run = threadIdx.x % kRuns, row = threadIdx.x / kRuns * 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t column[kWords] = {}, all = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Run<T> v(s.tile, row + i, run);
    uint32_t m = 0;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      m = max_magnitude<T>(m, v.w[k]);
      column[k] = max_magnitude<T>(column[k], v.w[k]);
    }
    uint32_t bits = magnitude_of<T>(m);
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
    if (run % 2 == 0) s.row_max[run / 2][row + i] = bits;
    all = max(all, bits);
  }
  all = __reduce_max_sync(0xffffffffu, all);
  if (lane == 0) s.warp_max[warp] = all;
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    column[k] = max_magnitude<T>(column[k], __shfl_xor_sync(0xffffffffu, column[k], 8));
    column[k] = max_magnitude<T>(column[k], __shfl_xor_sync(0xffffffffu, column[k], 16));
  }
  if (lane < kRuns) {
    auto* to = reinterpret_cast<uint4*>(s.column_max[warp] + lane * kWords);
#pragma unroll
    for (int k = 0; k < kWords; k += 4) {
      to[k / 4] = make_uint4(column[k], column[k + 1], column[k + 2], column[k + 3]);
    }
  }
}

// Of a column's rows from 16 * first on, as bits of fp32.
template <typename T>
__device__ inline uint32_t column_max(const Shared<T>& s, int column, int first, int count) {
  uint32_t m = 0;
  for (int i = first; i < first + count; ++i) {
    if constexpr (sizeof(T) == 4) {
      m = max(m, s.column_max[i][column]);
    } else {
      m = max(m, uint32_t{reinterpret_cast<const uint16_t*>(s.column_max[i])[column]});
    }
  }
  return magnitude_of<T>(m);
}

// The scale as a power of two >= amax / 448, biased; 448 is 1.75 x 2^8, so what is above carries.
// The smallest lets every code x scale be a bf16.
__device__ inline uint32_t exponent_of(uint32_t amax) {
  return static_cast<uint32_t>(max((static_cast<int>(amax + 0x1fffffu) >> 23) - 8, 3));
}

struct Place {  // of a tile, in tiles
  uint32_t row, column;
};

// A thread a row of a side: its multipliers into shared memory, its scales to where they go.
template <typename T>
__device__ inline void choose_scales(const BlockQuantizeParams& p, Shared<T>& s, Place at) {
  const int which = threadIdx.x / kTile, i = threadIdx.x % kTile;
  const BlockSide& side = p.job.side[which];
  if (side.form == Form::none || side.scaling == Scaling::none) return;
  const uint32_t down = which ? at.column : at.row, along = which ? at.row : at.column;
  const int64_t size = which ? p.job.rows : p.job.cols, first = int64_t{down} * kTile;
  const int64_t rows = which ? p.job.cols : p.job.rows, padded_rows = p.padded_rows[which];
  const bool writes = side.form == Form::codes;
  if (side.scaling == Scaling::mx) {
    const int row = i % 4 * 32 + i / 4;  // whose four bytes are the i-th word
    uint32_t word = 0;
#pragma unroll 1
    for (int b = 0; b < kMxBlocks; ++b) {
      const uint32_t amax = which ? column_max(s, row, 2 * b, 2) : s.row_max[b][row];
      const bool finite = amax < kInf;
      const uint32_t e = exponent_of(amax);
      s.multiplier[which][b][row] = __uint_as_float(finite ? (254 - e) << 23 : kNan);
      const bool there =
          first + row < rows && int64_t{along} * kTile + b * static_cast<int>(kMxBlock) < size;
      if (there) word |= (finite ? e : 0xffu) << (8 * b);
    }
    if (writes && rows > 0 && size > 0) {
      const int64_t across = (size + kTile - 1) / kTile;
      static_cast<uint32_t*>(side.scales)[(down * across + along) * (kMxTileBytes / 4) + i] = word;
    }
    return;
  }
  uint32_t amax = 0;
  if (side.scaling == Scaling::row) {
    if (first + i < rows) amax = side.amax[first + i];
  } else if (side.square) {
#pragma unroll
    for (int k = 0; k < kBlockWarps; ++k) amax = max(amax, s.warp_max[k]);
  } else if (which) {
    amax = column_max(s, i, 0, kBlockWarps);
  } else {
#pragma unroll
    for (int k = 0; k < kMxBlocks; ++k) amax = max(amax, s.row_max[k][i]);
  }
  float2 scale;  // and multiplier
  if (side.scaling == Scaling::pow2) {
    const uint32_t e = exponent_of(amax);
    scale = make_float2(__uint_as_float(amax < kInf ? e << 23 : kNan),
                        __uint_as_float(amax < kInf ? (254 - e) << 23 : kNan));
  } else {
    scale = scale_from_amax(amax, side.element);
  }
  s.multiplier[which][0][i] = scale.y;
  if (!writes) return;
  auto* to = static_cast<float*>(side.scales);
  if (side.scaling == Scaling::row) {
    if (along == 0 && first + i < padded_rows) to[first + i] = first + i < rows ? scale.x : 1.f;
  } else if (size == 0) {
    return;
  } else if (!side.square) {
    if (first + i < padded_rows) {
      to[along * padded_rows + first + i] = first + i < rows ? scale.x : 1.f;
    }
  } else if (rows > 0) {  // the last writes what is beyond it
    const int64_t across = (size + kTile - 1) / kTile, ld = (across + 3) / 4 * 4;
    if (i == 0) to[down * ld + along] = scale.x;
    if (i > 0 && along + 1 == across && along + i < ld) to[down * ld + along + i] = 0.f;
  }
}

// A run of a block that has a NaN multiplier: `valid` NaN, then zeros.
template <Out O>
__device__ inline void store_nan(void* to, int valid) {
  for (int i = 0; i < kRun; ++i) {
    if constexpr (kRunBytes<O> == kRun) {
      constexpr Element E = O == Out::e5m2 ? Element::e5m2 : Element::e4m3;
      const uint32_t nan = encode4<E>(__uint_as_float(kNan), 0.f, 0.f, 0.f);
      static_cast<uint8_t*>(to)[i] = i < valid ? static_cast<uint8_t>(nan) : 0;
    } else {
      static_cast<uint16_t*>(to)[i] = i < valid ? 0x7fc0 : 0;
    }
  }
}

// Two e4m3 codes times a power of two, exact as bf16.
__device__ inline uint32_t dequantized(uint32_t codes, float scale) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(codes), __NV_E4M3);
  const float2 f = __half22float2(__half2(raw));
  return __byte_perm(__float_as_uint(f.x * scale), __float_as_uint(f.y * scale), 0x7632);
}

__device__ inline uint32_t rounded(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

template <Out O>
__device__ inline void store_rounded(void* to, const float (&x)[kRun], float multiplier) {
  constexpr Element E = O == Out::e5m2 ? Element::e5m2 : Element::e4m3;
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    w[i] = encode4<E>(x[4 * i] * multiplier, x[4 * i + 1] * multiplier, x[4 * i + 2] * multiplier,
                      x[4 * i + 3] * multiplier);
  }
  if constexpr (O == Out::operand) {
    const float scale = __uint_as_float(0x7f000000u - __float_as_uint(multiplier));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      static_cast<uint4*>(to)[i] =
          make_uint4(dequantized(w[2 * i], scale), dequantized(w[2 * i] >> 16, scale),
                     dequantized(w[2 * i + 1], scale), dequantized(w[2 * i + 1] >> 16, scale));
    }
  } else {
    *static_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// With the largest power of two, 2^120, the code 256 would be 2^128, which neither fp32 nor bf16
// has: values saturate at 240 x 2^120. No other multiplier is as small but that of an Inf, 0.
constexpr float kLeastMultiplier = 0x1p-120f, kLargest = 240 * 0x1p120f;

// A run of a block with a multiplier that is NaN, 0 or kLeastMultiplier: apart, so that the usual
// way stays short.
template <Out O>
__device__ __noinline__ void store_special(void* to, const float* from, float multiplier, bool mx,
                                           int valid) {
  if (multiplier != multiplier) {
    store_nan<O>(to, mx && O != Out::operand ? 0 : valid);
    return;
  }
  float x[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    x[i] = multiplier == 0.f ? from[i] : fminf(fmaxf(from[i], -kLargest), kLargest);
  }
  store_rounded<O>(to, x, multiplier);
}

// valid: of the run's elements, those inside the matrix.
template <Out O>
__device__ inline void store_run(void* to, const float (&x)[kRun], float multiplier, bool mx,
                                 int valid) {
  if constexpr (O == Out::plain) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      static_cast<uint4*>(to)[i] =
          make_uint4(rounded(x[8 * i], x[8 * i + 1]), rounded(x[8 * i + 2], x[8 * i + 3]),
                     rounded(x[8 * i + 4], x[8 * i + 5]), rounded(x[8 * i + 6], x[8 * i + 7]));
    }
  } else if (multiplier > kLeastMultiplier) {
    store_rounded<O>(to, x, multiplier);
  } else {
    float copy[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) copy[i] = x[i];
    store_special<O>(to, copy, multiplier, mx, valid);
  }
}

// A tile's rows: a thread the same run of every 32nd.
template <typename T, Out O>
__device__ inline void write_rows(const BlockQuantizeParams& p, const Shared<T>& s, int64_t r0,
                                  int64_t c0) {
  const int run = threadIdx.x % kRuns, valid = inside(p.job.cols, c0 + run * kRun);
  const int rows = c0 + run * kRun < p.ld[0] ? inside(p.padded_rows[0], r0) : 0;
  const int real_rows = inside(p.job.rows, r0);
  const bool mx = p.job.side[0].scaling == Scaling::mx;
  const float* multiplier = s.multiplier[0][mx ? run / 2 : 0];
  auto* to = static_cast<uint8_t*>(p.job.side[0].data) +
             ((r0 + threadIdx.x / kRuns) * p.ld[0] + c0) * (kRunBytes<O> / kRun) +
             run * kRunBytes<O>;
  const int64_t step = kRowsAtOnce * p.ld[0] * (kRunBytes<O> / kRun);
#pragma unroll 1
  for (int row = threadIdx.x / kRuns; row < rows; row += kRowsAtOnce, to += step) {
    const Run<T> v(s.tile, row, run);
    float x[kRun];
    v.values(x);
    store_run<O>(to, x, multiplier[row], mx, row < real_rows ? valid : 0);
  }
}

// A tile's columns: a thread the same run of two neighbouring ones.
template <typename T, Out O>
__device__ inline void write_columns(const BlockQuantizeParams& p, const Shared<T>& s, int64_t r0,
                                     int64_t c0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, run = lane / 4;
  const int valid = inside(p.job.rows, r0 + run * kRun);
  const int columns = r0 + run * kRun < p.ld[1] ? inside(p.padded_rows[1], c0) : 0;
  const int real_columns = inside(p.job.cols, c0);
  const bool mx = p.job.side[1].scaling == Scaling::mx;
  const float* multiplier = s.multiplier[1][mx ? run / 2 : 0];
#pragma unroll 1
  for (int pair = warp * 4 + lane % 4; 2 * pair < columns; pair += kTile / 4) {
    const uint32_t* from = s.tile + column_word<T>(run * kRun, pair);
    float x[2][kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float2 f = column_pair<T>(from + i * TileLayout<T>::kRowWords);
      x[0][i] = f.x, x[1][i] = f.y;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 2 * pair + half;
      auto* to = static_cast<uint8_t*>(p.job.side[1].data) +
                 ((c0 + column) * p.ld[1] + r0) * (kRunBytes<O> / kRun) + run * kRunBytes<O>;
      store_run<O>(to, x[half], multiplier[column], mx, column < real_columns ? valid : 0);
    }
  }
}

template <int kSide, Out O, typename T>
__device__ inline void write(const BlockQuantizeParams& p, const Shared<T>& s, int64_t r0,
                             int64_t c0) {
  if constexpr (kSide == 0) {
    write_rows<T, O>(p, s, r0, c0);
  } else {
    write_columns<T, O>(p, s, r0, c0);
  }
}

// Of the loops in here a launch runs one: the others cost no room in the instruction cache.
template <int kSide, typename T>
__device__ inline void write_side(const BlockQuantizeParams& p, const Shared<T>& s, int64_t r0,
                                  int64_t c0) {
  const BlockSide& side = p.job.side[kSide];
  if (side.form == Form::none) return;
  if (side.form == Form::codes) {
    if (side.element == Element::e4m3) {
      write<kSide, Out::e4m3>(p, s, r0, c0);
    } else {
      write<kSide, Out::e5m2>(p, s, r0, c0);
    }
  } else if (side.scaling == Scaling::none) {
    write<kSide, Out::plain>(p, s, r0, c0);
  } else {
    write<kSide, Out::operand>(p, s, r0, c0);
  }
}

// Sums of a tile's columns into its row of tiles' partials.
template <typename T>
__device__ inline void sum_columns(const BlockQuantizeParams& p, Shared<T>& s, Place at) {
  constexpr int kPairs = kTile / 2, kParts = kBlockThreads / kPairs, kRows = kTile / kParts;
  auto* partial = reinterpret_cast<float*>(s.column_max);
  const int pair = threadIdx.x % kPairs, part = threadIdx.x / kPairs;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll 8
  for (int i = 0; i < kRows; ++i) {
    const float2 f = column_pair<T>(s.tile + column_word<T>(part * kRows + i, pair));
    sum.x += f.x, sum.y += f.y;
  }
  partial[part * kTile + 2 * pair] = sum.x;
  partial[part * kTile + 2 * pair + 1] = sum.y;
  __syncthreads();
  const int64_t c = int64_t{at.column} * kTile + threadIdx.x;
  if (threadIdx.x < kTile && c < p.job.cols) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) total += partial[i * kTile + threadIdx.x];
    p.sum_partials[at.row * p.job.cols + c] = total;
  }
}

// Tiles spread over a persistent grid. One tile a block in shared memory and more blocks were 2 %
// faster on an H200 than two tiles, of which one is on its way.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads, block_blocks_per_sm(sizeof(T)))
    narrowfloat_block_quantize(const __grid_constant__ BlockQuantizeParams p) {
  extern __shared__ __align__(16) unsigned char launch_shared[];
  Shared<T>& s = *reinterpret_cast<Shared<T>*>(launch_shared);
  const uint32_t tiles = p.row_tiles * p.col_tiles;
  const bool reduces = needs_tile_amax(p.job.side[0]) || needs_tile_amax(p.job.side[1]);
  for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Place at{t / p.col_tiles, t % p.col_tiles};
    const int64_t r0 = int64_t{at.row} * kTile, c0 = int64_t{at.column} * kTile;
    load_tile<T>(p.job, p.aligned, r0, c0, s.tile);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    if (reduces) {
      tile_amax(s);
      __syncthreads();
    }
    choose_scales(p, s, at);
    __syncthreads();
    write_side<0>(p, s, r0, c0);
    write_side<1>(p, s, r0, c0);
    if (p.sum_partials) sum_columns(p, s, at);
    __syncthreads();
  }
}

template <typename T>
void launch(const BlockQuantizeParams& params, int blocks, cudaStream_t stream) {
  auto* kernel = narrowfloat_block_quantize<T>;
  constexpr int kBytes = sizeof(Shared<T>);
  NF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  kernel<<<blocks, kBlockThreads, kBytes, stream>>>(params);
  NF_CUDA(cudaGetLastError());
}

}  // namespace

void launch_block_quantize(const BlockQuantizeParams& params, int blocks, cudaStream_t stream) {
  with_type(params.job.type, [&](auto t) { launch<decltype(t)>(params, blocks, stream); });
}

}  // namespace narrowfloat
