// The finite amax of a tensor before it becomes FP4, also of its rotation, and the sums of its
// columns.
#include "api/check.h"
#include "quantize/fp4_kernels.h"
#include "quantize/fp4_numerics.cuh"
#include "quantize/kernels.cuh"

namespace narrowfloat {
namespace {

// A lane's columns of sixteen rows, as loaded: 8 bytes a row.
template <typename T>
struct Sixteen {
  static constexpr int kColumns = 8 / sizeof(T);
  uint2 row[kGroup];

  __device__ void load(const Fp4Job& job, bool aligned, int64_t r, int64_t c) {
    const T* p = static_cast<const T*>(job.x) + r * job.row_stride + c * job.col_stride;
    const int rows = static_cast<int>(min(job.rows - r, static_cast<int64_t>(kGroup)));
    const int cols = static_cast<int>(min(job.cols - c, static_cast<int64_t>(kColumns)));
    if (aligned && rows == kGroup && cols == kColumns) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        row[i] = *reinterpret_cast<const uint2*>(p + i * job.row_stride);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      uint32_t w[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (i >= rows || j >= cols) continue;
        const T* e = p + i * job.row_stride + j * job.col_stride;
        if constexpr (sizeof(T) == 4) {
          w[j] = __float_as_uint(*e);
        } else {
          w[j / 2] |= bits_of(e) << (16 * (j % 2));
        }
      }
      row[i] = make_uint2(w[0], w[1]);
    }
  }

  __device__ float exact(int i, int j) const {  // as it lies in memory
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(j ? row[i].y : row[i].x);
    } else {
      const float2 f = pair_to_float(j < 2 ? row[i].x : row[i].y, T());
      return j % 2 ? f.y : f.x;
    }
  }
  __device__ float value(int i, int j) const {  // in bf16
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return exact(i, j);
    return __bfloat162float(__float2bfloat16_rn(exact(i, j)));
  }
  __device__ void column(int j, float (&x)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[i] = value(i, j);
  }
  // The same, with what is finite kept so: where a maximum came to Inf.
  __device__ void finite_column(int j, float (&x)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      x[i] = __bfloat162float(__float2bfloat16_rn(within_bf16(exact(i, j))));
    }
  }
};

__device__ inline float finite_amax(const float (&x)[kGroup]) {
  float m = 0.f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (fabsf(x[i]) <= kFltMax) m = fmaxf(m, fabsf(x[i]));
  }
  return m;
}

// The largest finite magnitudes so far, of the values and of their rotation along the sixteen rows.
// A maximum passes over NaN; where it comes to Inf, which is rare, each value is looked at.
template <typename T>
__device__ inline void add_plain(const Sixteen<T>& v, float& amax) {
  float m = 0.f;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    uint32_t w = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) w = max_abs_nan2(w, max_abs_nan2(v.row[i].x, v.row[i].y));
    m = __uint_as_float(larger_half(w));
  } else {
#pragma unroll
    for (int j = 0; j < Sixteen<T>::kColumns; ++j) {
      float x[kGroup];
      v.column(j, x);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) m = max_abs_nan(m, x[i]);
    }
  }
  if (!(m <= kFltMax)) {
    m = 0.f;
#pragma unroll
    for (int j = 0; j < Sixteen<T>::kColumns; ++j) {
      float x[kGroup];
      v.finite_column(j, x);
      m = fmaxf(m, finite_amax(x));
    }
  }
  amax = fmaxf(amax, m);
}

template <typename T>
__device__ inline void add_rotated(const Sixteen<T>& v, float& amax) {
#pragma unroll
  for (int j = 0; j < Sixteen<T>::kColumns; ++j) {
    float x[kGroup];
    v.column(j, x);
    rotate_stages<kGroup / 2>(x);
    uint32_t bits[kGroup / 2];
#pragma unroll
    for (int i = 0; i < kGroup / 2; ++i) {  // see rotate()
      bits[i] = __float_as_uint(__fadd_rn(fabsf(x[i]), fabsf(x[i + kGroup / 2])));
    }
    float m = __uint_as_float(largest_of(bits));
    if (!(m <= kFltMax)) {
      v.finite_column(j, x);
      rotate(x);
      m = finite_amax(x);
    }
    amax = fmaxf(amax, m);
  }
}

__device__ inline uint32_t fp4_block_max(float amax, uint32_t* shared) {
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(amax));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = bits;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu,
                           threadIdx.x % 32 < kFp4Threads / 32 ? shared[threadIdx.x % 32] : 0);
}

// A unit is a strip of columns of a band of rows, a group of 16 rows a warp: what is rotated along
// the rows lies in one thread. Blocks take every p.blocks'th, or where columns are summed strips,
// each in slices of its bands; either way the bands from first to last, see Tiles.
template <typename T>
__global__ void __launch_bounds__(kFp4Threads, kFp4AmaxBlocksPerSm)
    narrowfloat_fp4_amax(const __grid_constant__ Fp4AmaxParams p) {
  let_next_launch_start();
  constexpr int kColumns = Sixteen<T>::kColumns, kStrip = 32 * kColumns;
  constexpr int kWarps = kFp4Threads / 32;
  __shared__ uint32_t reduce[kWarps];
  __shared__ float sums[kWarps][kStrip];
  const Fp4Job& job = p.job;
  const bool rotates = p.amax[1] && job.side[1].rotated, adds = p.sum_partials;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strips = max((job.cols + kStrip - 1) / kStrip, int64_t{1});
  const int64_t bands = (job.rows + kFp4Band - 1) / kFp4Band;
  const int64_t at_once = adds ? p.blocks / p.slices : strips;
  const int64_t first_band = blockIdx.x / at_once;
  const int64_t step_bands = adds ? p.slices : p.blocks / strips;
  const int64_t step_strips = adds ? 0 : p.blocks % strips;
  float plain = 0.f, rotated = 0.f;
  for (int64_t first = blockIdx.x % at_once;
       first < strips && first_band < (adds ? p.slices : bands); first += at_once) {
    float sum[kColumns] = {};
    int64_t strip = first;
    for (int64_t band = first_band; band < bands; band += step_bands) {
      const int64_t r = band * kFp4Band + warp * kGroup;
      if (r < job.rows) {
        Sixteen<T> v;
        v.load(job, p.aligned, r, strip * kStrip + lane * kColumns);
        if (adds) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
#pragma unroll
            for (int i = 0; i < kGroup; ++i) sum[j] += v.exact(i, j);
          }
        }
        add_plain(v, plain);
        if (rotates) add_rotated(v, rotated);
      }
      strip += step_strips;
      if (strip >= strips) strip -= strips, ++band;
    }
    if (adds) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[warp][lane * kColumns + j] = sum[j];
      __syncthreads();
      const int64_t column = strip * kStrip + threadIdx.x;
      if (static_cast<int>(threadIdx.x) < kStrip && column < job.cols) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) total += sums[i][threadIdx.x];
        p.sum_partials[first_band * job.cols + column] = total;
      }
    }
  }
  const uint32_t plain_bits = fp4_block_max(plain, reduce);
  const uint32_t rotated_bits = rotates ? fp4_block_max(rotated, reduce) : plain_bits;
  if (threadIdx.x == 0) {
    if (p.amax[0]) p.amax[0][blockIdx.x] = plain_bits;
    if (p.amax[1]) p.amax[1][blockIdx.x] = rotated_bits;
  }
}

__device__ inline float real_at(const Fp4Job& job, int64_t r, int64_t c) {
  if (c >= job.cols) return 0.f;
  const float v = load_real(job.x, job.type, r * job.row_stride + c * job.col_stride);
  return __bfloat162float(__float2bfloat16_rn(within_bf16(v)));
}

__global__ void __launch_bounds__(kFp4Threads)
    narrowfloat_fp4_amax_rotated_rows(const __grid_constant__ Fp4AmaxParams p) {
  __shared__ uint32_t reduce[kFp4Threads / 32];
  const Fp4Job& job = p.job;
  const int64_t groups = (job.cols + kGroup - 1) / kGroup, all = job.rows * groups;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFp4Threads;
  float amax = 0.f;
  for (int64_t g = static_cast<int64_t>(blockIdx.x) * kFp4Threads + threadIdx.x; g < all;
       g += step) {
    float x[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[i] = real_at(job, g / groups, g % groups * kGroup + i);
    rotate(x);
    amax = fmaxf(amax, finite_amax(x));
  }
  const uint32_t bits = fp4_block_max(amax, reduce);
  if (threadIdx.x == 0) p.amax[0][blockIdx.x] = bits;
}

}  // namespace

void launch_fp4_amax(const Fp4AmaxParams& p, cudaStream_t stream) {
  with_type(p.job.type, [&](auto t) {
    narrowfloat_fp4_amax<decltype(t)><<<p.blocks, kFp4Threads, 0, stream>>>(p);
  });
  NF_CUDA(cudaGetLastError());
}

void launch_fp4_amax_rotated_rows(const Fp4AmaxParams& p, cudaStream_t stream) {
  narrowfloat_fp4_amax_rotated_rows<<<p.blocks, kFp4Threads, 0, stream>>>(p);
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
