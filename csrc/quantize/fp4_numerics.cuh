// How a group of 16 is rotated, and what its block's scale is. reference/fp4_numerics.py says the
// same; fp4_rounding.cuh rounds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "quantize/fp4.h"
#include "quantize/numerics.cuh"

namespace narrowfloat {

constexpr uint32_t kNanScale = 0x7f;  // of a block that holds a NaN or an Inf
constexpr uint32_t kInfBits = 0x7f800000u;

// The larger magnitude, NaN if any is.
__device__ inline float max_abs_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(fabsf(a)), "f"(fabsf(b)));
  return r;
#else
  const uint32_t x = magnitude_bits(a), y = magnitude_bits(b);
  return __uint_as_float(x > y ? x : y);
#endif
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
}

// What is finite stays so when it is rounded to bf16 after this.
constexpr float kBf16Max = 0x1.fep+127f;
__device__ inline float within_bf16(float v) {
  return fabsf(v) <= kFltMax ? fminf(fmaxf(v, -kBf16Max), kBf16Max) : v;
}

// 16 neighbours as bf16 in 8 words to fp32.
__device__ inline void unpack16(const uint32_t* w, float (&x)[kGroup]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[2 * i] = __uint_as_float(w[i] << 16);
    x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
  }
}

// The stages of H (signs * x), H of +-1, below `kEnd`, in fp32, in this order of additions.
template <int kEnd>
__device__ inline void rotate_stages(float (&x)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = kRotationSigns >> i & 1 ? -x[i] : x[i];
#pragma unroll
  for (int h = 1; h < kEnd; h *= 2) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i & h) continue;
      const float a = x[i], b = x[i + h];
      x[i] = __fadd_rn(a, b);
      x[i + h] = __fadd_rn(a, -b);
    }
  }
}

// Of eight magnitudes as bits, where NaN is above Inf. Three at a time: half the instructions.
__device__ inline uint32_t largest_of(const uint32_t (&m)[kGroup / 2]) {
  const uint32_t low = __vimax3_u32(m[0], m[1], m[2]), high = __vimax3_u32(m[3], m[4], m[5]);
  return __vimax3_u32(__vimax3_u32(low, m[6], m[7]), high, 0);
}

// x rotated: four times the orthonormal rotation, whose quarter the tensor's scale takes back.
// Returns the largest magnitude's bits, NaN's if any is. That of a + b and a - b, rounded, is |a| +
// |b|, rounded: half the work on half as many numbers.
__device__ inline uint32_t rotate(float (&x)[kGroup]) {
  rotate_stages<kGroup / 2>(x);
  uint32_t m[kGroup / 2];
#pragma unroll
  for (int i = 0; i < kGroup / 2; ++i) {
    const float a = x[i], b = x[i + kGroup / 2];
    m[i] = __float_as_uint(__fadd_rn(fabsf(a), fabsf(b)));
    x[i] = __fadd_rn(a, b);
    x[i + kGroup / 2] = __fadd_rn(a, -b);
  }
  return largest_of(m);
}

__device__ inline uint32_t group_amax(const float (&x)[kGroup]) {
  float m = 0.f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) m = max_abs_nan(m, x[i]);
  return magnitude_bits(m);
}

// In each half the larger magnitude, NaN if any is; with any sign.
__device__ inline uint32_t max_abs_nan2(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t r;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
  return larger(a & 0x7fffu, b & 0x7fffu) | larger(a & 0x7fff0000u, b & 0x7fff0000u);
#endif
}

// Of the two halves of a word of magnitudes the larger one's bits, as fp32's.
__device__ inline uint32_t larger_half(uint32_t w) {
  return max(w << 16 & 0x7fff0000u, w & 0x7fff0000u);
}

// The same as group_amax() of values as packed bf16.
__device__ inline uint32_t packed_amax(const uint32_t (&w)[8]) {
  const uint32_t a = max_abs_nan2(max_abs_nan2(w[0], w[1]), max_abs_nan2(w[2], w[3]));
  const uint32_t b = max_abs_nan2(max_abs_nan2(w[4], w[5]), max_abs_nan2(w[6], w[7]));
  return larger_half(max_abs_nan2(a, b));
}

// The smallest block scale, 2^-9, leaves a multiplier that is an fp32 up to here. Block scales are
// few steps of 2^-9 then: a block's largest value becomes 4.5, so that none is a step too small and
// saturates. Blocks whose largest value is a normal number stay.
constexpr float kLargestUp = 0x1p119f, kTopOfSmall = 4.5f;

// What every block of a side shares, from the side's amax.
struct SideScale {
  float up;               // S: what the tensor is multiplied by, code x block scale then
  float to_six, to_four;  // block amax times this is the block scale that maps it to 6 or 4
  float inverse;          // 1 / S
  int top_exponent;       // mx: of the largest block
  float tensor_scale;
};

// Of the block scale 2^n of MXFP4: the smallest power of two that is not below amax / 6, biased.
__device__ inline int mx_exponent(uint32_t amax_bits) {
  return max(static_cast<int>((amax_bits + 0x3fffffu) >> 23) - 2, 1);
}

__device__ inline SideScale side_scale(uint32_t amax_bits, const Fp4Side& side, bool mx) {
  SideScale s{};
  const float amax = __uint_as_float(amax_bits), quarter = side.rotated ? .25f : 1.f;
  if (mx) {
    s.top_exponent = max(mx_exponent(amax_bits), 10);
    // 2^(top - 127 - 8): the largest block has the byte of 2^8
    s.tensor_scale =
        amax_bits == 0 ? quarter : quarter * __uint_as_float((s.top_exponent - 8) << 23);
    return s;
  }
  const float top = (side.four_over_six ? 256.f : 448.f) * 6.f;
  const float whole = __fdiv_rn(top, amax);
  s.up = amax_bits == 0 ? 1.f : fminf(whole, kLargestUp);
  s.to_six = __fmul_rn(s.up, whole > kLargestUp ? 1.f / kTopOfSmall : 1.f / 6.f);
  s.to_four = __fmul_rn(s.up, .25f);
  s.inverse = __fdiv_rn(1.f, s.up);
  const float scale = whole > kLargestUp ? 1.f / kLargestUp : __fdiv_rn(amax, top);
  s.tensor_scale = amax_bits == 0 ? quarter : __fmul_rn(scale, quarter);
  return s;
}

__device__ inline float e4m3_value(uint32_t code) {
  return code < 8 ? static_cast<float>(code) * 0x1p-9f
                  : __uint_as_float((code << 20) + 0x3c000000u);
}

__device__ inline uint32_t e4m3_code(float v) {  // v >= 0
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
}

// The scale byte that maps a block's amax to 6, or to 4 with `to_four`.
__device__ inline uint32_t block_scale(uint32_t amax_bits, const SideScale& s, bool mx, bool up,
                                       bool to_four) {
  if (amax_bits >= kInfBits) return kNanScale;
  if (mx) {
    const int rel = mx_exponent(amax_bits) - s.top_exponent + 8;  // -9 to 8 are e4m3 bytes
    if (amax_bits == 0 || rel < -9) return 0;
    return rel >= -6 ? (rel + 7) << 3 : 1u << (rel + 9);
  }
  const float wanted =
      fminf(__fmul_rn(__uint_as_float(amax_bits), to_four ? s.to_four : s.to_six), kFltMax);
  uint32_t code = e4m3_code(wanted);
  if (up && code < 0x7e && e4m3_value(code) < wanted) ++code;
  return code;
}

// The same of a block of NVFP4 to the nearest scale: the conversion saturates, and an Inf times
// zero is the NaN that makes it NaN.
__device__ inline uint32_t nearest_block_scale(uint32_t amax_bits, float to_six) {
  const float amax = __uint_as_float(amax_bits);
  return e4m3_code(__fmaf_rn(amax, 0.f, __fmul_rn(amax, to_six))) & 0x7f;
}

// What a value is multiplied by to be rounded, for the scale byte `code`, neither 0 nor NaN.
__device__ inline float multiplier_of(uint32_t code, const SideScale& s, bool mx) {
  const float value = e4m3_value(code);
  if (mx) {  // 2^(127 - exponent), where value = 2^(exponent - top + 8)
    const int rel = static_cast<int>(__float_as_uint(value) >> 23) - 127;
    return __uint_as_float((254 - (rel + s.top_exponent - 8)) << 23);
  }
  return fminf(__fdiv_rn(1.f, __fmul_rn(value, s.inverse)), kFltMax);
}

}  // namespace narrowfloat
