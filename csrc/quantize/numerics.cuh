// How numbers are rounded: amax with NaN, scale from amax, fp32 to FP8. reference/tensor.py says
// the same.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "quantize/tensor.h"

namespace narrowfloat {

constexpr float kFltMax = 3.402823466e+38f;
constexpr float kSmallestScale = 0x1p-128f;  // 1 / kFltMax in fp32

template <Element E>
struct ElementTraits;
template <>
struct ElementTraits<Element::e4m3> {
  static constexpr float max = 448.f;
  static constexpr __nv_fp8_interpretation_t kind = __NV_E4M3;
};
template <>
struct ElementTraits<Element::e5m2> {
  static constexpr float max = 57344.f;
  static constexpr __nv_fp8_interpretation_t kind = __NV_E5M2;
};

__device__ inline float max_of(Element e) {
  return e == Element::e4m3 ? ElementTraits<Element::e4m3>::max : ElementTraits<Element::e5m2>::max;
}

// A magnitude as the bits of its fp32: they order as the numbers do, with NaN above Inf.
__device__ inline uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// {scale, multiplier}: real = code * scale, code = cast(real * multiplier)
__device__ inline float2 scale_from_amax(uint32_t amax_bits, Element e) {
  const float amax = __uint_as_float(amax_bits);
  const float max = max_of(e);
  if (amax == 0.f) return make_float2(1.f, 1.f);
  if (amax_bits > 0x7f800000u) {  // one NaN, as the reference has it
    return make_float2(__uint_as_float(0x7fc00000u), __uint_as_float(0x7fc00000u));
  }
  const float multiplier = __fdiv_rn(max, amax);  // Inf for an amax under max / FLT_MAX
  if (multiplier > kFltMax) return make_float2(kSmallestScale, kFltMax);
  return make_float2(__fdiv_rn(amax, max), multiplier);
}

// Four values to four codes, the first in the low byte: nearest even, saturating, NaN to 0x7F.
template <Element E>
__device__ inline uint32_t encode4(float a, float b, float c, float d) {
  constexpr auto kind = ElementTraits<E>::kind;
  const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kind);
  const uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kind);
  return lo | (hi << 16);
}

// Element i of an array whose type is known at run time.
__device__ inline float load_real(const void* p, Real type, int64_t i) {
  if (type == Real::f32) return static_cast<const float*>(p)[i];
  if (type == Real::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}
__device__ inline void store_real(void* p, Real type, int64_t i, float v) {
  if (type == Real::f32) {
    static_cast<float*>(p)[i] = v;
  } else if (type == Real::bf16) {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
  } else {
    static_cast<__half*>(p)[i] = __float2half_rn(v);
  }
}

// Eight neighbouring values of a row, in the words they were loaded as.
template <typename T>
struct Eight {  // bf16 or fp16
  static constexpr int kWords = 4;
  uint32_t w[kWords];
};
template <>
struct Eight<float> {
  static constexpr int kWords = 8;
  uint32_t w[kWords];
};

__device__ inline float2 pair_to_float(uint32_t w, __nv_bfloat16) {
  return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
}
__device__ inline float2 pair_to_float(uint32_t w, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&w));
}

// v[2 i], v[2 i + 1]
template <typename T>
__device__ inline float2 pair(const Eight<T>& v, int i) {
  return pair_to_float(v.w[i], T());
}
template <>
__device__ inline float2 pair<float>(const Eight<float>& v, int i) {
  return make_float2(__uint_as_float(v.w[2 * i]), __uint_as_float(v.w[2 * i + 1]));
}

__device__ inline __nv_bfloat162 zero_pair(__nv_bfloat16) {
  return __halves2bfloat162(__ushort_as_bfloat16(0), __ushort_as_bfloat16(0));
}
__device__ inline __half2 zero_pair(__half) {
  return __halves2half2(__ushort_as_half(0), __ushort_as_half(0));
}
// A running maximum of magnitudes that keeps NaN: of 16-bit inputs two lanes in one word, as the
// hardware compares them.
template <typename T>
struct Amax {
  using Pair = decltype(zero_pair(T()));
  Pair m = zero_pair(T());
  __device__ void add(const Eight<T>& v) {
    const auto* p = reinterpret_cast<const Pair*>(v.w);
    const auto a = __hmax2_nan(__habs2(p[0]), __habs2(p[1]));
    const auto b = __hmax2_nan(__habs2(p[2]), __habs2(p[3]));
    m = __hmax2_nan(m, __hmax2_nan(a, b));
  }
  __device__ uint32_t bits() const {
    return max(magnitude_bits(__low2float(m)), magnitude_bits(__high2float(m)));
  }
};
template <>
struct Amax<float> {
  uint32_t m = 0;
  __device__ void add(const Eight<float>& v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) m = max(m, v.w[i] & 0x7fffffffu);
  }
  __device__ uint32_t bits() const { return m; }
};

// 4 x 4 bytes, row i in r[i], to column j in the result's word j
struct Bytes4x4 {
  uint32_t column[4];
};
__device__ inline Bytes4x4 transpose_bytes(uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t a = __byte_perm(r0, r1, 0x5140), b = __byte_perm(r2, r3, 0x5140);
  const uint32_t c = __byte_perm(r0, r1, 0x7362), d = __byte_perm(r2, r3, 0x7362);
  return {{__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
           __byte_perm(c, d, 0x7632)}};
}

}  // namespace narrowfloat
