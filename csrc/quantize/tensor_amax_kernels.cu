// The amax of a tensor before it is quantized, and the sums of its columns.
#include "api/check.h"
#include "quantize/kernels.cuh"
#include "quantize/tensor_kernels.h"

namespace narrowfloat {
namespace {

// Up to two tensors, each with blocks of its own. A block reads strips of 256 columns, its slice of
// every band of rows, the bands from first to last: what the L2 cache still holds afterwards is the
// end of the matrix.
template <typename T, bool kSums, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    narrowfloat_amax(const __grid_constant__ AmaxParams p) {
  let_next_launch_start();
  constexpr int kUnroll = 32 / Eight<T>::kWords;  // 128 bytes in flight a thread
  constexpr int kWarps = kThreads / 32;
  constexpr int kBand = kWarps * kUnroll;
  __shared__ uint32_t reduce[kWarps];
  __shared__ float sums[kSums ? kWarps : 1][kSums ? kStripCols : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool second = static_cast<int>(blockIdx.x) >= p.job[0].blocks;
  const AmaxJob& job = second ? p.job[1] : p.job[0];
  const int block = static_cast<int>(blockIdx.x) - (second ? p.job[0].blocks : 0);
  const int64_t strips = (job.cols + kStripCols - 1) / kStripCols;
  const int64_t strips_at_once = job.blocks / job.slices;
  const int64_t slice = block / strips_at_once;
  Amax<T> amax;
  for (int64_t strip = block % strips_at_once; strip < strips && slice < job.slices;
       strip += strips_at_once) {
    const int64_t c = strip * kStripCols + lane * 8, count = job.cols - c;
    const T* column = static_cast<const T*>(job.x) + c * job.col_stride;
    [[maybe_unused]] float sum[8] = {};
    for (int64_t band = slice; band * kBand < job.rows; band += job.slices) {
      Eight<T> v[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t r = band * kBand + i * kWarps + warp;
        v[i] =
            load8<kVectors>(column + r * job.row_stride, job.col_stride, r < job.rows ? count : 0);
      }
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
    if (kSums && job.sum_partials) {
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
  if (threadIdx.x == 0 && job.amax_partials) job.amax_partials[block] = bits;
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

}  // namespace

void launch_amax(const AmaxParams& p, Real type, bool vectors, cudaStream_t stream) {
  const int blocks = p.job[0].blocks + p.job[1].blocks;
  with_type(type, [&](auto t) {
    with_bool(p.job[0].sum_partials || p.job[1].sum_partials, [&](auto sums) {
      with_bool(vectors, [&](auto v) {
        narrowfloat_amax<decltype(t), decltype(sums)::value, decltype(v)::value>
            <<<blocks, kThreads, 0, stream>>>(p);
      });
    });
  });
  NF_CUDA(cudaGetLastError());
}

void launch_sums_of_contiguous(const JobParams& job, Real type, cudaStream_t stream) {
  const int blocks = static_cast<int>(job.cols < 4096 ? (job.cols ? job.cols : 1) : 4096);
  narrowfloat_sums_of_contiguous<<<blocks, kThreads, 0, stream>>>(job, type);
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
