// How packed FP4 weights are multiplied with so few tokens that a block holds their x.
#include "w4a16/kernels.cuh"

namespace narrowfloat {
namespace {

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

}  // namespace

FP4Kernel fp4_held_kernel(int groups) {
  switch (groups) {
    case 1:
      return narrowfloat_fp4_few_tokens<1>;
    case 2:
      return narrowfloat_fp4_few_tokens<2>;
    default:
      return nullptr;
  }
}

}  // namespace narrowfloat
