// Tensors to FP4: both orientations of a tile from one read.
#include "api/check.h"
#include "quantize/fp4_block_scales.cuh"
#include "quantize/fp4_kernels.h"
#include "quantize/fp4_random.cuh"
#include "quantize/fp4_sides.cuh"
#include "quantize/fp4_tile.cuh"
#include "quantize/kernels.cuh"

namespace narrowfloat {
namespace {

// Largest of the partial maxima, in every lane of a warp.
__device__ inline uint32_t largest(const uint32_t* partials, int count) {
  uint32_t bits = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) bits = max(bits, __ldcg(partials + i));
  return __reduce_max_sync(0xffffffffu, bits);
}

// Tables of what depends on the scale byte alone, and the sides' scales.
__device__ inline void prepare(const Fp4QuantizeParams& p, Shared& s) {
  if (threadIdx.x < 2 * kTileGroups * kTileGroups) {
    s.block[threadIdx.x / 64][threadIdx.x % 64] = 0;
  }
  wait_for_launch_before();
  if (p.job.scales && blockIdx.x == 0 && threadIdx.x < kFp4Scales) {
    float* const at = p.job.scales + threadIdx.x;
    bool taken = false;
    for (const Fp4Side& side : p.job.side) {
      taken |= side.form != Form::none && side.tensor_scale == at;
    }
    if (!taken) *at = 0.f;
  }
  if (p.job.seed && threadIdx.x < kPhiloxKeys) {
    s.keys[threadIdx.x] = philox_keys(p.job.seed, threadIdx.x);
    if (threadIdx.x < 2) s.stream[threadIdx.x] = random_stream(p.job.seed, threadIdx.x);
  }
  if (threadIdx.x < 64) {  // a warp a side
    const int k = threadIdx.x / 32;
    const Fp4Side& side = p.job.side[k];
    if (side.form != Form::none) {
      const SideScale own = side_scale(largest(p.amax[k], p.amax_count[k]), side, p.job.mx);
      if (threadIdx.x % 32 == 0) {
        s.side[k] = own;
        if (blockIdx.x == 0) {
          *side.tensor_scale = own.tensor_scale;
          if (side.alpha) {
            side.alpha[0] = own.tensor_scale * *side.other_scale;
            side.alpha[1] = 0.f;
          }
        }
      }
    }
  }
  __syncthreads();
  const int k = threadIdx.x / kCodes, code = threadIdx.x % kCodes;
  if (p.job.side[k].form != Form::none) {
    const uint32_t value = __float_as_uint(e4m3_value(code)) >> 16;
    s.factors[k][code] = {
        code == 0 || code == kNanScale ? 0.f : multiplier_of(code, s.side[k], p.job.mx),
        value | value << 16};
  }
  __syncthreads();
}

__device__ inline void write_column_sums(const Fp4QuantizeParams& p) {
  if (p.job.column_sums == nullptr) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFp4Threads;
  for (int64_t c = static_cast<int64_t>(blockIdx.x) * kFp4Threads + threadIdx.x; c < p.job.cols;
       c += step) {
    float total = 0.f;
    for (int64_t i = 0; i < p.sum_count; ++i) total += p.sum_partials[i * p.job.cols + c];
    store_real(p.job.column_sums, p.job.sums_type, c, total);
  }
}

// A block's tiles, every gridDim.x'th, the last one first: that is what measuring has read last.
struct Tiles {
  Spot at;  // none: at.row < 0
  int across, step_rows, step_columns;

  __device__ explicit Tiles(const Fp4QuantizeParams& p) : at{-1, 0}, across(max(p.col_tiles, 1)) {
    step_rows = gridDim.x / across, step_columns = gridDim.x % across;
    const int64_t first = p.tiles - 1 - blockIdx.x;
    if (first >= 0) {
      at.row = static_cast<int>(first / across);
      at.column = static_cast<int>(first - int64_t{at.row} * across);
    }
  }
  __device__ bool any() const { return at.row >= 0; }
  __device__ void advance() {
    at.row -= step_rows, at.column -= step_columns;
    if (at.column < 0) at.column += across, --at.row;
  }
};

template <bool kSquare>
__global__ void __launch_bounds__(kFp4Threads, kFp4BlocksPerSm)
    narrowfloat_fp4_quantize(const __grid_constant__ Fp4QuantizeParams p) {
  extern __shared__ __align__(16) unsigned char launch_shared[];
  Shared& s = *reinterpret_cast<Shared*>(launch_shared);
  const Fp4Job& job = p.job;
  const Loader loader(p);
  const auto load = [&](const Tiles& tiles, int to) {
    if (tiles.any()) loader.load(p, tiles.at, s.tile[to]);
    __pipeline_commit();
  };
  Tiles tiles(p);
  load(tiles, 0);  // x was there before its amax was
  prepare(p, s);
  int now = 0;
  Spot at{-1, 0};
  for (; tiles.any(); now ^= 1) {
    __pipeline_wait_prior(0);
    __syncthreads();  // this tile has come, and the one before is done with
    if (at.row >= 0) write_scales(p, s, now ^ 1, at);
    at = tiles.at;
    tiles.advance();
    load(tiles, now ^ 1);
    if constexpr (kSquare) choose_block_scales(p, s, now);
    quantize_side<1, kSquare>(p, s, now, at);
    if (job.side[0].form == Form::operand && job.side[1].form != Form::none) {
      __syncthreads();  // rows are put where the tile is
    }
    quantize_side<0, kSquare>(p, s, now, at);
    if (kSquare && threadIdx.x < kTileGroups * kTileGroups) s.block[now ^ 1][threadIdx.x] = 0;
  }
  __syncthreads();
  if (at.row >= 0) write_scales(p, s, now ^ 1, at);
  write_column_sums(p);
}

template <bool kSquare>
void launch(const Fp4QuantizeParams& p, int blocks, bool overlaps, cudaStream_t stream) {
  auto* kernel = narrowfloat_fp4_quantize<kSquare>;
  const int bytes = kSquare && any_six(p.job) ? sizeof(Shared) : offsetof(Shared, error);
  NF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(kFp4Threads), static_cast<size_t>(bytes),
                                  stream,       &overlap,          overlaps ? 1u : 0u};
  NF_CUDA(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace

void launch_fp4_quantize(const Fp4QuantizeParams& p, int blocks, bool overlaps,
                         cudaStream_t stream) {
  with_bool(p.job.square,
            [&](auto square) { launch<decltype(square)::value>(p, blocks, overlaps, stream); });
}

}  // namespace narrowfloat
