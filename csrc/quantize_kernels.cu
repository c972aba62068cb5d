// Decides how a tensor becomes FP8 on the device: one pass that measures, one that writes both copies.
#include <cooperative_groups.h>

#include "check.h"
#include "numerics.cuh"
#include "quantize_kernels.h"

namespace narrowfloat {
namespace {

template <typename T>
__device__ inline uint32_t bits_of(const T* p) {
  return *reinterpret_cast<const uint16_t*>(p);
}

// Elements (r, c) .. (r, c + 7), zero beyond the matrix.
template <typename T>
__device__ inline Eight<T> load8(const JobParams& job, int64_t r, int64_t c) {
  Eight<T> v;
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords; ++i) v.w[i] = 0;
  if (r >= job.rows || c >= job.cols) return v;
  const T* p = static_cast<const T*>(job.x) + r * job.row_stride + c * job.col_stride;
  if (job.vectors) {  // then cols is a multiple of 8
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords / 4; ++i) {
      const uint4 q = reinterpret_cast<const uint4*>(p)[i];
      v.w[4 * i] = q.x, v.w[4 * i + 1] = q.y, v.w[4 * i + 2] = q.z, v.w[4 * i + 3] = q.w;
    }
    return v;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (c + j >= job.cols) break;
    const T* e = p + j * job.col_stride;
    if constexpr (sizeof(T) == 4) {
      v.w[j] = __float_as_uint(*e);
    } else {
      v.w[j / 2] |= bits_of(e) << (16 * (j % 2));
    }
  }
  return v;
}

// The largest of the block's values, in every thread. `shared` holds a word a warp.
__device__ inline uint32_t block_max(uint32_t bits, uint32_t* shared) {
  bits = __reduce_max_sync(0xffffffffu, bits);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = threadIdx.x % 32 < kThreads / 32 ? shared[threadIdx.x % 32] : 0;
  return __reduce_max_sync(0xffffffffu, bits);
}

// A block reads strips of 256 columns, its slice of every band of rows, the bands from first to
// last: what the L2 cache still holds afterwards is the end of the matrix.
template <typename T, bool kSums>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(false))
    narrowfloat_measure(const __grid_constant__ JobParams job, int64_t slices) {
  constexpr int kUnroll = 32 / Eight<T>::kWords;  // 128 bytes in flight a thread
  constexpr int kWarps = kThreads / 32;
  constexpr int kBand = kWarps * kUnroll;
  __shared__ uint32_t reduce[kWarps];
  __shared__ float sums[kSums ? kWarps : 1][kSums ? kStripCols : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strips = (job.cols + kStripCols - 1) / kStripCols;
  const int64_t strips_at_once = gridDim.x / slices;
  const int64_t slice = blockIdx.x / strips_at_once;
  Amax<T> amax;
  for (int64_t strip = blockIdx.x % strips_at_once; strip < strips && slice < slices;
       strip += strips_at_once) {
    const int64_t c = strip * kStripCols + lane * 8;
    [[maybe_unused]] float sum[8] = {};
    for (int64_t band = slice; band * kBand < job.rows; band += slices) {
      Eight<T> v[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) v[i] = load8<T>(job, band * kBand + i * kWarps + warp, c);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        amax.add(v[i]);
        if constexpr (kSums) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 f = pair(v[i], j);
            sum[2 * j] += f.x, sum[2 * j + 1] += f.y;
          }
        }
      }
    }
    if constexpr (kSums) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[warp][lane * 8 + j] = sum[j];
      __syncthreads();
      const int64_t column = strip * kStripCols + threadIdx.x;
      if (column < job.cols) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) total += sums[i][threadIdx.x];
        job.sum_partials[slice * job.cols + column] = total;
      }
    }
  }
  const uint32_t bits = block_max(amax.bits(), reduce);
  if (threadIdx.x == 0 && job.amax_partials) job.amax_partials[blockIdx.x] = bits;
}

// A thread's share of a tile: kHalves times 4 rows x 8 columns.
template <typename T, int kRows>
struct TileShare {
  static constexpr int kHalves = kRows / 64;
  Eight<T> v[kHalves][4];

  __device__ void load(const JobParams& job, int64_t tile) {
    const int64_t r0 = tile / job.col_tiles * kRows + threadIdx.x / 16 * 4;
    const int64_t c = tile % job.col_tiles * kTileCols + threadIdx.x % 16 * 8;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[h][i] = load8<T>(job, r0 + h * 64 + i, c);
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

template <Element E, typename T, int kRows>
__device__ inline void write_tile(const JobParams& job, int64_t tile, float multiplier,
                                  const TileShare<T, kRows>& share, uint32_t* shared) {
  const int64_t r0 = tile / job.col_tiles * kRows, c0 = tile % job.col_tiles * kTileCols;
  const int column_group = threadIdx.x % 16;
  const int64_t c = c0 + column_group * 8;
#pragma unroll
  for (int h = 0; h < TileShare<T, kRows>::kHalves; ++h) {
    const int row_group = threadIdx.x / 16 + h * 16;
    uint32_t code[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float2 a = pair(share.v[h][i], 2 * k), b = pair(share.v[h][i], 2 * k + 1);
        code[i][k] = encode4<E>(a.x * multiplier, a.y * multiplier, b.x * multiplier,
                                b.y * multiplier);
      }
      const int64_t r = r0 + row_group * 4 + i;
      if (job.q_rows && r < job.q_columns_ld && c < job.q_rows_ld) {
        *reinterpret_cast<uint2*>(job.q_rows + r * job.q_rows_ld + c) =
            make_uint2(code[i][0], code[i][1]);
      }
    }
    if (job.q_columns) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const Bytes4x4 t = transpose_bytes(code[0][k], code[1][k], code[2][k], code[3][k]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          shared[shared_word<kRows>(column_group * 8 + k * 4 + j, row_group)] = t.column[j];
        }
      }
    }
  }
  if (!job.q_columns) return;
  __syncthreads();
  constexpr int kWords = kRows / 4;               // a column's run in words
  constexpr int kColumnsAtOnce = kThreads / kWords;
  const int word = threadIdx.x % kWords;
  const int64_t r = r0 + word * 4;
#pragma unroll 4
  for (int i = 0; i < kTileCols / kColumnsAtOnce; ++i) {
    const int column = threadIdx.x / kWords + i * kColumnsAtOnce;
    if (c0 + column < job.q_rows_ld && r < job.q_columns_ld) {
      *reinterpret_cast<uint32_t*>(job.q_columns + (c0 + column) * job.q_columns_ld + r) =
          shared[shared_word<kRows>(column, word)];
    }
  }
}

// Column sums of a tile into sum_partials[row tile].
template <typename T, int kRows>
__device__ inline void sum_tile(const JobParams& job, int64_t tile,
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
  const int64_t column = tile % job.col_tiles * kTileCols + threadIdx.x;
  if (threadIdx.x < kTileCols && column < job.cols) {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) total += shared[i * kTileCols + threadIdx.x];
    job.sum_partials[tile / job.col_tiles * job.cols + column] = total;
  }
}

// The job's {scale, multiplier}, in every thread, from the partial maxima or as given.
__device__ inline float2 resolve_scale(const JobParams& job, uint32_t* shared) {
  if (job.scale_given) return make_float2(job.scale[0], job.scale[1]);
  uint32_t bits = 0;
  for (int i = threadIdx.x; i < job.amax_count; i += kThreads) {
    bits = max(bits, job.amax_partials[i]);
  }
  const float2 s = scale_from_amax(block_max(bits, shared), job.format);
  if (blockIdx.x == 0 && threadIdx.x == 0) job.scale[0] = s.x, job.scale[1] = s.y;
  return s;
}

// Tiles of up to two tensors, spread over a persistent grid. With kMeasures the grid first takes
// every amax, meets at a barrier, and then walks its tiles backwards: the last is still in its
// registers, the ones before in L2.
template <typename T, int kRows, bool kMeasures>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kMeasures))
    narrowfloat_quantize(const __grid_constant__ QuantizeParams p) {
  constexpr int kWords = kTileCols * kRows / 4;
  constexpr int kSumWords = kMeasures ? kThreads / 32 * kTileCols : 0;
  __shared__ uint32_t shared[kWords > kSumWords ? kWords : kSumWords];
  __shared__ uint32_t reduce[kThreads / 32];
  const int64_t tiles = p.tiles[0] + p.tiles[1];
  TileShare<T, kRows> share;
  int64_t in_registers = -1;
  if constexpr (kMeasures) {
    Amax<T> amax[kMaxJobs];
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int j = tile >= p.tiles[0];
      const JobParams& job = p.job[j];
      if (job.scale_given) continue;
      const int64_t own = tile - (j ? p.tiles[0] : 0);
      share.load(job, own);
      in_registers = tile;
#pragma unroll
      for (int h = 0; h < TileShare<T, kRows>::kHalves; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (j) {
            amax[1].add(share.v[h][i]);
          } else {
            amax[0].add(share.v[h][i]);
          }
        }
      }
      if (job.sum_partials) sum_tile<T, kRows>(job, own, share, reinterpret_cast<float*>(shared));
    }
#pragma unroll
    for (int j = 0; j < kMaxJobs; ++j) {
      if (p.job[j].amax_partials == nullptr) continue;
      const uint32_t bits = block_max(amax[j].bits(), reduce);
      if (threadIdx.x == 0) p.job[j].amax_partials[blockIdx.x] = bits;
    }
    cooperative_groups::this_grid().sync();
  }
  float multiplier[kMaxJobs];
#pragma unroll
  for (int j = 0; j < kMaxJobs; ++j) {
    multiplier[j] = p.job[j].scale ? resolve_scale(p.job[j], reduce).y : 1.f;
  }
  const int64_t own_tiles = tiles > blockIdx.x ? (tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;
  for (int64_t i = own_tiles - 1; i >= 0; --i) {
    const int64_t tile = blockIdx.x + i * gridDim.x;
    const int j = tile >= p.tiles[0];
    const JobParams& job = p.job[j];
    const int64_t own = tile - (j ? p.tiles[0] : 0);
    if (tile != in_registers) {
      share.load(job, own);
      in_registers = -1;
    }
    __syncthreads();  // the tile before has been read out of shared memory
    const float m = j ? multiplier[1] : multiplier[0];
    if (job.format == Element::e4m3) {
      write_tile<Element::e4m3, T, kRows>(job, own, m, share, shared);
    } else {
      write_tile<Element::e5m2, T, kRows>(job, own, m, share, shared);
    }
  }
#pragma unroll
  for (int j = 0; j < kMaxJobs; ++j) {
    const JobParams& job = p.job[j];
    if (job.column_sums == nullptr) continue;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; c < job.cols;
         c += step) {
      float total = 0.f;
      for (int64_t i = 0; i < job.sum_count; ++i) total += job.sum_partials[i * job.cols + c];
      store_real(job.column_sums, job.sums_type, c, total);
    }
  }
}

// A block sums whole columns that lie contiguous in memory.
__global__ void __launch_bounds__(kThreads)
    narrowfloat_sums_of_contiguous(const __grid_constant__ JobParams job, Real type) {
  __shared__ float partial[kThreads / 32];
  for (int64_t c = blockIdx.x; c < job.cols; c += gridDim.x) {
    float sum = 0.f;
    for (int64_t r = threadIdx.x; r < job.rows; r += kThreads) {
      sum += load_real(job.x, type, c * job.col_stride + r * job.row_stride);
    }
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float total = 0.f;
      for (int i = 0; i < kThreads / 32; ++i) total += partial[i];
      store_real(job.column_sums, job.sums_type, c, total);
    }
  }
}

template <typename F>
void with_type(Real type, F&& f) {
  if (type == Real::f32) {
    f(float());
  } else if (type == Real::bf16) {
    f(__nv_bfloat16());
  } else {
    f(__half());
  }
}

template <typename T, int kRows, bool kMeasures>
void launch_tiles(const QuantizeParams& params, int blocks, cudaStream_t stream) {
  auto* kernel = narrowfloat_quantize<T, kRows, kMeasures>;
  if constexpr (kMeasures) {
    void* args[] = {const_cast<QuantizeParams*>(&params)};
    NF_CUDA(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(kernel), dim3(blocks),
                                        dim3(kThreads), args, 0, stream));
  } else {
    kernel<<<blocks, kThreads, 0, stream>>>(params);
    NF_CUDA(cudaGetLastError());
  }
}

}  // namespace

void launch_measure(const JobParams& job, Real type, int blocks, int64_t slices,
                    cudaStream_t stream) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if (job.sum_partials) {
      narrowfloat_measure<T, true><<<blocks, kThreads, 0, stream>>>(job, slices);
    } else {
      narrowfloat_measure<T, false><<<blocks, kThreads, 0, stream>>>(job, slices);
    }
  });
  NF_CUDA(cudaGetLastError());
}

void launch_quantize(const QuantizeParams& params, Real type, int tile_rows, bool measures,
                     int blocks, cudaStream_t stream) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      if (tile_rows == 128) {
        measures ? launch_tiles<T, 128, true>(params, blocks, stream)
                 : launch_tiles<T, 128, false>(params, blocks, stream);
        return;
      }
    }
    measures ? launch_tiles<T, 64, true>(params, blocks, stream)
             : launch_tiles<T, 64, false>(params, blocks, stream);
  });
}

void launch_sums_of_contiguous(const JobParams& job, Real type, cudaStream_t stream) {
  const int blocks = static_cast<int>(job.cols < 4096 ? (job.cols ? job.cols : 1) : 4096);
  narrowfloat_sums_of_contiguous<<<blocks, kThreads, 0, stream>>>(job, type);
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
