// Decides how numbers become FP4: rotation, block scales, rounding, random bits, a group of 16 at a
// time. reference_fp4.py says the same.
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

// What a value is multiplied by to be rounded, for the scale byte `code`, neither 0 nor NaN.
__device__ inline float multiplier_of(uint32_t code, const SideScale& s, bool mx) {
  const float value = e4m3_value(code);
  if (mx) {  // 2^(127 - exponent), where value = 2^(exponent - top + 8)
    const int rel = static_cast<int>(__float_as_uint(value) >> 23) - 127;
    return __uint_as_float((254 - (rel + s.top_exponent - 8)) << 23);
  }
  return fminf(__fdiv_rn(1.f, __fmul_rn(value, s.inverse)), kFltMax);
}

// v >= 0 rounded to the grid of E2M1, as the fp32 sum v + c: c's last place is the grid's spacing
// at v. The sum's low bits count steps of that spacing, its exponent the spacing: bits + (bits >>
// 22) has the code in its low bits, less what `extra` steps more in c make of them.
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

// The codes of two values, the first in the low nibble of the low byte. Both sums fold together:
// 298 (twice the exponent of 2^22) and 16 times that, plus 22 + 16 * 2 steps, is 0 in a byte.
__device__ inline uint32_t pair_of_codes(float v0, float v1) {
  const uint32_t bits =
      __float_as_uint(OnGrid(v0, 22).sum) + 16 * __float_as_uint(OnGrid(v1, 2).sum);
  return bits + (bits >> 22);
}

// Byte `kByte` of 16 words, each a magnitude below 8, to 16 nibbles.
template <int kByte>
__device__ inline uint2 pack_nibbles(const uint32_t (&w)[kGroup]) {
  constexpr uint32_t kTwo = kByte | (4 + kByte) << 4;
  uint32_t out[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t* p = w + 8 * i;
    const uint32_t even = __byte_perm(__byte_perm(p[0], p[2], kTwo), __byte_perm(p[4], p[6], kTwo),
                                      0x5410),
                   odd = __byte_perm(__byte_perm(p[1], p[3], kTwo), __byte_perm(p[5], p[7], kTwo),
                                     0x5410);
    out[i] = even + 16 * odd;
  }
  return make_uint2(out[0], out[1]);
}

// Nearest, ties to even. Values are at most 6.5 times 1 / multiplier, or clamp_group() has seen to
// it.
__device__ inline uint2 nearest(const float (&x)[kGroup], float multiplier) {
  uint32_t out[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = 8 * i + 2 * j;
      w[j] =
          pair_of_codes(__fmul_rn(fabsf(x[k]), multiplier), __fmul_rn(fabsf(x[k + 1]), multiplier));
    }
    out[i] = __byte_perm(__byte_perm(w[0], w[1], 0x40), __byte_perm(w[2], w[3], 0x40), 0x5410);
  }
  return make_uint2(out[0], out[1]);
}

// What makes the scale bytes of special blocks need no care afterwards. Zero and NaN: all codes are
// 0. A subnormal one's multiplier may take values far beyond 6; what becomes 6 stays so.
__device__ inline bool special(uint32_t scale) { return scale - 8u >= kNanScale - 8u; }
__device__ inline void tame(float (&x)[kGroup], uint32_t scale, float multiplier, bool mx) {
  if (scale != 0 && scale != kNanScale && mx) return;  // multipliers are exact there
  const float most = scale == 0 || scale == kNanScale ? 0.f : __fdiv_rn(6.f, multiplier);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    x[i] = most == 0.f ? 0.f : fminf(fmaxf(x[i], -most), most);
  }
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

// Philox4x32-10 (Salmon et al., SC 2011).
__device__ inline uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const uint64_t p = uint64_t{0xD2511F53u} * counter.x, q = uint64_t{0xCD9E8D57u} * counter.z;
    counter =
        make_uint4(static_cast<uint32_t>(q >> 32) ^ counter.y ^ key0, static_cast<uint32_t>(q),
                   static_cast<uint32_t>(p >> 32) ^ counter.w ^ key1, static_cast<uint32_t>(p));
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return counter;
}

struct Seed {
  uint32_t key0, key1, stream0, stream1;

  __device__ Seed(const int64_t* seed, int side) {
    const auto key = static_cast<uint64_t>(seed[0]), stream = static_cast<uint64_t>(seed[1]);
    key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    stream0 = static_cast<uint32_t>(stream);
    stream1 = static_cast<uint32_t>(stream >> 32) << 1 | static_cast<uint32_t>(side);
  }
  __device__ uint4 bytes_of(uint64_t group) const {
    return philox(make_uint4(static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                             stream0, stream1),
                  key0, key1);
  }
};

// Up with the probability of the distance to the neighbour below over the gap, in 256ths: the place
// between codes in 2^-16, plus a random byte and a half in 2^-8, cut off.
__device__ inline uint2 stochastic(const float (&x)[kGroup], float multiplier, uint4 random) {
  const float half = .5f * multiplier;
  uint32_t w[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t r = i < 4 ? random.x : i < 8 ? random.y : i < 12 ? random.z : random.w;
    // 128 + byte / 256 + 1 / 512; its last place is 2^-16
    const uint32_t base = __byte_perm(r, 0x43000080u, 0x7604 | (i % 4) << 4);
    const float u = __fmul_rn(fabsf(x[i]), half);
    float place = __fmaf_rn(__saturatef(u), 4.f, __uint_as_float(base));
    place = __fmaf_rn(__saturatef(__fadd_rn(u, -1.f)), 2.f, place);
    place = __fadd_rn(__saturatef(__fadd_rn(u, -2.f)), place);
    w[i] = __float_as_uint(place);
  }
  return pack_nibbles<2>(w);
}

// Bit 3 of nibble i: the sign of x[i].
__device__ inline uint2 sign_nibbles(const float (&x)[kGroup]) {
  uint32_t out[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = __float_as_uint(x[8 * i + j]);
    const uint32_t even = __byte_perm(__byte_perm(w[0], w[2], 0x73), __byte_perm(w[4], w[6], 0x73),
                                      0x5410),
                   odd = __byte_perm(__byte_perm(w[1], w[3], 0x73), __byte_perm(w[5], w[7], 0x73),
                                     0x5410);
    out[i] = (even & 0x80808080u) >> 4 | (odd & 0x80808080u);
  }
  return make_uint2(out[0], out[1]);
}

// The eight magnitudes times an e4m3 scale, as bf16: their low bytes, then their high bytes.
__device__ inline uint4 products_of(uint32_t scale) {
  uint32_t low[2] = {0, 0}, high[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    constexpr float kMagnitudes[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    const uint32_t bf16 =
        scale == kNanScale ? 0x7fc0u : __float_as_uint(kMagnitudes[i] * e4m3_value(scale)) >> 16;
    low[i / 4] |= (bf16 & 0xff) << (8 * (i % 4));
    high[i / 4] |= (bf16 >> 8) << (8 * (i % 4));
  }
  return make_uint4(low[0], low[1], high[0], high[1]);
}

// Magnitudes to eight words of two bf16, without signs.
__device__ inline void to_operand(uint2 magnitudes, const uint4& products, uint32_t (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t m = (i < 2 ? magnitudes.x : magnitudes.y) >> (16 * (i % 2));
    const uint32_t low = __byte_perm(products.x, products.y, m);
    const uint32_t high = __byte_perm(products.z, products.w, m);
    out[2 * i] = __byte_perm(low, high, 0x5140);
    out[2 * i + 1] = __byte_perm(low, high, 0x7362);
  }
}

}  // namespace narrowfloat
