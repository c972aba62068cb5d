// How a tile that becomes FP4 lies in shared memory, with all that its block holds there:
// how it comes, how it is read, how its scale bytes leave.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "quantize/fp4_kernels.h"
#include "quantize/fp4_random.cuh"
#include "quantize/fp4_rounding.cuh"

namespace narrowfloat {

constexpr int kTileGroups = kFp4Tile / kGroup;
constexpr int kRowsAtOnce = kFp4Threads / kTileGroups;  // of a tile: a thread a group of a row
constexpr int kRowSteps = kFp4Tile / kRowsAtOnce;
constexpr int kTileWords = kFp4Tile * kFp4Tile / 2 + 4 * kTileGroups;
constexpr int kCodes = 128;  // scale bytes

// Where 16 bytes of a tile's row, eight columns, lie in words of two bf16. The swap in the right
// half lets eight lanes that read every other one meet no bank twice; sixteen rows further is
// another four banks, for lanes on eight groups of rows and four pairs of columns.
__device__ inline int tile_word(int row, int eight) {
  return row * (kFp4Tile / 2) + row / kGroup * 4 + (eight ^ (eight >> 3)) * 4;
}

// The byte of (row, group) in a tile's share of the scales, which is two runs of 512 bytes.
__device__ inline int scale_byte(int row, int group) {
  return group / 4 * 512 + row % 32 * 16 + row / 32 * 4 + group % 4;
}

struct Shared {
  uint32_t tile[2][kTileWords];  // this one and the next, which is on its way
  Factors factors[2][kCodes];
  uint4 scales[2][2][kFp4Tile * kTileGroups / 16];  // of two tiles' sides: bytes, see scale_byte()
  uint4 keys[kPhiloxKeys];
  uint2 stream[2];  // of random bytes, of each side
  SideScale side[2];
  uint32_t
      block[2][kTileGroups * kTileGroups];  // 16 x 16: amax, then scale; this tile's and the next's
  float error[2][kFp4Tile * kTileGroups];   // last: only four over six with 16 x 16 has it
};

// Sixteen neighbours of a row, any strides, as bf16 in eight words.
__device__ inline void load16(const Fp4Job& job, int64_t r, int64_t c, uint32_t (&w)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (r < job.rows && c + 2 * i + j < job.cols) {
        v[j] = within_bf16(
            load_real(job.x, job.type, r * job.row_stride + (c + 2 * i + j) * job.col_stride));
      }
    }
    w[i] = pack_bf16(v[0], v[1]);
  }
}

// A tile's place, in tiles.
struct Spot {
  int row, column;
};

// Brings a tile from bf16, fp16 or fp32, as bf16, to shared memory; zeros outside. What is not the
// usual way is kept small: a tile's code has to fit into the instruction cache.
__device__ __noinline__ void load_slowly(const Fp4Job& job, bool aligned, Spot at, uint32_t* tile) {
  const int group = threadIdx.x % kTileGroups, first_row = threadIdx.x / kTileGroups;
  const int64_t r0 = int64_t{at.row} * kFp4Tile, c = int64_t{at.column} * kFp4Tile + group * kGroup;
  if (aligned && job.type == Real::bf16) {  // a tile at the edge
    uint4 q[kRowSteps][2];
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
      const int64_t r = r0 + first_row + i * kRowsAtOnce;
      const auto* p = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(job.x) +
                                                     r * job.row_stride + c);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        q[i][k] = r < job.rows && c + 8 * k < job.cols ? p[k] : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int to = tile_word(first_row + i * kRowsAtOnce, 2 * group + k);
        *reinterpret_cast<uint4*>(tile + to) = q[i][k];
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = first_row + i * kRowsAtOnce;
    const int64_t r = r0 + row;
    uint32_t w[8];
    if (aligned && job.type == Real::f32) {
      const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(job.x) +
                                                      r * job.row_stride + c);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float4 q = r < job.rows && c + 4 * k < job.cols ? p[k] : make_float4(0.f, 0.f, 0.f, 0.f);
        // a maximum passes over NaN
        const float most = fmaxf(fmaxf(fabsf(q.x), fabsf(q.y)), fmaxf(fabsf(q.z), fabsf(q.w)));
        if (most > kBf16Max) {  // rare
          q.x = within_bf16(q.x), q.y = within_bf16(q.y);
          q.z = within_bf16(q.z), q.w = within_bf16(q.w);
        }
        w[2 * k] = pack_bf16(q.x, q.y), w[2 * k + 1] = pack_bf16(q.z, q.w);
      }
    } else {
      load16(job, r, c, w);
    }
    *reinterpret_cast<uint4*>(tile + tile_word(row, 2 * group)) =
        make_uint4(w[0], w[1], w[2], w[3]);
    *reinterpret_cast<uint4*>(tile + tile_word(row, 2 * group + 1)) =
        make_uint4(w[4], w[5], w[6], w[7]);
  }
}

// How tiles come: of aligned bf16 those that are wholly inside, the usual ones, are copied without
// looking at bounds, and what is the same for all of them is here.
struct Loader {
  const __nv_bfloat16* from;  // what a thread copies first of the first tile
  int to[2];                  // the words where its two runs of 16 bytes go
  Spot whole;                 // tiles wholly inside, each way

  __device__ explicit Loader(const Fp4QuantizeParams& p) : whole{0, 0} {
    const Fp4Job& job = p.job;
    const int row = threadIdx.x / kTileGroups, group = threadIdx.x % kTileGroups;
    from = static_cast<const __nv_bfloat16*>(job.x) + row * job.row_stride + group * kGroup;
    to[0] = tile_word(row, 2 * group), to[1] = tile_word(row, 2 * group + 1);
    if (p.aligned && job.type == Real::bf16) {
      whole = {static_cast<int>(job.rows / kFp4Tile), static_cast<int>(job.cols / kFp4Tile)};
    }
  }

  // Starts to.
  __device__ void load(const Fp4QuantizeParams& p, Spot at, uint32_t* tile) const {
    if (at.row >= whole.row || at.column >= whole.column) {
      load_slowly(p.job, p.aligned, at, tile);
      return;
    }
    // kRowsAtOnce rows further every group's words lie as far on
    constexpr int kFurther = kRowsAtOnce * (kFp4Tile / 2) + kRowsAtOnce / kGroup * 4;
    static_assert(kRowsAtOnce % kGroup == 0);
    const int64_t step = kRowsAtOnce * p.job.row_stride;
    const __nv_bfloat16* x = from + (at.row * (kRowSteps * step) + at.column * kFp4Tile);
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i, x += step) {
      __pipeline_memcpy_async(tile + to[0] + i * kFurther, x, 16);
      __pipeline_memcpy_async(tile + to[1] + i * kFurther, x + 8, 16);
    }
  }
};

__device__ inline void take16(const uint32_t* tile, int row, int group, uint32_t (&w)[8]) {
  const uint4 a = *reinterpret_cast<const uint4*>(tile + tile_word(row, 2 * group));
  const uint4 b = *reinterpret_cast<const uint4*>(tile + tile_word(row, 2 * group + 1));
  w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
  w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

__device__ inline void take16(const uint32_t* tile, int row, int group, float (&x)[kGroup]) {
  uint32_t w[8];
  take16(tile, row, group, w);
  unpack16(w, x);
}

// The staged scale bytes of a tile: two warps a side.
__device__ inline void write_scales(const Fp4QuantizeParams& p, const Shared& s, int from,
                                    Spot at) {
  constexpr int kThreads = kFp4Tile * kTileGroups / 16, kRun = kScaleTileBytes / 16;
  const int k = threadIdx.x / kThreads, i = threadIdx.x % kThreads;
  if (k > 1 || p.job.side[k].form != Form::codes) return;
  const int row = k ? at.column : at.row;
  const int first = (k ? at.row : at.column) * (kTileGroups / kScaleGroups);
  if (first + i / kRun >= p.chunks[k]) return;
  auto* to = reinterpret_cast<uint4*>(p.job.side[k].scales) +
             (static_cast<int64_t>(row) * p.chunks[k] + first) * kRun;
  to[i] = reinterpret_cast<const uint4*>(s.scales[from][k])[i];
}

}  // namespace narrowfloat
