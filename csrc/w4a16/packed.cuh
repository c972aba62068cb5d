// How packed FP4 weights lie in memory and become bf16. w4a16.py packs them.
//
// A unit is 32 rows x 128 of K in 2304 bytes: [2 halves of K][2 halves of rows][32 lanes][4 words]
// of codes, then [32 lanes][2 halves of K] words of scales. Lane 4 g + t has the rows g and g + 8
// of each half of rows and the t-th block of 16 of each half of K. Its word j is an mma operand:
// the elements 4 j to 4 j + 3 of that block, as pairs (row g, first two), (row g + 8, first two),
// (row g, last two), (row g + 8, last two). The order of K within a unit is thus not mma's own,
// which does not matter as long as x is read in the same one. Its scale word has the bytes of row g
// and g + 8 of the first half of rows, then of the second.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace narrowfloat {

constexpr int kUnitRows = 32;
constexpr int kUnitCols = 128;
constexpr int kUnitCodes = kUnitRows * kUnitCols / 2;
constexpr int kUnitBytes = kUnitCodes + kUnitRows * kUnitCols / 16;

// What the operands lack: a code becomes the bf16 of its own bits, 2^126 too small (with .5 as a
// subnormal number), a scale 2^119 times itself, as large as bf16 allows.
constexpr float kRestore = 128.f;

// In the order that the operands have along K, eight elements at `chunk` of 64 columns (two
// operands' rows of 16 bytes) are these four pairs.
__host__ __device__ inline int arranged_pair(int chunk, int i) { return 8 * i + chunk; }

// The four pairs of a word, sign to bit 15 (and 31), magnitude to bits 8 to 6 (and 24 to 22).
// A pair lies where one shift, a rotation, or two shifts bring it there:
// pair   sign, magnitude of its first code   of its second
// 0      15, 8 7 6                           31, 24 23 22
// 1      11, 4 3 2                           27, 20 19 18
// 2      5, 30 29 28                         21, 14 13 12
// 3      9, 10 1 0                           25, 26 17 16
__host__ __device__ inline void spread_codes(uint32_t word, uint32_t (&pair)[4]) {
  constexpr uint32_t kSignAndMagnitude = 0x81c081c0u;
  pair[0] = word & kSignAndMagnitude;
  pair[1] = word << 4 & kSignAndMagnitude;
  pair[2] = (word << 10 | word >> 22) & kSignAndMagnitude;
  pair[3] = (word << 6 & 0x80c080c0u) | (word >> 2 & 0x01000100u);
}

// A scale's byte, in both halves of a word, as bf16. Five bits of exponent, which have room for
// E4M3's subnormal numbers as normal ones, so that a byte needs one shift and one addition; 175 is
// NaN. 0 is not zero here, but the codes of such a block are.
__host__ __device__ inline uint32_t widen_scales(uint32_t twice) {
  return twice * 16 + 0x75007500u;
}

}  // namespace narrowfloat
