// Tensors to FP8 with one scale each: both copies in one pass.
#include <cooperative_groups.h>

#include "api/check.h"
#include "quantize/amax_history.cuh"
#include "quantize/kernels.cuh"
#include "quantize/tensor_kernels.h"

namespace narrowfloat {
namespace {

// A tile's place, and how much of the matrix and of its padded copies lies there.
template <int kRows>
struct Tile {
  int64_t r0, c0;
  int rows, cols, padded_rows, padded_cols;  // from r0, c0; at most the tile's, may be negative
  uint32_t index, tile_row;

  __device__ Tile(const JobParams& job, uint32_t i) : index(i) {
    tile_row = index / job.col_tiles;
    const uint32_t tile_col = index - tile_row * job.col_tiles;
    r0 = static_cast<int64_t>(tile_row) * kRows;
    c0 = static_cast<int64_t>(tile_col) * kTileCols;
    rows = static_cast<int>(min(job.rows - r0, static_cast<int64_t>(kRows)));
    cols = static_cast<int>(min(job.cols - c0, static_cast<int64_t>(kTileCols)));
    padded_rows = static_cast<int>(min(job.q_columns_ld - r0, static_cast<int64_t>(kRows)));
    padded_cols = static_cast<int>(min(job.q_rows_ld - c0, static_cast<int64_t>(kTileCols)));
  }
};

// A thread's share of a tile: kHalves times 4 rows x 8 columns.
template <typename T, int kRows>
struct TileShare {
  static constexpr int kHalves = kRows / 64;
  Eight<T> v[kHalves][4];

  template <bool kVectors>
  __device__ void load(const JobParams& job, const Tile<kRows>& tile) {
    const int r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 8;
    const T* p = static_cast<const T*>(job.x) + (tile.r0 + r) * job.row_stride +
                 (tile.c0 + c) * job.col_stride;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[h][i] = load8<kVectors>(p + (h * 64 + i) * job.row_stride, job.col_stride,
                                  r + h * 64 + i < tile.rows ? tile.cols - c : 0);
      }
    }
  }
};

// Its codes: row i of half h in words [h][i].
template <int kRows>
struct Codes {
  uint32_t w[kRows / 64][4][2];

  template <Element E, typename T>
  __device__ void encode(const TileShare<T, kRows>& share, float multiplier) {
#pragma unroll
    for (int h = 0; h < kRows / 64; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float2 a = pair(share.v[h][i], 2 * k), b = pair(share.v[h][i], 2 * k + 1);
          w[h][i][k] =
              encode4<E>(a.x * multiplier, a.y * multiplier, b.x * multiplier, b.y * multiplier);
        }
      }
    }
  }
};

// Where a column's word of four rows lies in shared memory: the XOR spreads a warp's 16 column
// groups over the banks, in writing and in reading.
template <int kRows>
__device__ inline int shared_word(int column, int row_group) {
  constexpr int kWords = kRows / 4;
  return column * kWords + (row_group ^ ((column / 8 * 2) & (kWords - 1)));
}

template <int kRows>
__device__ inline void write_rows(const JobParams& job, const Tile<kRows>& tile,
                                  const Codes<kRows>& codes) {
  const int r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 8;
  if (c >= tile.padded_cols) return;
  uint8_t* row = job.q_rows + (tile.r0 + r) * job.q_rows_ld + tile.c0 + c;
#pragma unroll
  for (int h = 0; h < kRows / 64; ++h) {
    if (r + h * 64 >= tile.padded_rows) return;  // padded to 16: four rows are in or out together
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint2*>(row + (h * 64 + i) * job.q_rows_ld) =
          make_uint2(codes.w[h][i][0], codes.w[h][i][1]);
    }
  }
}

template <int kRows>
__device__ inline void write_columns(const JobParams& job, const Tile<kRows>& tile,
                                     const Codes<kRows>& codes, uint32_t* shared) {
#pragma unroll
  for (int h = 0; h < kRows / 64; ++h) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Bytes4x4 t =
          transpose_bytes(codes.w[h][0][k], codes.w[h][1][k], codes.w[h][2][k], codes.w[h][3][k]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        shared[shared_word<kRows>(threadIdx.x % 16 * 8 + k * 4 + j, threadIdx.x / 16 + h * 16)] =
            t.column[j];
      }
    }
  }
  __syncthreads();
  constexpr int kWords = kRows / 4;  // a column's run in words
  constexpr int kColumnsAtOnce = kThreads / kWords;
  const int word = threadIdx.x % kWords, first = threadIdx.x / kWords;
  if (word * 4 >= tile.padded_rows) return;
  uint8_t* column = job.q_columns + (tile.c0 + first) * job.q_columns_ld + tile.r0 + word * 4;
  const int64_t step = kColumnsAtOnce * job.q_columns_ld;
#pragma unroll 4
  for (int i = 0; i < kTileCols / kColumnsAtOnce; ++i, column += step) {
    if (first + i * kColumnsAtOnce < tile.padded_cols) {
      *reinterpret_cast<uint32_t*>(column) =
          shared[shared_word<kRows>(first + i * kColumnsAtOnce, word)];
    }
  }
}

// Column sums of a tile into sum_partials[row of tiles].
template <typename T, int kRows>
__device__ inline void sum_tile(const JobParams& job, const Tile<kRows>& tile,
                                const TileShare<T, kRows>& share, float* shared) {
  float sum[8] = {};
#pragma unroll
  for (int h = 0; h < TileShare<T, kRows>::kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 f = pair(share.v[h][i], j);
        sum[2 * j] += f.x, sum[2 * j + 1] += f.y;
      }
    }
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
    if (lane < 16) shared[warp * kTileCols + lane * 8 + j] = sum[j];
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < tile.cols) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) total += shared[i * kTileCols + threadIdx.x];
    job.sum_partials[tile.tile_row * job.cols + tile.c0 + threadIdx.x] = total;
  }
}

// The jobs' scales, in every thread, from the partial maxima, the history, or as given. One warp a
// block reads the partials, several a lane at once: all blocks do so together, and more of them
// queue at the few L2 lines that hold them.
// done: where the launch before quantized with the scales that the histories gave, and they hold.
__device__ inline void resolve_scales(const QuantizeParams& p, bool done_by_history,
                                      float (&multiplier)[kMaxJobs], bool (&done)[kMaxJobs]) {
  __shared__ float shared[kMaxJobs];
  __shared__ bool shared_done[kMaxJobs];
  if (threadIdx.x < 32) {
    uint32_t bits[kMaxJobs] = {};
    const int longest = max(p.job[0].amax_count, p.job[1].amax_count);
    for (int first = threadIdx.x; first < longest; first += 8 * 32) {
      uint32_t v[kMaxJobs][8];
#pragma unroll
      for (int j = 0; j < kMaxJobs; ++j) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int at = first + i * 32;
          v[j][i] = at < p.job[j].amax_count ? __ldcg(p.job[j].amax_partials + at) : 0;
        }
      }
#pragma unroll
      for (int j = 0; j < kMaxJobs; ++j) {
#pragma unroll
        for (int i = 0; i < 8; ++i) bits[j] = max(bits[j], v[j][i]);
      }
    }
#pragma unroll
    for (int j = 0; j < kMaxJobs; ++j) {
      const JobParams& job = p.job[j];
      if (job.scale == nullptr) continue;
      float own = job.scale_given ? job.scale[1] : 0.f;
      bool own_done = job.scale_given && done_by_history;
      if (!job.scale_given) {
        uint32_t amax = __reduce_max_sync(0xffffffffu, bits[j]);
        if (job.history.row) {
          const float covered = covered_by(job.history);
          const bool keeps = holds(job.history, covered, amax);
          if (blockIdx.x == 0 && threadIdx.x == 0) join(job.history, amax);
          if (keeps) amax = __float_as_uint(covered);
          own_done = keeps && done_by_history;
        }
        const float2 s = scale_from_amax(amax, job.format);
        own = s.y;
        if (blockIdx.x == 0 && threadIdx.x == 0) {
          *reinterpret_cast<float4*>(job.scale) = make_float4(s.x, s.y, 0.f, 0.f);
        }
      }
      if (threadIdx.x == 0) shared[j] = own, shared_done[j] = own_done;
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kMaxJobs; ++j) multiplier[j] = shared[j], done[j] = shared_done[j];
}

// The job's tiles that a block owns: every gridDim.x-th from the first.
struct OwnTiles {
  uint32_t first, count;

  __device__ explicit OwnTiles(const JobParams& job) {
    first = blockIdx.x + job.first_block;
    if (first >= gridDim.x) first -= gridDim.x;
    count = job.tiles > first ? (job.tiles - 1 - first) / gridDim.x + 1 : 0;
  }

  template <int kRows>
  __device__ Tile<kRows> at(const JobParams& job, uint32_t i) const {
    return Tile<kRows>(job, first + i * gridDim.x);
  }
};

template <typename T, int kRows>
__device__ inline void write_tile(const JobParams& job, const Tile<kRows>& tile,
                                  const TileShare<T, kRows>& share, float multiplier,
                                  uint32_t* shared) {
  Codes<kRows> codes;
  if (job.format == Element::e4m3) {
    codes.template encode<Element::e4m3>(share, multiplier);
  } else {
    codes.template encode<Element::e5m2>(share, multiplier);
  }
  if (job.q_rows) write_rows(job, tile, codes);
  if (job.q_columns) {
    __syncthreads();  // the tile before has been read out of shared memory
    write_columns(job, tile, codes, shared);
  }
}

__device__ inline void write_column_sums(const JobParams& job) {
  if (job.column_sums == nullptr) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; c < job.cols;
       c += step) {
    float total = 0.f;
    for (int64_t i = 0; i < job.sum_count; ++i) total += job.sum_partials[i * job.cols + c];
    store_real(job.column_sums, job.sums_type, c, total);
  }
}

// Tiles of up to two tensors, spread over a persistent grid, from last to first: what was measured
// last still lies in L2. While the launch that measures ends, a block fetches its first tile, as
// far as registers go.
template <typename T, int kRows, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    narrowfloat_quantize(const __grid_constant__ QuantizeParams p) {
  constexpr bool kFetchesFirst = sizeof(T) * kRows <= 128;
  __shared__ uint32_t shared[kTileCols * kRows / 4];
  TileShare<T, kRows> share;
  bool fetched = false;
  const bool again = p.job[0].history.row || p.job[1].history.row;  // where it has to
  if constexpr (kFetchesFirst) {
#pragma unroll 1
    for (int j = p.count - 1; j >= 0 && !fetched && !again; --j) {
      const OwnTiles own(p.job[j]);
      if (own.count == 0) continue;
      share.template load<kVectors>(p.job[j], own.at<kRows>(p.job[j], own.count - 1));
      fetched = true;
    }
  }
  wait_for_launch_before();
  float multiplier[kMaxJobs];
  bool done[kMaxJobs];
  resolve_scales(p, again, multiplier, done);
#pragma unroll 1
  for (int j = p.count - 1; j >= 0; --j) {
    const JobParams& job = p.job[j];
    const OwnTiles own(job);
    for (uint32_t i = (j ? done[1] : done[0]) ? 0 : own.count; i-- > 0;) {
      const Tile<kRows> tile = own.at<kRows>(job, i);
      if (!fetched) share.template load<kVectors>(job, tile);
      fetched = false;
      write_tile(job, tile, share, j ? multiplier[1] : multiplier[0], shared);
    }
    write_column_sums(job);
  }
}

// Measures up to two tensors and quantizes them with the scales of their histories, from first to
// last: the end lies in L2 if they do not hold.
template <typename T, int kRows, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    narrowfloat_quantize_and_amax(const __grid_constant__ QuantizeParams p) {
  let_next_launch_start();
  __shared__ uint32_t shared[kTileCols * kRows / 4];
  __shared__ uint32_t reduce[kThreads / 32];
#pragma unroll 1
  for (int j = 0; j < p.count; ++j) {
    const JobParams& job = p.job[j];
    float multiplier = 0.f;
    bool known = job.scale_given;
    if (known) {
      multiplier = job.scale[1];  // 0 or NaN too
    } else if (const float covered = covered_by(job.history); covered > 0.f) {
      multiplier = scale_from_amax(__float_as_uint(covered), job.format).y;
      known = true;
    }
    Amax<T> amax;
    const OwnTiles own(job);
    for (uint32_t i = 0; i < own.count; ++i) {
      const Tile<kRows> tile = own.at<kRows>(job, i);
      TileShare<T, kRows> share;
      share.template load<kVectors>(job, tile);
      if (!job.scale_given) {
#pragma unroll
        for (int h = 0; h < TileShare<T, kRows>::kHalves; ++h) {
#pragma unroll
          for (int r = 0; r < 4; ++r) amax.add(share.v[h][r]);
        }
      }
      if (job.sum_partials) sum_tile(job, tile, share, reinterpret_cast<float*>(shared));
      if (known) write_tile(job, tile, share, multiplier, shared);
    }
    if (job.scale_given) continue;
    __syncthreads();  // of the job before, `reduce` has been read
    const uint32_t bits = block_max(amax.bits(), reduce);
    if (threadIdx.x == 0) job.amax_partials[blockIdx.x] = bits;
  }
}

// The same for tensors so small that every block of a resident grid has one tile: in one launch,
// which reads each tile once and keeps it in registers while the grid meets for the maxima.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    narrowfloat_amax_and_quantize(const __grid_constant__ QuantizeParams p) {
  constexpr int kRows = kRowsOfSmall;
  __shared__ uint32_t shared[kTileCols * kRows / 4];
  __shared__ uint32_t reduce[kThreads / 32];
  const bool second = blockIdx.x >= p.job[0].tiles;
  const JobParams& job = second ? p.job[1] : p.job[0];
  const Tile<kRows> tile(job, blockIdx.x - (second ? p.job[0].tiles : 0));
  TileShare<T, kRows> share;
  share.template load<kVectors>(job, tile);
  if (!job.scale_given) {
    Amax<T> amax;
#pragma unroll
    for (int r = 0; r < 4; ++r) amax.add(share.v[0][r]);
    if (job.sum_partials) sum_tile(job, tile, share, reinterpret_cast<float*>(shared));
    const uint32_t bits = block_max(amax.bits(), reduce);
    if (threadIdx.x == 0) job.amax_partials[tile.index] = bits;
  }
  cooperative_groups::this_grid().sync();
  float multiplier[kMaxJobs];
  bool done[kMaxJobs];
  resolve_scales(p, false, multiplier, done);
  write_tile(job, tile, share, second ? multiplier[1] : multiplier[0], shared);
#pragma unroll 1
  for (int j = 0; j < p.count; ++j) write_column_sums(p.job[j]);
}

template <typename T, int kRows, bool kVectors>
void launch_tiles(const QuantizeParams& params, bool overlaps, int blocks, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(kThreads), 0,
                                  stream,       &overlap,       overlaps ? 1u : 0u};
  NF_CUDA(cudaLaunchKernelEx(&config, narrowfloat_quantize<T, kRows, kVectors>, params));
}

// f(type, rows of a tile, vectors) as types; 64 rows of fp32 are the most
template <typename F>
void with_tile(Real type, int tile_rows, bool vectors, F&& f) {
  with_type(type, [&](auto t) {
    with_bool(vectors, [&](auto v) {
      if constexpr (sizeof(t) == 2) {
        if (tile_rows == 128) {
          f(t, std::integral_constant<int, 128>(), v);
          return;
        }
      }
      f(t, std::integral_constant<int, 64>(), v);
    });
  });
}

}  // namespace

void launch_quantize(const QuantizeParams& params, Real type, int tile_rows, bool overlaps,
                     bool vectors, int blocks, cudaStream_t stream) {
  with_tile(type, tile_rows, vectors, [&](auto t, auto rows, auto v) {
    launch_tiles<decltype(t), decltype(rows)::value, decltype(v)::value>(params, overlaps, blocks,
                                                                         stream);
  });
}

void launch_quantize_and_amax(const QuantizeParams& params, Real type, int tile_rows, bool vectors,
                              int blocks, cudaStream_t stream) {
  with_tile(type, tile_rows, vectors, [&](auto t, auto rows, auto v) {
    narrowfloat_quantize_and_amax<decltype(t), decltype(rows)::value, decltype(v)::value>
        <<<blocks, kThreads, 0, stream>>>(params);
  });
  NF_CUDA(cudaGetLastError());
}

void launch_amax_and_quantize(const QuantizeParams& params, Real type, bool vectors,
                              cudaStream_t stream) {
  const dim3 blocks(params.job[0].tiles + params.job[1].tiles);
  with_type(type, [&](auto t) {
    with_bool(vectors, [&](auto v) {
      auto* kernel = narrowfloat_amax_and_quantize<decltype(t), decltype(v)::value>;
      void* args[] = {const_cast<QuantizeParams*>(&params)};
      NF_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(kernel), blocks, dim3(kThreads),
                                          args, 0, stream));
    });
  });
}

}  // namespace narrowfloat
