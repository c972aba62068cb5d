// How packed FP4 weights are multiplied with more tokens, whose x streams by with them.
#include "w4a16/kernels.cuh"

namespace narrowfloat {
namespace {

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

}  // namespace

FP4Kernel fp4_streamed_kernel(int groups, int warp_tiles) {
  switch (groups * 4 + warp_tiles) {
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

}  // namespace narrowfloat
