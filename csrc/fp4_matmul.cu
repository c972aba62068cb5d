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

constexpr int kMostTokens = 32;  // a launch; more would not leave room for x in shared memory
constexpr int kPitch = 36;       // words from token to token of a partial sum: no bank conflicts
constexpr int kXPad = 16;        // bytes between rows of x in shared memory, likewise

// Units of a warp on their way or in use, by groups of tokens.
__host__ __device__ constexpr int stages(int groups) { return groups == 2 ? 3 : 4; }
__host__ __device__ constexpr int most_warps(int groups) { return groups <= 2 ? 16 : 8; }

struct FP4Params {
  const __nv_bfloat16* x;
  const uint8_t* packed;
  const float* scale;
  const void* bias;
  void* y;
  int64_t x_stride, n, k;
  Real bias_type, y_type;
  int tokens;
  int units;                          // of K
  int row_tiles;                      // of 32
  int tiles;                          // of row_groups * 32 rows
  int split, row_groups, k_warps;     // row_groups * k_warps warps a block
  int slab;                           // units
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
    const int log_split = p.log_rows - p.log_slice;
    rank = static_cast<int>(blockIdx.x) & (p.split - 1);
    cluster = static_cast<int>(blockIdx.x) >> log_split;
    clusters = static_cast<int>(gridDim.x) >> log_split;
    first = p.units * rank >> log_split;  // units are below 2^23
    units = (p.units * (rank + 1) >> log_split) - first;
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
  __device__ void next(uint4 (&codes)[2][2], uint2& scales) {
    wait_for_copies<kStages - 2>();
    const uint8_t* at = ring_ + slot_ * kUnitBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i / 2][i % 2] = reinterpret_cast<const uint4*>(at)[i * 32];
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
#pragma unroll
      for (int i = 0; i < 4; ++i) copy_async<16>(to + i * 512, from + i * 512);
      copy_async<8>(to + kUnitCodes - lane_ * 8, from + kUnitCodes - lane_ * 8);
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

// x of a slab to shared memory, zeros beyond K. The weights there are zero too, but zero times what
// lies there by chance may be NaN.
__device__ inline void load_x(const FP4Params& p, const Share& share, int slab, uint8_t* to) {
  const int64_t first = static_cast<int64_t>(share.first + slab * p.slab) * kUnitCols;
  const uint32_t chunks = share.in_slab(p, slab) * (kUnitCols / 8);  // a row, of 16 bytes
  const uint32_t all = chunks * p.tokens;
  constexpr int kAtOnce = 4;
  for (uint32_t i = threadIdx.x; i < all; i += kAtOnce * blockDim.x) {
    Eight<__nv_bfloat16> v[kAtOnce];
    uint32_t at[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t c = i + j * blockDim.x, row = c / chunks, chunk = c - row * chunks;
      at[j] = row * (p.slab * kUnitCols * 2 + kXPad) + chunk * 16;
      const int64_t col = first + chunk * 8, left = c < all ? p.k - col : 0;
      const __nv_bfloat16* from = p.x + row * p.x_stride + col;
      v[j] = p.vectors ? load8<true>(from, 1, left) : load8<false>(from, 1, left);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * blockDim.x < all) {
        *reinterpret_cast<uint4*>(to + at[j]) =
            make_uint4(v[j].w[0], v[j].w[1], v[j].w[2], v[j].w[3]);
      }
    }
  }
}

// sum [32, 8 groups tokens] of a warp += a unit times x, which lies at x[group] for this lane.
template <int kGroups>
__device__ inline void multiply_unit(const uint4 (&codes)[2][2], uint2 scales,
                                     const uint8_t* const (&x)[kGroups], int offset,
                                     float (&sum)[2][kGroups][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of K
    const uint32_t bytes = half ? scales.y : scales.x;
    const uint32_t scale[2][2] = {
        {widen_scales(__byte_perm(bytes, 0, 0x4040)), widen_scales(__byte_perm(bytes, 0, 0x4141))},
        {widen_scales(__byte_perm(bytes, 0, 0x4242)), widen_scales(__byte_perm(bytes, 0, 0x4343))}};
#pragma unroll
    for (int two = 0; two < 2; ++two) {  // of the four operands along K
      uint4 b[kGroups];
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        b[n] = *reinterpret_cast<const uint4*>(x[n] + offset + half * 128 + two * 16);
      }
#pragma unroll
      for (int rows = 0; rows < 2; ++rows) {
        const uint4& four = codes[half][rows];
#pragma unroll
        for (int one = 0; one < 2; ++one) {
          const uint32_t word = two ? (one ? four.w : four.z) : (one ? four.y : four.x);
          uint32_t a[4];
          spread_codes(word, a);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = multiply_pair(a[i], scale[rows][i % 2]);
#pragma unroll
          for (int n = 0; n < kGroups; ++n) {
            mma(sum[rows][n], a, one ? b[n].z : b[n].x, one ? b[n].w : b[n].y);
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

// A block holds its slab of x and walks over tiles of rows; its warps share a tile's rows and K,
// the blocks of a cluster share K further. Sums meet in shared memory, warp by warp in order, then
// block by block. A cluster's barrier is waited for only a tile later: meanwhile the next is
// computed.
template <int kGroups>
__global__ void __launch_bounds__(most_warps(kGroups) * 32, 1)
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
  Ring<stages(kGroups)> ring(p, share, shared, warp, lane);
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
    float sum[2][kGroups][4] = {};
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
        uint4 codes[2][2];
        uint2 scales;
        ring.next(codes, scales);
        multiply_unit<kGroups>(codes, scales, x_lane, unit * (kUnitCols * 2), sum);
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
          own[(n * 8 + j % 2) * kPitch + rows * 16 + j / 2 * 8] = sum[rows][n][j];
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

int groups_for(int64_t tokens) { return tokens <= 8 ? 1 : tokens <= 16 ? 2 : 4; }

// Bytes of shared memory, piece by piece.
struct SharedLayout {
  int ring, x, sums, exchange;
  SharedLayout(const FP4Plan& plan, int64_t tokens)
      : ring(plan.warps * stages(plan.groups) * kUnitBytes),
        x(static_cast<int>(tokens) * (plan.slab * kUnitCols * 2 + kXPad)),
        sums(plan.warps * plan.groups * 8 * kPitch * 4),
        exchange(plan.split > 1 ? static_cast<int>(tokens) * plan.row_groups * kUnitRows * 2 * 4
                                : 0) {}
  int all() const { return ring + x + sums + exchange; }
};

using Kernel = void (*)(FP4Params);

Kernel kernel_for(int groups) {
  return groups == 1   ? narrowfloat_fp4_few_tokens<1>
         : groups == 2 ? narrowfloat_fp4_few_tokens<2>
                       : narrowfloat_fp4_few_tokens<4>;
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
  for (const int groups : {1, 2, 4}) {
    NF_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel_for(groups)),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes));
  }
  if (!device.overlaps) return device;
  for (int log = 1; log < 4; ++log) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 1u << log;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << log);
    config.blockDim = dim3(most_warps(1) * 32);
    config.dynamicSmemBytes = device.shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&device.clusters[log],
                                       reinterpret_cast<const void*>(kernel_for(1)),
                                       &config) != cudaSuccess) {
      cudaGetLastError();
      device.clusters[log] = 0;  // K is then shared within a block only
    }
  }
  return device;
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

FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, int warps,
                 int split, int row_groups) {
  FP4Plan plan{};
  plan.groups = groups_for(tokens);
  plan.warps = warps;
  plan.split = split;
  plan.row_groups = row_groups;
  plan.cost = std::numeric_limits<double>::infinity();
  const int clusters = device.clusters[log2_of(split)];
  if (clusters == 0 || row_groups > split || row_groups > warps || warps > most_warps(plan.groups))
    return plan;
  const int64_t units = ceil_div(ceil_div(k, kUnitCols), split);  // a block's
  const int k_warps = warps / row_groups;
  const int64_t a_unit = tokens * kUnitCols * 2;
  const int64_t room =
      (device.shared_bytes - SharedLayout(plan, tokens).all()) / a_unit;  // for a slab of x
  if (room < 1) return plan;
  int64_t slab = std::max<int64_t>(std::min(units, room), 1);  // where K is 0 too
  if (slab < units && slab > k_warps) slab -= slab % k_warps;
  plan.slab = static_cast<int>(slab);
  plan.shared_bytes = SharedLayout(plan, tokens).all();
  const int64_t tiles = ceil_div(ceil_div(n, kUnitRows), row_groups);
  const int64_t at_once = std::min<int64_t>(clusters, tiles), rounds = ceil_div(tiles, at_once);
  plan.blocks = static_cast<int>(at_once) * split;

  // Weights and x come through the same pipe, x at about two thirds of the cost since from L2. A
  // tile's sums and barriers cost as much as some units; these figures are estimates.
  constexpr double kX = .7, kTile = 4, kCluster = 2, kSlab = 8;
  const int64_t slabs = ceil_div(units, slab);
  const double x = kX * static_cast<double>(units * a_unit) / kUnitBytes;
  double busy = static_cast<double>(units) * row_groups;
  if (slabs > 1) busy = static_cast<double>(slabs * ceil_div(slab, k_warps) * k_warps) * row_groups;
  double tile = busy + kTile + kCluster * log2_of(split);
  if (slabs > 1) tile += x + kSlab * static_cast<double>(slabs);
  plan.cost = static_cast<double>(rounds) * tile + (slabs > 1 ? 0 : x) + kCluster * log2_of(split);
  return plan;
}

FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k) {
  FP4Plan best{};
  best.cost = std::numeric_limits<double>::infinity();
  for (int warps = most_warps(groups_for(tokens)); warps >= 4; warps /= 2) {
    for (const int split : {1, 2, 4, 8}) {
      for (int row_groups = 1; row_groups <= split; row_groups *= 2) {
        const FP4Plan plan = plan_fp4(device, tokens, n, k, warps, split, row_groups);
        if (plan.cost < best.cost) best = plan;
      }
    }
    if (best.cost < std::numeric_limits<double>::infinity()) break;  // fewer warps only for want of
  }  // shared memory
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
  p.tiles = static_cast<int>(ceil_div(p.row_tiles, plan.row_groups));
  p.split = plan.split, p.row_groups = plan.row_groups;
  p.k_warps = plan.warps / plan.row_groups;
  p.slab = plan.slab;
  p.log_rows = log2_of(plan.row_groups * kUnitRows);
  p.log_slice = p.log_rows - log2_of(plan.split);
  p.x_first = layout.ring;
  p.sums_first = layout.ring + layout.x;
  p.exchange = p.sums_first + layout.sums;
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
  NF_CUDA(cudaLaunchKernelEx(&config, kernel_for(plan.groups), p));
}

void fp4_few_tokens(const FP4Matmul& job, int device, cudaStream_t stream) {
  constexpr int64_t kMost = int64_t{1} << 30;
  NF_CHECK(job.m <= kFewTokens && job.n <= kMost && job.k <= kMost,
           "fp4_few_tokens: expected at most ", kFewTokens, " tokens and sizes up to 2^30, got ",
           job.m, " x ", job.k, " x ", job.n);
  if (job.m == 0 || job.n == 0) return;
  for (int64_t first = 0; first < job.m; first += kMostTokens) {
    FP4Matmul part = job;
    part.m = std::min<int64_t>(kMostTokens, job.m - first);
    part.x = static_cast<const __nv_bfloat16*>(job.x) + first * job.x_stride;
    part.y = static_cast<uint8_t*>(job.y) + first * job.n * size_of(job.y_type);
    fp4_few_tokens(part, plan_fp4(fp4_device(device), part.m, job.n, job.k), device, stream);
  }
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
