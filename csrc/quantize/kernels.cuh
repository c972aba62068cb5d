// What the quantizing kernels share: how a thread reads, how a block agrees on a maximum,
// and how a launch is chosen.
#pragma once

#include <cstdint>
#include <type_traits>

#include "quantize/numerics.cuh"
#include "quantize/tensor_kernels.h"

namespace narrowfloat {

template <typename T>
__device__ inline uint32_t bits_of(const T* p) {
  return *reinterpret_cast<const uint16_t*>(p);
}

// Eight neighbours at p, the first `count` of them. With kVectors all eight (or none) lie in
// aligned 16-byte words; a kernel is compiled for that alone, since the other loads would fill its
// instruction cache.
template <bool kVectors, typename T>
__device__ inline Eight<T> load8(const T* p, [[maybe_unused]] int64_t col_stride, int64_t count) {
  Eight<T> v;
  if constexpr (kVectors) {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords / 4; ++i) {
      const uint4 q = count > 0 ? reinterpret_cast<const uint4*>(p)[i] : make_uint4(0, 0, 0, 0);
      v.w[4 * i] = q.x, v.w[4 * i + 1] = q.y, v.w[4 * i + 2] = q.z, v.w[4 * i + 3] = q.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; ++i) v.w[i] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= count) break;
      const T* e = p + j * col_stride;
      if constexpr (sizeof(T) == 4) {
        v.w[j] = __float_as_uint(*e);
      } else {
        v.w[j / 2] |= bits_of(e) << (16 * (j % 2));
      }
    }
  }
  return v;
}

// The largest of the block's values, in every thread. `shared` holds a word a warp.
__device__ inline uint32_t block_max(uint32_t bits, uint32_t* shared) {
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = threadIdx.x % 32 < kThreads / 32 ? shared[threadIdx.x % 32] : 0;
  return __reduce_max_sync(0xffffffffu, bits);
}

// The launch that follows in the stream may start before this one has ended, if it asks to.
__device__ inline void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// In such a launch: what the launch before has written is there.
__device__ inline void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
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

template <typename F>
void with_bool(bool value, F&& f) {
  if (value) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

}  // namespace narrowfloat
