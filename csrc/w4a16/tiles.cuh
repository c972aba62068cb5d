// Which units of which tiles a block has, how the sums of several blocks meet, and how a
// tile's sums become y.
#pragma once

#include "quantize/kernels.cuh"
#include "w4a16/tiles.h"
#include "w4a16/warpgroup.cuh"

namespace narrowfloat {

// Units of K of a tile, one after another.
struct Segment {
  int tile, unit, units;
};

// What a block does: its share of the shared tiles, then its own.
class Segments {
 public:
  __device__ explicit Segments(const FP4TilesParams& p) : units_(p.units) {
    const int block = static_cast<int>(blockIdx.x);
    const int all = p.shared * p.units;
    at_ = min(block * p.share, all), end_ = min(at_ + p.share, all);
    own_ = p.shared + block, own_end_ = own_ + p.whole * static_cast<int>(gridDim.x);
  }
  __device__ bool next(Segment& s) {
    if (at_ < end_) {
      s.tile = at_ / units_, s.unit = at_ - s.tile * units_;
      s.units = min(units_ - s.unit, end_ - at_);
      at_ += s.units;
    } else if (own_ < own_end_) {
      s.tile = own_, s.unit = 0, s.units = units_;
      own_ += static_cast<int>(gridDim.x);
    } else {
      return false;
    }
    return true;
  }

 private:
  int units_, at_, end_, own_, own_end_;
};

// The same in pieces of `depth` units at most, as many as fill a stage.
class Pieces {
 public:
  __device__ explicit Pieces(const FP4TilesParams& p) : segments_(p), depth_(p.depth) {}
  __device__ bool next(Segment& piece) {
    if (rest_.units == 0 && !segments_.next(rest_)) return false;
    piece = rest_;
    piece.units = min(rest_.units, depth_);
    rest_.unit += piece.units, rest_.units -= piece.units;
    return true;
  }

 private:
  Segments segments_;
  Segment rest_{0, 0, 0};
  int depth_;
};

// Adds up a tile that several blocks have. True in the last of them to come, whose sum is then all.
// The order is that of K, whoever comes last.
template <int kThreads, int kTiles, int kSums>
__device__ inline bool meet(const FP4TilesParams& p, const Segment& piece,
                            float (&sum)[kTiles][kSums], int* ticket) {
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int first = piece.tile * p.units / p.share;
  const int blocks = (piece.tile * p.units + p.units - 1) / p.share - first + 1;
  if (blocks == 1) return true;
  constexpr int kWords = kTiles * kSums * kThreads;
  // a block's first tile, or another
  const auto at = [&](int which) {
    const int slot = which * 2 + (which * p.share / p.units != piece.tile);
    return reinterpret_cast<float4*>(p.partials + static_cast<int64_t>(slot) * kWords) + thread;
  };
  float4* to = at(block);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; j += 4) {
      to[(i * kSums + j) / 4 * kThreads] =
          make_float4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
    }
  }
  __threadfence();
  sync_warps(1, kThreads);
  if (thread == 0) *ticket = take_ticket(p.counters + piece.tile);
  sync_warps(1, kThreads);
  if (*ticket != blocks - 1) return false;
  __threadfence();
  if (blocks == 2) {  // either order is the same
    const float4* from = at(first == block ? block + 1 : first);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kSums; j += 4) {
        const float4 v = from[(i * kSums + j) / 4 * kThreads];
        sum[i][j] += v.x, sum[i][j + 1] += v.y, sum[i][j + 2] += v.z, sum[i][j + 3] += v.w;
      }
    }
    return true;
  }
  // Blocks whose sums are on their way at a time, and how many sums of each: as registers allow.
  constexpr int kAtOnce = 4, kPart = kThreads > 256 || kSums < 16 ? 8 : 16;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; j += kPart) {
      float total[kPart] = {};
#pragma unroll 1
      for (int b = 0; b < blocks; b += kAtOnce) {
        float4 v[kAtOnce][kPart / 4];
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q) {
          const float4* from = at(first + min(b + q, blocks - 1)) + (i * kSums + j) / 4 * kThreads;
#pragma unroll
          for (int h = 0; h < kPart / 4; ++h) v[q][h] = from[h * kThreads];
        }
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q) {
          if (b + q >= blocks) break;
#pragma unroll
          for (int h = 0; h < kPart / 4; ++h) {
            total[h * 4] += v[q][h].x, total[h * 4 + 1] += v[q][h].y;
            total[h * 4 + 2] += v[q][h].z, total[h * 4 + 3] += v[q][h].w;
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kPart; ++q) sum[i][j + q] = total[q];
    }
  }
  return true;
}

constexpr int kTurnPitch = 20;  // words from token to token: no bank conflicts
static_assert(8 * kTurnPitch == kTurnWords);

__device__ inline void store_four(const FP4TilesParams& p, int64_t at, int64_t left,
                                  const float (&v)[4]) {
  if (!p.vectors) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < left) store_real(p.y, p.y_type, at + j, v[j]);
    }
  } else if (p.y_type == Real::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.y) + at) = make_float4(v[0], v[1], v[2], v[3]);
  } else if (p.y_type == Real::bf16) {
    const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v[0], v[1]),
                                    __floats2bfloat162_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.y) + at) =
        *reinterpret_cast<const uint2*>(pair);
  } else {
    const __half2 pair[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__half*>(p.y) + at) =
        *reinterpret_cast<const uint2*>(pair);
  }
}

// y of 16 rows from a warp's sums, kTurned groups of 8 tokens at a time: turned in shared memory,
// so that a lane has four rows of a token.
template <int kTurned, int kSums>
__device__ inline void store_sums(const FP4TilesParams& p, const float (&sum)[kSums], float* turn,
                                  float scale, int64_t row, int token) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float bias[4] = {};
  if (p.bias) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (row + t * 4 + j < p.n) bias[j] = load_real(p.bias, p.bias_type, row + t * 4 + j);
    }
  }
  const int64_t left = p.n - row - t * 4;
  int64_t at = (token + g) * p.n + row + t * 4;
#pragma unroll
  for (int first = 0; first < kSums / 4; first += kTurned) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTurned; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        turn[i * kTurnWords + (2 * t + j % 2) * kTurnPitch + g + j / 2 * 8] =
            sum[(first + i) * 4 + j];
      }
    }
    __syncwarp();
    float4 four[kTurned];
#pragma unroll
    for (int i = 0; i < kTurned; ++i) {
      four[i] = *reinterpret_cast<const float4*>(turn + i * kTurnWords + g * kTurnPitch + t * 4);
    }
#pragma unroll
    for (int i = 0; i < kTurned; ++i) {
      const float v[4] = {four[i].x * scale + bias[0], four[i].y * scale + bias[1],
                          four[i].z * scale + bias[2], four[i].w * scale + bias[3]};
      if (token + (first + i) * 8 + g < p.tokens && left > 0) store_four(p, at, left, v);
      at += 8 * p.n;
    }
  }
}

}  // namespace narrowfloat
