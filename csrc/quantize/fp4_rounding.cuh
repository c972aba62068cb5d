// How the numbers of a group are rounded to FP4, with their block's scale known: to codes,
// or to the bf16 they stand for. reference/fp4_numerics.py says the same.
//
// Of a multiprocessor's pipes the one for integers and logic is the fullest here and has half the
// rate of the one for fp32 (ncu): what may go either way goes to the other one.
#pragma once

#include "quantize/fp4_numerics.cuh"

namespace narrowfloat {

// As constants of the compiler's the factors would make shifts, which are the fuller pipe's, and
// the sum's addend would be moved to a register again and again.
static __constant__ uint32_t times_16 = 16, times_65536 = 65536, to_grid = 0x0b000b00;

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

// In each half the smaller magnitude; `b` is positive, so with a's sign.
__device__ inline uint32_t cap_bf16(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t r;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const uint32_t low = min(a & 0x7fffu, b & 0x7fffu);
  return (a & 0x80008000u) | low | min(a & 0x7fff0000u, b & 0x7fff0000u);
#endif
}

// Two values' upper halves: bf16, cut off.
__device__ inline uint32_t upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

constexpr uint32_t kSigns = 0x80008000u;  // of two bf16

// The signs of four of the bytes of two words, as __byte_perm() picks bytes, the eights apart: each
// a byte of 0 or -1.
template <uint32_t kSelector>
__device__ inline uint32_t sign_bytes(uint32_t a, uint32_t b) {
  static_assert((kSelector & 0x8888u) == 0x8888u);  // of prmt: the sign instead of the byte
#ifdef __CUDA_ARCH__
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "n"(kSelector));
  return r;
#else
  return (__byte_perm(a, b, kSelector & 0x7777u) >> 7 & 0x01010101u) * 0xffu;
#endif
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

// What makes a group need care: of scale byte 0 or NaN all codes are 0. A subnormal one's
// multiplier may take values far beyond 6; what becomes 6 stays so.
__device__ inline bool special(uint32_t scale) { return scale - 8u >= kNanScale - 8u; }
__device__ inline bool without_codes(uint32_t scale) { return scale == 0 || scale == kNanScale; }
__device__ inline void tame(float (&x)[kGroup], float multiplier, bool mx) {
  if (mx) return;  // exact multipliers
  const float most = __fdiv_rn(6.f, multiplier);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = fminf(fmaxf(x[i], -most), most);
}

// ---- to nearest ----

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
    const uint32_t both = __viaddmax_u16x2(near & 0x7f807f80u, to_grid, 0x4a804a80u);
    c[0] = __uint_as_float(both * times_65536 + 54u), c[1] = __uint_as_float(both);
    sum[0] = __fadd_rn(fabsf(v0), c[0]), sum[1] = __fadd_rn(fabsf(v1), c[1]);
  }
  // The first in the low nibble of the low byte, without signs.
  __device__ uint32_t codes() const {
    const uint32_t bits = __float_as_uint(sum[1]) * times_16 + __float_as_uint(sum[0]);
    return bits + (bits >> 22);
  }
  // As magnitudes in bf16.
  __device__ uint32_t values() const {
    return upper_halves(__fadd_rn(sum[0], -c[0]), __fadd_rn(sum[1], -c[1]));
  }
};

// Nearest, ties to even. Values are at most 6.5 times 1 / multiplier, or tame() has seen to it.
// With kWords `w` has the values as bf16. `near` has their signs.
template <bool kWords>
__device__ inline PairOnGrid nearest(const float* x, uint32_t w, float multiplier, uint32_t& near) {
  const float v0 = __fmul_rn(x[0], multiplier), v1 = __fmul_rn(x[1], multiplier);
  const uint32_t bits = __float_as_uint(multiplier);
  near = kWords ? multiply_bf16(w, __byte_perm(bits, bits, 0x3232)) : upper_halves(v0, v1);
  return PairOnGrid(v0, v1, near);
}

template <bool kWords>
__device__ inline uint2 nearest_codes(const float (&x)[kGroup], const uint32_t (&w)[8],
                                      float multiplier) {
  uint32_t codes[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    uint32_t near[2];
    const PairOnGrid a = nearest<kWords>(x + 2 * i, w[i], multiplier, near[0]);
    const PairOnGrid b = nearest<kWords>(x + 2 * i + 2, w[i + 1], multiplier, near[1]);
    // bytes of 0 or -1 times -8 and -128: the codes' sign bits
    const auto signs = static_cast<int>(sign_bytes<0xfdb9>(near[0], near[1]));
    codes[i] = __dp4a(signs, 0x000080f8, static_cast<int>(a.codes()));
    codes[i + 1] = __dp4a(signs, static_cast<int>(0x80f80000u), static_cast<int>(b.codes()));
  }
  return low_bytes(codes);
}

// Codes times their block's scale are exact in bf16.
template <bool kWords>
__device__ inline void nearest_operand(const float (&x)[kGroup], const uint32_t (&w)[8],
                                       const Factors& factors, uint32_t (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t near;
    const PairOnGrid pair = nearest<kWords>(x + 2 * i, w[i], factors.multiplier, near);
    out[i] = multiply_bf16(pair.values() | (near & kSigns), factors.scale);
  }
}

// The sum of the squared errors of nearest(), in order: code x scale less the value times `up`, the
// tensor's multiplier. The product is exact, so that two scales which give a block the same values
// have the same error, to the bit.
__device__ inline float squared_error(const float (&x)[kGroup], float multiplier, float scale,
                                      float up) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const float v = __fmul_rn(fabsf(x[i]), multiplier);
    const float code = v >= 6.f ? 6.f : OnGrid(v, 0).value();  // beyond 6 the grid ends
    const float e = __fmaf_rn(code, scale, -__fmul_rn(fabsf(x[i]), up));
    sum = __fadd_rn(sum, __fmul_rn(e, e));
  }
  return sum;
}

// ---- stochastically ----

// Up with the probability of the distance to the neighbour below over the gap, in 256ths: the place
// between codes, which is linear between neighbours, rounded to 2^-16, plus a random byte and a
// half in 2^-8, cut off.
//
// v = 2 u times 2^-126 has E2M1's exponents where fp32 has its own lowest, subnormal ones too: its
// bits are the place between codes in 2^-22, cut off. Rounding to 2^-16 adds half of one and cuts
// off, since no tie is left to decide: what is cut at is an even number of 2^-16 away from a code.
__device__ inline uint32_t place_of_code(float x, float half) {
  return __float_as_uint(__fmul_rz(__fmul_rn(x, half), 0x1p-125f));
}

// Random byte `i` over 2^24, and what rounding adds there.
__device__ inline uint32_t random_place(const uint4& random, int i) {
  const uint32_t word = i < 8 ? (i < 4 ? random.x : random.y) : (i < 12 ? random.z : random.w);
  return __byte_perm(word, 0x8080u, 0x6044 | (i % 4) << 8);
}

// Upper bytes of four words, in order.
__device__ inline uint32_t upper_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x73), __byte_perm(c, d, 0x73), 0x5410);
}

// Signs of eight values, of the even ones and of the odd: 0 or -1 in the byte of each pair.
template <bool kWords>
__device__ inline uint2 signs_of(const float* x, const uint32_t* w) {
  if constexpr (kWords) {
    const uint32_t low = __byte_perm(w[0], w[1], 0x7351), high = __byte_perm(w[2], w[3], 0x7351);
    return make_uint2(sign_bytes<0xdc98>(low, high), sign_bytes<0xfeba>(low, high));
  } else {
    return make_uint2(sign_bytes<0xfdb9>(upper_halves(x[0], x[2]), upper_halves(x[4], x[6])),
                      sign_bytes<0xfdb9>(upper_halves(x[1], x[3]), upper_halves(x[5], x[7])));
  }
}

template <bool kWords>
__device__ inline uint2 stochastic_codes(const float (&x)[kGroup], const uint32_t (&w)[8],
                                         float multiplier, const uint4& random) {
  const float half = .5f * multiplier;
  uint32_t out[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t t[8];  // codes in the upper bytes
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      t[i] = place_of_code(x[8 * k + i], half) * 4 + random_place(random, 8 * k + i);
    }
    const uint32_t codes =
        upper_bytes(t[0], t[2], t[4], t[6]) + upper_bytes(t[1], t[3], t[5], t[7]) * times_16;
    const uint2 signs = signs_of<kWords>(x + 8 * k, w + 4 * k);
    // 8, of values beyond 6, is 7
    out[k] =
        (codes - (codes >> 3 & 0x11111111u)) | (signs.x & 0x08080808u) | (signs.y & 0x80808080u);
  }
  return make_uint2(out[0], out[1]);
}

__device__ inline void stochastic_operand(const float (&x)[kGroup], const Factors& factors,
                                          const uint4& random, uint32_t (&out)[8]) {
  const float half = .5f * factors.multiplier;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t t[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      t[j] = place_of_code(x[2 * i + j], half) + (random_place(random, 2 * i + j) >> 2);
    }
    // sign, exponent and mantissa of E2M1 where bf16 has its lowest: times 2^126 its value
    const uint32_t pair = __byte_perm(t[0], t[1], 0x7632) & 0x83c083c0u;
    const uint32_t value = multiply_bf16(pair, 0x7e807e80u);
    out[i] = multiply_bf16(cap_bf16(value, 0x40c040c0u), factors.scale);
  }
}

}  // namespace narrowfloat
