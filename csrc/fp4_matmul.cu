// Decides how packed FP4 weights are multiplied with a few tokens, and unpacked for many.
#include "fp4_matmul.h"

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>

#include "check.h"
#include "fp4_packed.cuh"
#include "instructions.cuh"
#include "kernels.cuh"

namespace narrowfloat {
namespace {

constexpr int kPitch = 36;  // words from token to token of a partial sum: no bank conflicts
constexpr int kXPad = 16;   // bytes between rows of x in shared memory, likewise
constexpr int kXPitch = kUnitCols * 2 + kXPad;  // the same where x streams, unit by unit
constexpr int kSumPad = 4;                      // words, likewise

// Where x is held: units of a warp on their way or in use, by groups of tokens.
__host__ __device__ constexpr int ring_stages(int groups) { return groups == 2 ? 3 : 4; }
constexpr int kHoldWarps = 16;
// Where x streams: stages of a block, at most, and as many warps as there are registers for.
constexpr int kMostStages = 5, kMostWarpTiles = 2;
__host__ __device__ constexpr int most_warps(int groups, int warp_tiles) {
  const int sums = groups * warp_tiles;
  return sums <= 4 || warp_tiles == 1 ? 16 : sums <= 8 ? 12 : 8;
}

struct FP4Params {
  const __nv_bfloat16* x;
  const uint8_t* packed;
  const float* scale;
  const void* bias;
  void* y;
  int64_t x_stride, n, k;
  Real bias_type, y_type;
  int tokens;
  int units;                       // of K
  int row_tiles;                   // of 32
  int tiles;                       // of row_groups * 32 rows, where x is held
  int split, row_groups, k_warps;  // row_groups * k_warps warps a block
  int log_split, log_k_warps;
  int slab;                           // units
  int stages, stage;                  // where x streams; how many bytes each
  int log_rows, log_slice;            // of a tile, of a block's share of it
  int x_first, sums_first, exchange;  // bytes in shared memory; the ring is at 0
  bool vectors, constant;
};

// What a block does: tile after tile of rows, its share of K of each, slab after slab.
struct Share {
  int rank, cluster, clusters;  // of the block in its cluster, of that in the grid
  int first, units, slabs;      // of K
  int tiles;

  __device__ explicit Share(const FP4Params& p) {
    rank = static_cast<int>(blockIdx.x) & (p.split - 1);
    cluster = static_cast<int>(blockIdx.x) >> p.log_split;
    clusters = static_cast<int>(gridDim.x) >> p.log_split;
    first = p.units * rank >> p.log_split;  // units are below 2^23
    units = (p.units * (rank + 1) >> p.log_split) - first;
    slabs = (units + p.slab - 1) / p.slab;
    tiles = tiles_below(p.tiles);
  }
  // How many of the cluster's tiles are below `end`.
  __device__ int tiles_below(int end) const {
    return cluster < end ? (end - 1 - cluster) / clusters + 1 : 0;
  }
  __device__ int tile(int i) const { return cluster + i * clusters; }
  __device__ int in_slab(const FP4Params& p, int slab) const {
    return min(p.slab, units - slab * p.slab);
  }
};

// A lane's part of a unit; `to` and `from` are where its codes begin.
__device__ inline void copy_unit(uint8_t* to, const uint8_t* from, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) copy_async<16>(to + i * 512, from + i * 512);
  copy_async<8>(to + kUnitCodes - lane * 8, from + kUnitCodes - lane * 8);
}

// A warp's units on their way from memory: those of its 32 rows of each tile, dealt out to the
// k_warps of these rows in turn. Each lane fetches what it will use itself, so no other thread need
// wait for it.
template <int kStages>
class Ring {
 public:
  __device__ Ring(const FP4Params& p, const Share& share, uint8_t* shared, int warp, int lane)
      : p_(p), share_(share), lane_(lane) {
    ring_ = shared + warp * (kStages * kUnitBytes) + lane * 16;
    row_group_ = warp / p.k_warps;
    unit_ = warp % p.k_warps;
    // row tiles at tile * row_groups + row_group; none where there is no K
    const int end = (p.row_tiles - row_group_ + p.row_groups - 1) / p.row_groups;
    tiles_ = share.units > 0 ? share.tiles_below(end) : 0;
    settle();
  }

  // How many of the block's tiles have rows for this warp.
  __device__ int tiles() const { return tiles_; }

  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) fetch(i);
  }

  // The lane's part of the next unit: codes[half of K][half of rows], scales[half of K]. The stage
  // that was read before is fetched anew.
  __device__ void next(uint4 (&codes)[2][1][2], uint2& scales) {
    wait_for_copies<kStages - 2>();
    const uint8_t* at = ring_ + slot_ * kUnitBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i / 2][0][i % 2] = reinterpret_cast<const uint4*>(at)[i * 32];
    }
    scales = *reinterpret_cast<const uint2*>(at + kUnitCodes - lane_ * 8);
    fetch(slot_ == 0 ? kStages - 1 : slot_ - 1);
    slot_ = slot_ == kStages - 1 ? 0 : slot_ + 1;
  }

 private:
  __device__ void settle() {
    while (tile_ < tiles_) {
      const int in_slab = share_.in_slab(p_, slab_);
      if (unit_ < in_slab) return;
      unit_ -= in_slab;
      if (++slab_ == share_.slabs) {
        slab_ = 0;
        ++tile_;
      }
    }
  }

  __device__ void fetch(int slot) {
    if (tile_ < tiles_) {
      const int row_tile = share_.tile(tile_) * p_.row_groups + row_group_;
      const int unit = share_.first + slab_ * p_.slab + unit_;
      const uint8_t* from =
          p_.packed + (static_cast<int64_t>(row_tile) * p_.units + unit) * kUnitBytes + lane_ * 16;
      uint8_t* to = ring_ + slot * kUnitBytes;
      copy_unit(to, from, lane_);
      unit_ += p_.k_warps;
      settle();
    }
    end_copies();
  }

  const FP4Params& p_;
  const Share& share_;
  uint8_t* ring_;
  int lane_, row_group_;
  int tiles_, tile_ = 0, slab_ = 0, unit_;  // what is fetched next
  int slot_ = 0;                            // what is used next
};

// Eight columns of x to shared memory, `count` times, with copies that are to be waited for. Beyond
// K, which is `left` columns from `from`, zeros: the weights there are zero too, but zero times
// what lies there by chance may be NaN. to_step is in bytes.
__device__ inline void fetch_x(const FP4Params& p, uint8_t* to, int to_step,
                               const __nv_bfloat16* from, int64_t from_step, int64_t left,
                               int64_t left_step, int count) {
  if (p.vectors) {
#pragma unroll 2
    for (int i = 0; i < count; ++i) {
      if (left > 0) {
        copy_async<16>(to, from);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
      to += to_step, from += from_step, left -= left_step;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Eight<__nv_bfloat16> v = load8<false>(from, 1, left);
      *reinterpret_cast<uint4*>(to) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
      to += to_step, from += from_step, left -= left_step;
    }
  }
}

// x of a slab, each row by one warp or several.
__device__ inline void load_x(const FP4Params& p, const Share& share, int slab, uint8_t* to) {
  const int64_t first = static_cast<int64_t>(share.first + slab * p.slab) * kUnitCols;
  const int chunks = share.in_slab(p, slab) * (kUnitCols / 8);  // a row, of 16 bytes
  const int lane = threadIdx.x % 32, warps = static_cast<int>(blockDim.x) / 32;
  const int parts = max(warps / p.tokens, 1), step = parts * 32;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < p.tokens * parts; i += warps) {
    const int row = i / parts, chunk = (i - row * parts) * 32 + lane;
    if (chunk >= chunks) continue;
    const int64_t col = first + chunk * 8;
    fetch_x(p, to + row * (p.slab * kUnitCols * 2 + kXPad) + chunk * 16, step * 16,
            p.x + row * p.x_stride + col, step * 8, p.k - col, step * 8,
            (chunks - 1 - chunk) / step + 1);
  }
  end_copies();
  wait_for_copies<0>();
}

// sum [32 kTiles, 8 kGroups tokens] of a warp += half a unit of each tile times x. x_at(group, two)
// is where this lane's x for the operands 2 two and 2 two + 1 along K lies.
template <int kGroups, int kTiles, typename X>
__device__ inline void multiply_half(const uint4 (&codes)[kTiles][2],
                                     const uint32_t (&scales)[kTiles], X x_at,
                                     float (&sum)[kTiles][2][kGroups][4]) {
#pragma unroll
  for (int two = 0; two < 2; ++two) {
    uint4 b[kGroups];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) b[n] = *reinterpret_cast<const uint4*>(x_at(n, two));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int rows = 0; rows < 2; ++rows) {
        const uint32_t bytes = scales[tile];
        const uint32_t scale[2] = {widen_scales(__byte_perm(bytes, 0, rows ? 0x4242 : 0x4040)),
                                   widen_scales(__byte_perm(bytes, 0, rows ? 0x4343 : 0x4141))};
        const uint4& four = codes[tile][rows];
#pragma unroll
        for (int one = 0; one < 2; ++one) {
          const uint32_t word = two ? (one ? four.w : four.z) : (one ? four.y : four.x);
          uint32_t a[4];
          spread_codes(word, a);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = multiply_pair(a[i], scale[i % 2]);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) {
            mma(sum[tile][rows][n], a, one ? b[n].z : b[n].x, one ? b[n].w : b[n].y);
          }
        }
      }
    }
  }
}

__device__ inline void finish(const FP4Params& p, float scale, int token, int64_t row, float sum) {
  if (row >= p.n) return;
  float v = sum * scale;
  if (p.bias) v += load_real(p.bias, p.bias_type, row);
  store_real(p.y, p.y_type, token * p.n + row, v);
}

// Adds up what the blocks of the cluster have sent for this block's rows of a tile.
__device__ inline void finish_slice(const FP4Params& p, const Share& share, int i, float scale,
                                    const float* exchange) {
  const int slice = 1 << p.log_slice, all = p.tokens << p.log_slice;
  const float* from = exchange + i % 2 * p.split * all;
  const int64_t first = (static_cast<int64_t>(share.tile(i)) << p.log_rows) + share.rank * slice;
  for (int o = threadIdx.x; o < all; o += blockDim.x) {
    float sum = from[o];
#pragma unroll 4
    for (int s = 1; s < p.split; ++s) sum += from[s * all + o];
    finish(p, scale, o >> p.log_slice, first + (o & (slice - 1)), sum);
  }
}

// Few tokens: a block holds its slab of x and walks over tiles of rows; its warps share a tile's
// rows and K, the blocks of a cluster share K further. Sums meet in shared memory, warp by warp in
// order, then block by block. A cluster's barrier is waited for only a tile later: meanwhile the
// next is computed.
template <int kGroups>
__global__ void __launch_bounds__(kHoldWarps * 32, 1)
    narrowfloat_fp4_few_tokens(const __grid_constant__ FP4Params p) {
  extern __shared__ uint4 shared_words[];
  uint8_t* const shared = reinterpret_cast<uint8_t*>(shared_words);
  uint8_t* const x = shared + p.x_first;
  float* const sums = reinterpret_cast<float*>(shared + p.sums_first);
  float* const exchange = reinterpret_cast<float*>(shared + p.exchange);
  constexpr int kSum = kGroups * 8 * kPitch;  // words of a warp's partial sum
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Share share(p);

  let_next_launch_start();
  // A block's shared memory may be written by others of its cluster once it runs: the first wait
  // below is for this.
  if (p.split > 1) arrive_at_cluster();
  Ring<ring_stages(kGroups)> ring(p, share, shared, warp, lane);
  // Nothing that runs at this time writes the weights of an inference (FP4Matmul::constant), so
  // they need not wait for the launch before; x does, and y, which that launch may still read or
  // write.
  if (p.constant) ring.start();
  wait_for_launch_before();
  if (!p.constant) ring.start();
  const float scale = *p.scale * kRestore;

  const uint8_t* x_lane[kGroups];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {  // columns beyond the tokens repeat the last: never stored
    const int token = min(n * 8 + g, p.tokens - 1);
    x_lane[n] = x + token * (p.slab * kUnitCols * 2 + kXPad) + t * 32;
  }
  int unit = warp % p.k_warps;
  int held = -1;  // slab of x
#pragma unroll 1
  for (int i = 0; i < share.tiles; ++i) {
    float sum[1][2][kGroups][4] = {};
#pragma unroll 1
    for (int slab = 0; slab < share.slabs; ++slab) {
      if (slab != held) {
        if (held >= 0) __syncthreads();  // the one before is in use no more
        load_x(p, share, slab, x);
        __syncthreads();
        held = slab;
      }
      if (i >= ring.tiles()) continue;
      const int in_slab = share.in_slab(p, slab);
#pragma unroll 1
      for (; unit < in_slab; unit += p.k_warps) {
        uint4 codes[2][1][2];
        uint2 scales;
        ring.next(codes, scales);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of K
          const uint32_t bytes[1] = {half ? scales.y : scales.x};
          const int offset = unit * (kUnitCols * 2) + half * kUnitCols;
          multiply_half<kGroups, 1>(
              codes[half], bytes, [&](int n, int two) { return x_lane[n] + offset + two * 16; },
              sum);
        }
      }
      unit -= in_slab;
    }

    if (p.split > 1) {
      wait_for_cluster();  // for the tile before: everyone's sums are read and sent
      if (i > 0) finish_slice(p, share, i - 1, scale, exchange);
    } else {
      __syncthreads();
    }
    float* own = sums + warp * kSum + 2 * t * kPitch + g;
#pragma unroll
    for (int rows = 0; rows < 2; ++rows) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          own[(n * 8 + j % 2) * kPitch + rows * 16 + j / 2 * 8] = sum[0][rows][n][j];
        }
      }
    }
    __syncthreads();
    const int all = p.tokens << p.log_rows;
    for (int o = threadIdx.x; o < all; o += blockDim.x) {
      const int token = o >> p.log_rows, row = o & ((1 << p.log_rows) - 1);
      const float* from =
          sums + row / kUnitRows * p.k_warps * kSum + token * kPitch + row % kUnitRows;
      float total = *from;
#pragma unroll 4
      for (int w = 1; w < p.k_warps; ++w) total += from[w * kSum];
      if (p.split > 1) {
        const int owner = row >> p.log_slice, in_slice = row & ((1 << p.log_slice) - 1);
        store_in_cluster(exchange +
                             (((i % 2 * p.split + share.rank) * p.tokens + token) << p.log_slice) +
                             in_slice,
                         owner, total);
      } else {
        finish(p, scale, token, (static_cast<int64_t>(share.tile(i)) << p.log_rows) + row, total);
      }
    }
    if (p.split > 1) arrive_at_cluster();
  }
  if (p.split > 1) {
    wait_for_cluster();
    if (share.tiles > 0) finish_slice(p, share, share.tiles - 1, scale, exchange);
  }
}

// More tokens: a block has one tile of rows, all of which its warps hold sums of, and x streams by
// with the weights. A stage has a unit of K for each of the k_warps; a unit of weights is fetched
// by the lanes that use it, x by all threads. In the end the sums meet in shared memory as above.
template <int kGroups, int kTiles>
__global__ void __launch_bounds__(most_warps(kGroups, kTiles) * 32, 1)
    narrowfloat_fp4_tokens(const __grid_constant__ FP4Params p) {
  extern __shared__ uint4 shared_words[];
  uint8_t* const shared = reinterpret_cast<uint8_t*>(shared_words);
  constexpr int kXUnit = kGroups * 8 * kXPitch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int row_group = warp >> p.log_k_warps, k_warp = warp & (p.k_warps - 1);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const Share share(p);
  const int tile = share.cluster;
  const int row_tile = (tile * p.row_groups + row_group) * kTiles;
  const int tiles = min(kTiles, p.row_tiles - row_tile);  // that exist
  const int slabs = share.slabs;                          // of k_warps units

  const uint8_t* const packed =
      p.packed + (static_cast<int64_t>(row_tile) * p.units + share.first + k_warp) * kUnitBytes +
      lane * 16;
  const int own = p.k_warps * kXUnit + warp * (kTiles * kUnitBytes) + lane * 16;  // in a stage
  const auto fetch_weights = [&](int slab, uint8_t* stage) {
    if ((slab << p.log_k_warps) + k_warp >= share.units) return;
    const uint8_t* from = packed + (static_cast<int64_t>(slab) << p.log_k_warps) * kUnitBytes;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < tiles) copy_unit(stage + own + i * kUnitBytes, from, lane);
      from += static_cast<int64_t>(p.units) * kUnitBytes;
    }
  };
  // of x, a thread has a chunk of a unit for each of some tokens
  const int chunk = threadIdx.x % (kUnitCols / 8), of_row = threadIdx.x / (kUnitCols / 8);
  const int unit = of_row & (p.k_warps - 1), token = of_row >> p.log_k_warps;
  const int own_x = unit * kXUnit + token * kXPitch + chunk * 16;  // in a stage
  const int64_t first_col = static_cast<int64_t>(share.first + unit) * kUnitCols + chunk * 8;
  const __nv_bfloat16* const own_row = p.x + token * p.x_stride;
  const auto fetch_slab_of_x = [&](int slab, uint8_t* stage) {
    const int first = slab << p.log_k_warps;
    const int row = threadIdx.x / (kUnitCols / 8);  // anew each time: registers are scarce
    if (first + (row & (p.k_warps - 1)) >= share.units) return;
    const int64_t col = first_col + static_cast<int64_t>(first) * kUnitCols;
    const int step = p.row_groups * (32 / (kUnitCols / 8));  // of tokens
    const int count = (p.tokens - (row >> p.log_k_warps) + step - 1) / step;
    fetch_x(p, stage + own_x, step * kXPitch, own_row + col, step * p.x_stride, p.k - col, 0,
            count);
  };

  let_next_launch_start();
  // As above: the weights need not wait for the launch before.
  const int ahead = p.stages - 1;
  const auto fetch_first_weights = [&] {
#pragma unroll 1
    for (int i = 0; i < min(ahead, slabs); ++i) fetch_weights(i, shared + i * p.stage);
  };
  if (p.constant) fetch_first_weights();
  wait_for_launch_before();
  if (!p.constant) fetch_first_weights();
  const float scale = *p.scale * kRestore;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (i < slabs) fetch_slab_of_x(i, shared + i * p.stage);
    end_copies();
  }

  float sum[kTiles][2][kGroups][4] = {};
  int at = 0, next = ahead;  // stages
#pragma unroll 1
  for (int slab = 0; slab < slabs; ++slab) {
    if (p.stages == 2) {
      wait_for_copies<0>();
    } else if (p.stages == 3) {
      wait_for_copies<1>();
    } else if (p.stages == 4) {
      wait_for_copies<2>();
    } else {
      wait_for_copies<3>();
    }
    __syncthreads();  // all of x is there, and the stage before is in use no more
    if (slab + ahead < slabs) {
      fetch_weights(slab + ahead, shared + next * p.stage);
      fetch_slab_of_x(slab + ahead, shared + next * p.stage);
    }
    end_copies();
    if (tiles > 0 && (slab << p.log_k_warps) + k_warp < share.units) {
      const uint8_t* stage = shared + at * p.stage;
      const uint8_t* x = stage + k_warp * kXUnit + g * kXPitch + t * 32;
      uint2 scales[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        scales[i] =
            *reinterpret_cast<const uint2*>(stage + own + i * kUnitBytes + kUnitCodes - lane * 8);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // of K
        uint4 codes[kTiles][2];
        uint32_t bytes[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const uint8_t* from = stage + own + i * kUnitBytes + half * 1024;
          codes[i][0] = *reinterpret_cast<const uint4*>(from);
          codes[i][1] = *reinterpret_cast<const uint4*>(from + 512);
          bytes[i] = half ? scales[i].y : scales[i].x;
        }
        multiply_half<kGroups, kTiles>(
            codes, bytes,
            [&](int n, int two) { return x + n * 8 * kXPitch + half * kUnitCols + two * 16; }, sum);
      }
    }
    at = at == ahead ? 0 : at + 1;
    next = next == ahead ? 0 : next + 1;
  }
  wait_for_copies<0>();
  __syncthreads();

  // [k_warps][tokens][rows] where the stages were
  const int rows = p.row_groups * (kTiles * kUnitRows), pitch = rows + kSumPad;
  float* const sums = reinterpret_cast<float*>(shared);
  float* const to =
      sums + (k_warp * kGroups * 8 + 2 * t) * pitch + row_group * (kTiles * kUnitRows) + g;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of rows
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          to[(n * 8 + j % 2) * pitch + i * kUnitRows + half * 16 + j / 2 * 8] = sum[i][half][n][j];
        }
      }
    }
  }
  if (p.split > 1) {  // then nobody uses a stage any more
    arrive_at_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
  const int64_t first_row = static_cast<int64_t>(tile) * rows;
  const int slice = rows >> p.log_split;
  float* const exchange = reinterpret_cast<float*>(shared + p.exchange);  // [split][tokens][slice]
#pragma unroll 1
  for (int token = warp; token < p.tokens; token += warps) {
#pragma unroll 2
    for (int row = lane; row < rows; row += 32) {
      const float* from = sums + token * pitch + row;
      float total = *from;
#pragma unroll 4
      for (int w = 1; w < p.k_warps; ++w) total += from[w * kGroups * 8 * pitch];
      if (p.split > 1) {
        const int owner = row / slice;
        store_in_cluster(exchange + (share.rank * p.tokens + token) * slice + row - owner * slice,
                         owner, total);
      } else {
        finish(p, scale, token, first_row + row, total);
      }
    }
  }
  if (p.split == 1) return;
  arrive_at_cluster();
  wait_for_cluster();
  const int all = p.tokens * slice;
  for (int o = threadIdx.x; o < all; o += blockDim.x) {
    float total = exchange[o];
#pragma unroll 4
    for (int s = 1; s < p.split; ++s) total += exchange[s * all + o];
    const int token = o / slice;
    finish(p, scale, token, first_row + share.rank * slice + o - token * slice, total);
  }
}

constexpr int kUnpackThreads = 256;

// A warp a unit; a lane has two runs of 32 bytes in each of four rows.
__global__ void __launch_bounds__(kUnpackThreads)
    narrowfloat_fp4_unpack(const uint8_t* packed, int64_t units, int k_units,
                           __nv_bfloat16* operand, const float* scale, float* alpha) {
  if (alpha && blockIdx.x == 0 && threadIdx.x < 2) alpha[threadIdx.x] = threadIdx.x ? 0.f : *scale;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kWarps = kUnpackThreads / 32;
  const int64_t ld = static_cast<int64_t>(k_units) * kUnitCols;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; unit < units;
       unit += static_cast<int64_t>(gridDim.x) * kWarps) {
    const uint8_t* from = packed + unit * kUnitBytes;
    const uint2 scales = reinterpret_cast<const uint2*>(from + kUnitCodes)[lane];
    __nv_bfloat16* to =
        operand + (unit / k_units * kUnitRows + g) * ld + unit % k_units * kUnitCols + t * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = i / 2, rows = i % 2;
      const uint4 codes = reinterpret_cast<const uint4*>(from)[i * 32 + lane];
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      const uint32_t bytes = (half ? scales.y : scales.x) >> rows * 16;
      const uint32_t scale[2] = {widen_scales(__byte_perm(bytes, 0, 0x4040)),
                                 widen_scales(__byte_perm(bytes, 0, 0x4141))};
      uint32_t row[2][8];  // g, g + 8
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        spread_codes(words[j], a);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          constexpr uint32_t kRestorePair = 0x43004300u;  // kRestore, twice
          row[q % 2][j * 2 + q / 2] =
              multiply_pair(multiply_pair(a[q], scale[q % 2]), kRestorePair);
        }
      }
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        auto* at = reinterpret_cast<uint4*>(to + (rows * 16 + q * 8) * ld + half * 64);
        at[0] = make_uint4(row[q][0], row[q][1], row[q][2], row[q][3]);
        at[1] = make_uint4(row[q][4], row[q][5], row[q][6], row[q][7]);
      }
    }
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

int groups_for(int64_t tokens) { return tokens <= 8 ? 1 : tokens <= 16 ? 2 : tokens <= 32 ? 4 : 8; }

// Bytes of shared memory, piece by piece. Where x streams, the sums take the place of the stages.
struct SharedLayout {
  int stage, ring, x, sums, exchange;
  SharedLayout(const FP4Plan& plan, int64_t tokens) {
    const int rows = plan.row_groups * std::max(plan.warp_tiles, 1) * kUnitRows;
    const int k_warps = plan.warps / plan.row_groups;
    const int sent = plan.split > 1 ? static_cast<int>(tokens) * rows * 4 : 0;
    if (plan.warp_tiles == 0) {
      stage = plan.warps * kUnitBytes;
      ring = ring_stages(plan.groups) * stage;
      x = static_cast<int>(tokens) * (plan.slab * kUnitCols * 2 + kXPad);
      sums = plan.warps * plan.groups * 8 * kPitch * 4;
      exchange = sent * 2;
    } else {
      stage =
          k_warps * (plan.groups * 8 * kXPitch + plan.row_groups * plan.warp_tiles * kUnitBytes);
      sums = k_warps * plan.groups * 8 * (rows + kSumPad) * 4;
      exchange = sent;
      x = 0;
      ring = std::max(plan.stages * stage - sums - exchange, 0);
    }
  }
  int all() const { return ring + x + sums + exchange; }
};

using Kernel = void (*)(FP4Params);

// null: there is none
Kernel kernel_for(int groups, int warp_tiles) {
  switch (groups * 4 + warp_tiles) {
    case 4:
      return narrowfloat_fp4_few_tokens<1>;
    case 8:
      return narrowfloat_fp4_few_tokens<2>;
    case 5:
      return narrowfloat_fp4_tokens<1, 1>;
    case 9:
      return narrowfloat_fp4_tokens<2, 1>;
    case 17:
      return narrowfloat_fp4_tokens<4, 1>;
    case 18:
      return narrowfloat_fp4_tokens<4, 2>;
    case 33:
      return narrowfloat_fp4_tokens<8, 1>;
    case 34:
      return narrowfloat_fp4_tokens<8, 2>;
    default:
      return nullptr;
  }
}

FP4Device read_device(int index) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    NF_CUDA(cudaDeviceGetAttribute(&value, which, index));
    return value;
  };
  FP4Device device{};
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.overlaps = attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  device.clusters[0] = device.multiprocessors;
  for (const int groups : {1, 2, 4, 8}) {
    for (int warp_tiles = 0; warp_tiles <= kMostWarpTiles; ++warp_tiles) {
      const Kernel kernel = kernel_for(groups, warp_tiles);
      if (!kernel) continue;
      NF_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   device.shared_bytes));
    }
  }
  if (!device.overlaps) return device;
  for (int log = 1; log < 4; ++log) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 1u << log;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << log);
    config.blockDim = dim3(kHoldWarps * 32);
    config.dynamicSmemBytes = device.shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&device.clusters[log],
                                       reinterpret_cast<const void*>(kernel_for(1, 0)),
                                       &config) != cudaSuccess) {
      cudaGetLastError();
      device.clusters[log] = 0;  // K is then shared within a block only
    }
  }
  return device;
}

// Costs are fitted to measurements on an H200, of the blocks that hold x; of those through which it
// streams they are estimates.
constexpr double kStart = 3.8;     // until a launch has its first weights, and its end
constexpr double kUnit = .0705;    // to load a unit of weights into each multiprocessor
constexpr double kXBytes = 12e-6;  // to load a byte of x into a multiprocessor, from L2
constexpr double kCycle = 1 / 1.75e3;

// Completes a plan where x is held.
void plan_held(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, FP4Plan& plan) {
  const int clusters = device.clusters[log2_of(plan.split)];
  if (plan.row_groups > plan.split || plan.warps > kHoldWarps) return;
  const int64_t units = ceil_div(ceil_div(k, kUnitCols), plan.split);  // a block's
  const int k_warps = plan.warps / plan.row_groups;
  const int64_t a_unit = tokens * kUnitCols * 2;
  const int64_t room =
      (device.shared_bytes - SharedLayout(plan, tokens).all()) / a_unit;  // for a slab of x
  if (room < 1) return;
  int64_t slab = std::max<int64_t>(std::min(units, room), 1);  // where K is 0 too
  if (slab < units && slab > k_warps) slab -= slab % k_warps;
  plan.slab = static_cast<int>(slab);
  plan.shared_bytes = SharedLayout(plan, tokens).all();
  const int64_t tiles = ceil_div(ceil_div(n, kUnitRows), plan.row_groups);
  const int64_t at_once = std::min<int64_t>(clusters, tiles);
  plan.blocks = static_cast<int>(at_once) * plan.split;

  const double rounds = static_cast<double>(ceil_div(tiles, at_once));
  const double slabs = static_cast<double>(ceil_div(units, slab));
  const double x = kXBytes * static_cast<double>(units * a_unit);
  const double few_warps =
      plan.warps >= 16 ? 1 : (plan.warps >= 8 ? 1.05 : 1.25) + .006 * static_cast<double>(tokens);
  double tile = few_warps * kUnit * static_cast<double>(units * plan.row_groups) +
                static_cast<double>(tokens) * (plan.split > 1 ? .05 : .015);
  if (plan.split > 1) tile += .4;
  if (slabs > 1) tile += x + slabs;
  plan.cost = kStart + rounds * tile + (slabs > 1 ? 0 : x);
}

// Completes a plan where x streams.
void plan_streamed(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, FP4Plan& plan) {
  const int k_warps = plan.warps / plan.row_groups;
  if (plan.warps > most_warps(plan.groups, plan.warp_tiles) ||
      k_warps * plan.row_groups != plan.warps || 1 << log2_of(k_warps) != k_warps) {
    return;
  }
  for (plan.stages = kMostStages; plan.stages >= 2; --plan.stages) {
    plan.shared_bytes = SharedLayout(plan, tokens).all();
    if (plan.shared_bytes <= device.shared_bytes) break;
  }
  if (plan.stages < 2) return;
  plan.slab = k_warps;
  const int64_t units = ceil_div(ceil_div(k, kUnitCols), plan.split);  // a block's
  const int tile = plan.row_groups * plan.warp_tiles;
  const int64_t tiles = ceil_div(ceil_div(n, kUnitRows), tile);
  plan.blocks = static_cast<int>(tiles) * plan.split;

  const auto rounds = static_cast<double>(ceil_div(tiles, device.clusters[log2_of(plan.split)]));
  const auto slabs = static_cast<double>(ceil_div(units, k_warps));
  const int a_quarter = (plan.warps + 3) / 4;  // warps of the busiest scheduler
  const auto used = static_cast<double>(units * tile),
             x = static_cast<double>(units * tokens * 256);
  // what weights, x, shared memory, mma and the instructions that decode need
  const double needs[4] = {
      std::max(used * kUnit, (used * kUnitBytes + x) / 55e3),
      kCycle * (slabs * plan.warps * (16 * plan.groups + 36 * plan.warp_tiles) + x / 128),
      kCycle * slabs * a_quarter * plan.warp_tiles * plan.groups * 16 * 6.4,
      kCycle * slabs * a_quarter * (plan.warp_tiles * (230 + 16 * plan.groups) + 60)};
  double most = 0, sum = 0;
  for (const double need : needs) most = std::max(most, need), sum += need;
  const double busy = most + (sum - most) * .5 / a_quarter;
  double end = kCycle * static_cast<double>(tokens) * tile * kUnitRows *
               (2 * k_warps + (plan.split > 1 ? 6 : 2)) / 32;
  if (plan.split > 1) end += 1;
  plan.cost = kStart + rounds * (busy + slabs * (plan.stages == 2 ? .4 : .08) + end);
}

}  // namespace

// Read once a device; the values never change.
FP4Device fp4_device(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> read;
  static std::array<FP4Device, kMaxDevices> devices;
  NF_CHECK(index >= 0 && index < kMaxDevices, "fp4_few_tokens: expected a device below ",
           kMaxDevices, ", got ", index);
  std::call_once(read[index], [&] { devices[index] = read_device(index); });
  return devices[index];
}

FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, int warp_tiles,
                 int warps, int split, int row_groups) {
  FP4Plan plan{};
  plan.groups = groups_for(tokens);
  plan.warp_tiles = warp_tiles;
  plan.warps = warps;
  plan.split = split;
  plan.row_groups = row_groups;
  plan.cost = std::numeric_limits<double>::infinity();
  if (!kernel_for(plan.groups, warp_tiles) || device.clusters[log2_of(split)] == 0 ||
      row_groups > warps) {
    return plan;
  }
  (warp_tiles == 0 ? plan_held : plan_streamed)(device, tokens, n, k, plan);
  return plan;
}

FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k) {
  FP4Plan best{};
  best.cost = std::numeric_limits<double>::infinity();
  const auto consider = [&](int warp_tiles, int warps, int split, int row_groups) {
    const FP4Plan plan = plan_fp4(device, tokens, n, k, warp_tiles, warps, split, row_groups);
    if (plan.cost < best.cost) best = plan;
  };
  const int groups = groups_for(tokens);
  for (const int split : {1, 2, 4, 8}) {
    const int clusters = device.clusters[log2_of(split)];
    if (clusters == 0) continue;
    for (const int warps : {16, 8, 4}) {
      for (int row_groups = 1; row_groups <= split; row_groups *= 2) {
        consider(0, warps, split, row_groups);
      }
    }
    for (int warp_tiles = 1; warp_tiles <= kMostWarpTiles; ++warp_tiles) {
      // as few rows a tile as the least number of rounds allows, or some more; few where shared
      // memory is short
      const int most = most_warps(groups, warp_tiles);
      const int64_t tiles = ceil_div(ceil_div(n, kUnitRows), warp_tiles);
      const int64_t least = ceil_div(tiles, static_cast<int64_t>(clusters) * most);
      for (int more = 0; more < 4; ++more) {
        const int row_groups =
            more < 3 ? static_cast<int>(ceil_div(tiles, clusters * (least + more))) : 4;
        for (int k_warps = 1; k_warps * row_groups <= most; k_warps *= 2) {
          consider(warp_tiles, k_warps * row_groups, split, row_groups);
        }
      }
    }
  }
  NF_CHECK(best.blocks > 0, "fp4_few_tokens: expected a device with more shared memory, got ",
           device.shared_bytes, " bytes a block for ", tokens, " tokens");
  return best;
}

void fp4_few_tokens(const FP4Matmul& job, const FP4Plan& plan, int device, cudaStream_t stream) {
  const FP4Device facts = fp4_device(device);
  const SharedLayout layout(plan, job.m);
  FP4Params p{};
  p.x = static_cast<const __nv_bfloat16*>(job.x);
  p.packed = job.packed;
  p.scale = job.scale;
  p.bias = job.bias;
  p.y = job.y;
  p.x_stride = job.x_stride, p.n = job.n, p.k = job.k;
  p.bias_type = job.bias_type, p.y_type = job.y_type;
  p.tokens = static_cast<int>(job.m);
  p.units = static_cast<int>(ceil_div(job.k, kUnitCols));
  p.row_tiles = static_cast<int>(ceil_div(job.n, kUnitRows));
  p.tiles = static_cast<int>(ceil_div(p.row_tiles, plan.row_groups));  // where x is held
  p.split = plan.split, p.row_groups = plan.row_groups;
  p.k_warps = plan.warps / plan.row_groups;
  p.log_split = log2_of(plan.split), p.log_k_warps = log2_of(p.k_warps);
  p.stages = plan.stages, p.stage = layout.stage;
  p.slab = plan.slab;
  p.log_rows = log2_of(plan.row_groups * kUnitRows);
  p.log_slice = p.log_rows - p.log_split;
  p.x_first = layout.ring;
  p.sums_first = layout.ring + layout.x;
  p.exchange = plan.warp_tiles == 0 ? p.sums_first + layout.sums : layout.sums;
  p.vectors =
      job.k % 8 == 0 && job.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(job.x) % 16 == 0;
  p.constant = job.constant;

  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (facts.overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (plan.split > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(plan.split);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps) * 32);
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  NF_CUDA(cudaLaunchKernelEx(&config, kernel_for(plan.groups, plan.warp_tiles), p));
}

void fp4_few_tokens(const FP4Matmul& job, int device, cudaStream_t stream) {
  constexpr int64_t kMost = int64_t{1} << 30;
  NF_CHECK(job.m <= kFewTokens && job.n <= kMost && job.k <= kMost,
           "fp4_few_tokens: expected at most ", kFewTokens, " tokens and sizes up to 2^30, got ",
           job.m, " x ", job.k, " x ", job.n);
  if (job.m == 0 || job.n == 0) return;
  fp4_few_tokens(job, plan_fp4(fp4_device(device), job.m, job.n, job.k), device, stream);
}

void fp4_unpack(const uint8_t* packed, int64_t n, int64_t k, void* operand, const float* scale,
                float* alpha, cudaStream_t stream) {
  const int64_t k_units = ceil_div(k, kUnitCols), units = ceil_div(n, kUnitRows) * k_units;
  if (units == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(units, kUnpackThreads / 32), 65536);
  narrowfloat_fp4_unpack<<<static_cast<unsigned>(blocks), kUnpackThreads, 0, stream>>>(
      packed, units, static_cast<int>(k_units), static_cast<__nv_bfloat16*>(operand), scale, alpha);
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
