// Decides how numbers become FP4: rotation, block scales, rounding, a group of 16 at a time.
// reference_fp4.py says the same.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "fp4_quantize.h"
#include "numerics.cuh"

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

// x rotated: four times the orthonormal rotation, whose quarter the tensor's scale takes back.
// Returns the largest magnitude's bits, NaN's if any is. That of a + b and a - b, rounded, is |a| +
// |b|, rounded: half the work on half as many numbers.
__device__ inline uint32_t rotate(float (&x)[kGroup]) {
  rotate_stages<kGroup / 2>(x);
  float m = 0.f;
#pragma unroll
  for (int i = 0; i < kGroup / 2; ++i) {
    const float a = x[i], b = x[i + kGroup / 2];
    m = max_abs_nan(m, __fadd_rn(fabsf(a), fabsf(b)));
    x[i] = __fadd_rn(a, b);
    x[i + kGroup / 2] = __fadd_rn(a, -b);
  }
  return magnitude_bits(m);
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

// What every block of a side shares, from the side's amax.
struct SideScale {
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
  const float up = amax_bits == 0 ? 1.f : fminf(__fdiv_rn(top, amax), kFltMax);
  s.to_six = __fmul_rn(up, 1.f / 6.f);
  s.to_four = __fmul_rn(up, .25f);
  s.inverse = __fdiv_rn(1.f, up);
  s.tensor_scale = amax_bits == 0 ? quarter : __fmul_rn(__fdiv_rn(amax, top), quarter);
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

// Products of two pairs of bf16, rounded to bf16; subnormal ones are kept.
__device__ inline uint32_t multiply_bf16(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  __nv_bfloat162 x, y;
  memcpy(&x, &a, sizeof x), memcpy(&y, &b, sizeof y);
  x = __hmul2(x, y);
  memcpy(&a, &x, sizeof a);
  return a;
#else
  return pack_bf16(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                   __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u));
#endif
}

// Two values' upper halves: bf16, cut off.
__device__ inline uint32_t upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

constexpr uint32_t kSigns = 0x80008000u;  // of two bf16

// |v| rounded to the grid of E2M1, as the fp32 sum |v| + c: c's last place is the grid's spacing at
// v. The sum's low bits count steps of that spacing, its exponent the spacing: bits + (bits >> 22)
// has the code in its low bits, less what the even `extra` steps more in c make of them.
struct OnGrid {
  float c, sum;
  __device__ OnGrid(float v, int extra) {
    const int exponent = static_cast<int>(__float_as_uint(v) & kInfBits);
    const int to = (22 << 23) + extra;
    c = __uint_as_float(static_cast<uint32_t>(max(exponent + to, (127 << 23) + to)));
    sum = __fadd_rn(v, c);
  }
  __device__ float value() const { return __fadd_rn(sum, -c); }
};

// The same of two values whose bf16 `near` need only be near: at an exponent's end both grids round
// to that end. The second c has the first one above its last places, a multiple of 128 steps, which
// leaves ties and the code's bits alone and saves to take the two apart; both sums fold together:
// 298 (twice the exponent of 2^22) and 16 times that, plus 54 steps, is 0 in a byte.
struct PairOnGrid {
  float c[2], sum[2];
  __device__ PairOnGrid(float v0, float v1, uint32_t near) {
    const uint32_t both = __viaddmax_u16x2(near & 0x7f807f80u, 0x0b000b00u, 0x4a804a80u);
    c[0] = __uint_as_float(both * 65536u + 54u), c[1] = __uint_as_float(both);
    sum[0] = __fadd_rn(fabsf(v0), c[0]), sum[1] = __fadd_rn(fabsf(v1), c[1]);
  }
  // The first in the low nibble of the low byte, without signs.
  __device__ uint32_t codes() const {
    const uint32_t bits = __float_as_uint(sum[0]) + 16 * __float_as_uint(sum[1]);
    return bits + (bits >> 22);
  }
  // As magnitudes in bf16.
  __device__ uint32_t values() const {
    return upper_halves(__fadd_rn(sum[0], -c[0]), __fadd_rn(sum[1], -c[1]));
  }
};

// The signs of two bf16 to bits 3 and 7, and what does not matter above the low byte: shifts by 12
// and by 24 in one multiplication.
__device__ inline uint32_t sign_codes(uint32_t pair) {
  return __umulhi(pair & kSigns, 0x00100100u);
}

// Low bytes of eight words, in order.
__device__ inline uint2 low_bytes(const uint32_t (&w)[8]) {
  return make_uint2(
      __byte_perm(__byte_perm(w[0], w[1], 0x40), __byte_perm(w[2], w[3], 0x40), 0x5410),
      __byte_perm(__byte_perm(w[4], w[5], 0x40), __byte_perm(w[6], w[7], 0x40), 0x5410));
}

// What a group's scale byte makes of its values: what they are multiplied by, and the block's scale
// as two bf16.
struct Factors {
  float multiplier;
  uint32_t scale;
};

// Nearest, ties to even. Values are at most 6.5 times 1 / multiplier, or tame() has seen to it.
// With kWords `w` has the values, or what is near them, as bf16.
template <bool kWords>
__device__ inline PairOnGrid nearest(const float* x, uint32_t w, float multiplier,
                                     uint32_t& signs) {
  const float v0 = __fmul_rn(x[0], multiplier), v1 = __fmul_rn(x[1], multiplier);
  const uint32_t bits = __float_as_uint(multiplier);
  signs = kWords ? multiply_bf16(w, __byte_perm(bits, bits, 0x3232)) : upper_halves(v0, v1);
  return PairOnGrid(v0, v1, signs);
}

template <bool kWords>
__device__ inline uint2 nearest_codes(const float (&x)[kGroup], const uint32_t (&w)[8],
                                      float multiplier) {
  uint32_t codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t signs;
    const PairOnGrid pair = nearest<kWords>(x + 2 * i, w[i], multiplier, signs);
    codes[i] = pair.codes() + sign_codes(signs);
  }
  return low_bytes(codes);
}

// Codes times their block's scale are exact in bf16.
template <bool kWords>
__device__ inline void nearest_operand(const float (&x)[kGroup], const uint32_t (&w)[8],
                                       const Factors& factors, uint32_t (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t signs;
    const PairOnGrid pair = nearest<kWords>(x + 2 * i, w[i], factors.multiplier, signs);
    out[i] = multiply_bf16(pair.values() | (signs & kSigns), factors.scale);
  }
}

// What makes the scale bytes of special blocks need no care afterwards. Zero and NaN: all codes are
// 0. A subnormal one's multiplier may take values far beyond 6; what becomes 6 stays so.
__device__ inline bool special(uint32_t scale) { return scale - 8u >= kNanScale - 8u; }
__device__ inline void tame(float (&x)[kGroup], uint32_t scale, float multiplier, bool mx) {
  const bool none = scale == 0 || scale == kNanScale;
  // mx: multipliers are exact
  const float most = none ? 0.f : mx ? kFltMax : __fdiv_rn(6.f, multiplier);
  // takes the sign off a zero, or leaves all as it is; without branches x stays in its registers
  const float zero = none ? 0.f : -0.f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = __fadd_rn(fminf(fmaxf(x[i], -most), most), zero);
}

// The sum of the squared errors of nearest(), in units of codes, in order.
__device__ inline float squared_error(const float (&x)[kGroup], float multiplier) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const float v = __fmul_rn(fabsf(x[i]), multiplier);
    // beyond 6 the grid ends
    const float e = __fadd_rn(v >= 6.f ? 6.f : OnGrid(v, 0).value(), -v);
    sum = __fadd_rn(sum, __fmul_rn(e, e));
  }
  return sum;
}

// Up with the probability of the distance to the neighbour below over the gap, in 256ths: the place
// between codes in 2^-16, plus a random byte and a half in 2^-8, cut off. In each half of the
// result kBase, of a bf16 from 128 to 248, plus the code.
template <uint32_t kBase>
__device__ inline uint32_t stochastic_pair(const float* x, float half, uint32_t random, int byte) {
  float place[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // its last place is 2^-16; plus byte / 256 + 1 / 512
    const uint32_t base = __byte_perm(random, kBase << 16 | 0x80u, 0x7604 | (byte + i) << 4);
    const float u = __fmul_rn(fabsf(x[i]), half);
    place[i] = __fmaf_rn(__saturatef(u), 4.f, __uint_as_float(base));
    place[i] = __fmaf_rn(__saturatef(__fadd_rn(u, -1.f)), 2.f, place[i]);
    place[i] = __fadd_rn(__saturatef(__fadd_rn(u, -2.f)), place[i]);
  }
  return upper_halves(place[0], place[1]);
}

__device__ inline uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <bool kWords>
__device__ inline uint2 stochastic_codes(const float (&x)[kGroup], const uint32_t (&w)[8],
                                         float multiplier, const uint4& random) {
  const float half = .5f * multiplier;
  uint32_t codes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // 0x433c, 16 times that and the 4 in its upper end are 0 in a byte
    const uint32_t pair =
        stochastic_pair<0x433c>(x + 2 * i, half, word_of(random, i / 2), i % 2 * 2);
    const uint32_t signs = kWords ? w[i] : upper_halves(x[2 * i], x[2 * i + 1]);
    codes[i] = pair + (pair >> 12) + sign_codes(signs);
  }
  return low_bytes(codes);
}

template <bool kWords>
__device__ inline void stochastic_operand(const float (&x)[kGroup], const uint32_t (&w)[8],
                                          const Factors& factors, const uint4& random,
                                          uint32_t (&out)[8]) {
  const float half = .5f * factors.multiplier;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pair =
        stochastic_pair<0x4300>(x + 2 * i, half, word_of(random, i / 2), i % 2 * 2);
    // exponent and mantissa of E2M1 where bf16 has its lowest: times 2^126 its value
    const uint32_t value = multiply_bf16(pair * 64u & 0x01c001c0u, 0x7e807e80u);
    const uint32_t signs = kWords ? w[i] : upper_halves(x[2 * i], x[2 * i + 1]);
    out[i] = multiply_bf16(value | (signs & kSigns), factors.scale);
  }
}

}  // namespace narrowfloat
