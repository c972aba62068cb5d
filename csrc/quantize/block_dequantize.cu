// FP8 codes to operands of a bf16 GEMM: times their powers of two, or alone where a tensor has one
// scale; and scales of 128 elements to those of 32.
#include "api/check.h"
#include "quantize/block_kernels.h"
#include "quantize/kernels.cuh"

namespace narrowfloat {
namespace {

constexpr int kDequantizeRun = 16;
constexpr int kSpreadThreads = 128;

// The byte of (row, block of 32), `across` tiles side by side.
__device__ inline int64_t mx_byte(int64_t row, int64_t block, int64_t across) {
  return (row / 128 * across + block / 4) * kMxTileBytes + row % 32 * 16 + row % 128 / 32 * 4 +
         block % 4;
}

// A block a row at a time, a thread a run of 16.
__global__ void __launch_bounds__(kBlockThreads)
    narrowfloat_block_dequantize(bool mx, bool square, const uint8_t* codes, const void* scales,
                                 int64_t rows, int64_t padded_rows, int64_t cols, int64_t ld,
                                 int64_t out_ld, uint16_t* operand) {
  const int64_t across = (cols + 127) / 128;
  for (int64_t r = blockIdx.x; r < padded_rows; r += gridDim.x) {
#pragma unroll 2
    for (int64_t c = threadIdx.x * kDequantizeRun; c < out_ld;
         c += kBlockThreads * kDequantizeRun) {
      const int valid =
          r < rows ? static_cast<int>(max(int64_t{0}, min(cols - c, int64_t{kDequantizeRun}))) : 0;
      uint32_t scale = 0;  // bits
      uint4 q = make_uint4(0, 0, 0, 0);
      if (valid > 0) {
        q = *reinterpret_cast<const uint4*>(codes + r * ld + c);
        if (mx) {
          const uint32_t e = static_cast<const uint8_t*>(scales)[mx_byte(r, c / 32, across)];
          scale = e == 0xff ? 0x7fc00000u : e == 0 ? 1u << 22 : e << 23;  // 2^-127 is subnormal
        } else {
          const int64_t at =
              square ? r / 128 * ((across + 3) / 4 * 4) + c / 128 : c / 128 * padded_rows + r;
          scale = __float_as_uint(static_cast<const float*>(scales)[at]);
        }
      }
      const uint32_t words[4] = {q.x, q.y, q.z, q.w};
      uint32_t out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const auto two = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        const float2 f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
        const float s = __uint_as_float(scale);
        // exact with every scale that narrowfloat makes; OCP's three smaller ones make bf16 round
        const __nv_bfloat162 product = __floats2bfloat162_rn(f.x * s, f.y * s);
        out[i] = *reinterpret_cast<const uint32_t*>(&product);
      }
      if (scale > 0x7f800000u) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          out[i] = (2 * i < valid ? 0x7fc0u : 0) | (2 * i + 1 < valid ? 0x7fc00000u : 0);
        }
      }
      auto* to = reinterpret_cast<uint4*>(operand + r * out_ld + c);
      to[0] = make_uint4(out[0], out[1], out[2], out[3]);
      to[1] = make_uint4(out[4], out[5], out[6], out[7]);
    }
  }
}

// A thread a run.
template <__nv_fp8_interpretation_t F>
__global__ void __launch_bounds__(kBlockThreads)
    narrowfloat_tensor_dequantize(const uint4* codes, int64_t runs, const float* scale,
                                  uint4* operand, float* alpha) {
  if (blockIdx.x == 0 && threadIdx.x < 2) alpha[threadIdx.x] = threadIdx.x ? 0.f : *scale;
  const int64_t step = int64_t{gridDim.x} * kBlockThreads;
  for (int64_t i = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < runs; i += step) {
    const uint4 q = codes[i];
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    uint32_t out[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const auto two = static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16));
      const float2 f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, F)));
      out[k] = __byte_perm(__float_as_uint(f.x), __float_as_uint(f.y), 0x7632);
    }
    operand[2 * i] = make_uint4(out[0], out[1], out[2], out[3]);
    operand[2 * i + 1] = make_uint4(out[4], out[5], out[6], out[7]);
  }
}

// A block a tile of bytes, a thread a row of it.
__global__ void __launch_bounds__(kSpreadThreads)
    narrowfloat_block_spread(const float* scales, bool square, int64_t rows, int64_t padded_rows,
                             int64_t cols, int64_t ld, uint32_t* words) {
  const int64_t across = (cols + 127) / 128, tiles = (rows + 127) / 128 * across;
  const int row = threadIdx.x % 4 * 32 + threadIdx.x / 4;  // whose four bytes are its word
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const int64_t down = t / across, along = t % across, r = down * 128 + row;
    uint32_t word = 0;
    if (r < rows) {
      const float scale = square ? scales[down * ld + along] : scales[along * padded_rows + r];
      const uint32_t bits = __float_as_uint(scale), e = bits > 0x7f800000u ? 0xff : bits >> 23;
      for (int b = 0; b < 4; ++b) {
        if (along * 128 + b * 32 < cols) word |= e << (8 * b);
      }
    }
    words[t * (kMxTileBytes / 4) + threadIdx.x] = word;
  }
}

int grid_of(int64_t count) { return static_cast<int>(count < (1 << 16) ? count : (1 << 16)); }

}  // namespace

void block_dequantize(Scaling scaling, bool square, const void* codes, const void* scales,
                      int64_t rows, int64_t cols, void* operand, cudaStream_t stream) {
  const int64_t padded_rows = padded(rows), out_ld = padded32(cols);
  if (padded_rows * out_ld == 0) return;
  const int blocks = grid_of(padded_rows);
  narrowfloat_block_dequantize<<<blocks, kBlockThreads, 0, stream>>>(
      scaling == Scaling::mx, square, static_cast<const uint8_t*>(codes), scales, rows, padded_rows,
      cols, codes_cols(scaling, cols), out_ld, static_cast<uint16_t*>(operand));
  NF_CUDA(cudaGetLastError());
}

void tensor_dequantize(Element element, const void* codes, const float* scale, int64_t rows,
                       int64_t cols, void* operand, float* alpha, cudaStream_t stream) {
  const int64_t runs = padded(rows) * padded(cols) / kDequantizeRun;
  if (runs == 0) return;
  auto* kernel = element == Element::e5m2 ? narrowfloat_tensor_dequantize<__NV_E5M2>
                                          : narrowfloat_tensor_dequantize<__NV_E4M3>;
  const int blocks = grid_of(blocks_of(runs, kBlockThreads));
  kernel<<<blocks, kBlockThreads, 0, stream>>>(static_cast<const uint4*>(codes), runs, scale,
                                               static_cast<uint4*>(operand), alpha);
  NF_CUDA(cudaGetLastError());
}

void block_spread_scales(const void* scales, bool square, int64_t rows, int64_t cols,
                         uint8_t* mx_scales, cudaStream_t stream) {
  const int64_t across = blocks_of(cols, kBlock), tiles = blocks_of(rows, kBlock) * across;
  if (tiles == 0) return;
  const int blocks = grid_of(tiles);
  narrowfloat_block_spread<<<blocks, kSpreadThreads, 0, stream>>>(
      static_cast<const float*>(scales), square, rows, padded(rows), cols, (across + 3) / 4 * 4,
      reinterpret_cast<uint32_t*>(mx_scales));
  NF_CUDA(cudaGetLastError());
}

}  // namespace narrowfloat
