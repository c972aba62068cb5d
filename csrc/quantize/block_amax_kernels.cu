// The amax of each row and each column of a tensor in one read, and how partial sums end.
#include "api/check.h"
#include "quantize/block_kernels.h"
#include "quantize/kernels.cuh"

namespace narrowfloat {
namespace {

constexpr int kBandRows = kBlockBand / kBlockWarps;  // of a warp, a lane keeps one's maximum

// A NaN as the one NaN: maxima are the same bits whichever came.
__device__ inline uint32_t one_nan(uint32_t bits) {
  return bits > 0x7f800000u ? 0x7fc00000u : bits;
}

// Magnitudes of eight neighbours into running ones, and the largest of the eight.
template <typename T>
struct ColumnMax {
  using Pair = decltype(zero_pair(T()));
  Pair m[4] = {zero_pair(T()), zero_pair(T()), zero_pair(T()), zero_pair(T())};

  __device__ uint32_t add(const Eight<T>& v) {
    const auto* p = reinterpret_cast<const Pair*>(v.w);
    Pair a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = __habs2(p[i]);
      m[i] = __hmax2_nan(m[i], a[i]);
    }
    const Pair all = __hmax2_nan(__hmax2_nan(a[0], a[1]), __hmax2_nan(a[2], a[3]));
    return max(magnitude_bits(__low2float(all)), magnitude_bits(__high2float(all)));
  }
  __device__ uint32_t bits(int i) const {
    return magnitude_bits(i % 2 ? __high2float(m[i / 2]) : __low2float(m[i / 2]));
  }
};
template <>
struct ColumnMax<float> {
  uint32_t m[8] = {};

  __device__ uint32_t add(const Eight<float>& v) {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t a = v.w[i] & 0x7fffffffu;
      m[i] = max(m[i], a);
      all = max(all, a);
    }
    return all;
  }
  __device__ uint32_t bits(int i) const { return m[i]; }
};

// A block reads strips of 256 columns, its slice of every band of 256 rows. The largest of integers
// is the same in every order: atomics leave it deterministic.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kBlockThreads, kBlockAmaxBlocksPerSm)
    narrowfloat_block_amax(const __grid_constant__ BlockAmaxParams p) {
  // words in flight a thread; what is not the usual way would spill more of them
  constexpr int kUnroll = (kVectors ? 32 : 8) / Eight<T>::kWords;
  __shared__ uint32_t columns[kBlockWarps][kStripCols];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strips = (p.cols + kStripCols - 1) / kStripCols;
  const int64_t strips_at_once = p.blocks / p.slices, slice = blockIdx.x / strips_at_once;
  for (int64_t strip = blockIdx.x % strips_at_once; strip < strips && slice < p.slices;
       strip += strips_at_once) {
    const int64_t c = strip * kStripCols + lane * 8, count = p.cols - c;
    const T* column = static_cast<const T*>(p.x) + c * p.col_stride;
    ColumnMax<T> column_max;
#pragma unroll 1
    for (int64_t band = slice; band * kBlockBand < p.rows; band += p.slices) {
      const int64_t r0 = band * kBlockBand + warp * kBandRows;
      uint32_t own = 0;  // of row r0 + lane
#pragma unroll 1
      for (int first = 0; first < kBandRows; first += kUnroll) {
        Eight<T> v[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int64_t r = r0 + first + i;
          v[i] = load8<kVectors>(column + r * p.row_stride, p.col_stride, r < p.rows ? count : 0);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const uint32_t bits = __reduce_max_sync(0xffffffffu, column_max.add(v[i]));
          if (lane == first + i) own = bits;
        }
      }
      if (p.row_amax && r0 + lane < p.rows) atomicMax(p.row_amax + r0 + lane, one_nan(own));
    }
    if (p.column_amax == nullptr) continue;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) columns[warp][lane * 8 + i] = column_max.bits(i);
    __syncthreads();
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kBlockWarps; ++i) bits = max(bits, columns[i][threadIdx.x]);
    const int64_t own = strip * kStripCols + threadIdx.x;
    if (own < p.cols) atomicMax(p.column_amax + own, one_nan(bits));
  }
}

// A lane a column, a warp every eighth of its partial sums.
__global__ void __launch_bounds__(kBlockThreads)
    narrowfloat_block_sums(const float* partials, int64_t count, int64_t cols, void* out,
                           Real type) {
  __shared__ float sums[kBlockWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float sum = 0.f;
  if (c < cols) {
#pragma unroll 8
    for (int64_t i = warp; i < count; i += kBlockWarps) sum += partials[i * cols + c];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c >= cols) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kBlockWarps; ++i) total += sums[i][lane];
  store_real(out, type, c, total);
}

}  // namespace

static_assert(kStripCols == kBlockThreads);

void launch_block_amax(const BlockAmaxParams& params, Real type, bool vectors,
                       cudaStream_t stream) {
  with_type(type, [&](auto t) {
    with_bool(vectors, [&](auto v) {
      narrowfloat_block_amax<decltype(t), decltype(v)::value>
          <<<params.blocks, kBlockThreads, 0, stream>>>(params);
    });
  });
  NF_CUDA(cudaGetLastError());
}

void launch_block_sums(const float* partials, int64_t count, int64_t cols, void* out, Real type,
                       cudaStream_t stream) {
  const int blocks = static_cast<int>((cols + 31) / 32);
  if (blocks == 0) return;
  narrowfloat_block_sums<<<blocks, kBlockThreads, 0, stream>>>(partials, count, cols, out, type);
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
