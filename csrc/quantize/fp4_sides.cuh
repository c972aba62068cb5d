// How one side of a tile is quantized, by the threads of its block: the loops over rows and
// over columns, and the way that the side's flags say.
#pragma once

#include "quantize/fp4_block_scales.cuh"
#include "quantize/fp4_kernels.h"
#include "quantize/fp4_random.cuh"
#include "quantize/fp4_rounding.cuh"
#include "quantize/fp4_tile.cuh"

namespace narrowfloat {

// How a side is quantized: what is the same for a launch, and where it decides what a group costs,
// is known when it is compiled.
template <int kSide_, Form kForm_, bool kStochastic_, bool kRotated_, Choice kChoice_>
struct Way {
  static constexpr int kSide = kSide_;
  static constexpr Form kForm = kForm_;
  static constexpr bool kStochastic = kStochastic_, kRotated = kRotated_;
  static constexpr Choice kChoice = kChoice_;
  // neighbours lie in a word, unchanged
  static constexpr bool kWords = kSide == 0 && !kRotated;
};

// A group's codes, or its operand, from values of at most 6.5 times 1 / multiplier. `group` numbers
// it for the random bits.
template <Form kForm, bool kStochastic, bool kWords>
__device__ inline void round_group(const Shared& s, int side, const Factors& factors,
                                   const float (&x)[kGroup], const uint32_t (&w)[8], uint64_t group,
                                   uint4 (&out)[2]) {
  uint4 random;
  if constexpr (kStochastic) random = random_bytes(s.keys, s.stream[side], group);
  if constexpr (kForm == Form::codes) {
    uint2 codes;
    if constexpr (kStochastic) {
      codes = stochastic_codes<kWords>(x, w, factors.multiplier, random);
    } else {
      codes = nearest_codes<kWords>(x, w, factors.multiplier);
    }
    out[0] = make_uint4(codes.x, codes.y, 0, 0);
  } else {
    uint32_t o[8];
    if constexpr (kStochastic) {
      stochastic_operand(x, factors, random, o);
    } else {
      nearest_operand<kWords>(x, w, factors, o);
    }
    out[0] = make_uint4(o[0], o[1], o[2], o[3]);
    out[1] = make_uint4(o[4], o[5], o[6], o[7]);
  }
}

// The same of a special() group, which is rare: apart, so that the usual way stays short.
template <Form kForm, bool kStochastic>
__device__ __noinline__ void round_special(const Shared& s, int side, uint32_t scale, bool mx,
                                           const float* from, uint64_t group, uint4 (&out)[2]) {
  if (without_codes(scale)) {
    const uint32_t fill = kForm == Form::operand && scale == kNanScale ? 0x7fc07fc0u : 0;
    out[0] = out[1] = make_uint4(fill, fill, fill, fill);
    return;
  }
  float x[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = from[i];
  const Factors factors = s.factors[side][scale];
  tame(x, factors.multiplier, mx);
  const uint32_t none[8] = {};
  round_group<kForm, kStochastic, false>(s, side, factors, x, none, group, out);
}

template <typename W>
__device__ inline void quantize_group(const Fp4QuantizeParams& p, const Shared& s, uint32_t scale,
                                      const float (&x)[kGroup], const uint32_t (&w)[8],
                                      uint64_t group, uint4 (&out)[2]) {
  const Factors factors = s.factors[W::kSide][scale];
  if (special(scale)) {
    float copy[kGroup];
    uint4 special_out[2];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) copy[i] = x[i];
    round_special<W::kForm, W::kStochastic>(s, W::kSide, scale, p.job.mx, copy, group, special_out);
    out[0] = special_out[0], out[1] = special_out[1];
  } else {
    round_group<W::kForm, W::kStochastic, W::kWords>(s, W::kSide, factors, x, w, group, out);
  }
}

// Bytes of a group where it is written.
template <typename W>
constexpr uint32_t kGroupBytes = W::kForm == Form::codes ? kGroup / 2 : kGroup * 2;

__device__ inline uint4* beyond(uint4* p, uint64_t bytes) {
  return reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(p) + bytes);
}
__device__ inline uint64_t wide(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b; }

// Where a tile of a side begins, its `row`th and `column`th.
template <typename W>
__device__ inline uint4* place_of(const Fp4QuantizeParams& p, int row, int column) {
  const Fp4Side& side = p.job.side[W::kSide];
  constexpr bool kPacked = W::kForm == Form::codes;
  unsigned char* first = kPacked ? side.codes : static_cast<unsigned char*>(side.operand);
  return reinterpret_cast<uint4*>(first + wide(row, p.groups[W::kSide]) *
                                              (kFp4Tile * kGroupBytes<W>)+column *
                                              (kTileGroups * kGroupBytes<W>));
}
// The number of a tile's first group.
template <typename W>
__device__ inline uint64_t number_of(const Fp4QuantizeParams& p, int row, int column) {
  return wide(row, p.numbers[W::kSide]) * kFp4Tile + column * kTileGroups;
}

// What of a tile, the `at`th, is inside.
__device__ inline int inside(int64_t size, int at) {
  return static_cast<int>(size) - at * kFp4Tile;
}

// A tile's rows: a thread a group of a row. An operand is put where its row was: a lane has 32
// bytes of it, of which a store takes 16, and stores of whole lines cost less.
template <typename W>
__device__ inline void quantize_rows(const Fp4QuantizeParams& p, Shared& s, int now, Spot at) {
  constexpr bool kPacked = W::kForm == Form::codes;
  const int group = threadIdx.x % kTileGroups;
  int row = threadIdx.x / kTileGroups;
  // what a thread writes: its group, or 16 bytes of every other row of its warp
  const int lane = threadIdx.x % 32, out_row = kPacked ? row : row / 4 * 4 + lane / 16;
  const int out_group = kPacked ? group : lane % 16 / 2;
  const uint32_t row_bytes = p.groups[0] * kGroupBytes<W>;
  uint4* to = beyond(
      place_of<W>(p, at.row, at.column),
      wide(out_row, row_bytes) + (kPacked ? group * kGroupBytes<W> : lane % 16 * sizeof(uint4)));
  uint64_t number = 0;
  if constexpr (W::kStochastic) {
    number = number_of<W>(p, at.row, at.column) + wide(row, p.numbers[0]) + group;
  }
  const bool across = at.column * kTileGroups + out_group < p.groups[0];
  int left = (across ? inside(p.padded[0], at.row) : 0) - out_row;
  [[maybe_unused]] const int real_rows = inside(p.job.rows, at.row);
  const float to_six = s.side[0].to_six;
  [[maybe_unused]] const bool plain = !p.job.mx && !p.job.side[0].scale_up;
  auto* staged = reinterpret_cast<uint8_t*>(s.scales[now][0]) + scale_byte(row, group);
  uint32_t* from = s.tile[now] + tile_word(row, 0);
  const int first = tile_word(0, 2 * group), second = tile_word(0, 2 * group + 1);
  [[maybe_unused]] const int out = tile_word(out_row, lane % 16) - tile_word(row, 0);
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const uint4 a = *reinterpret_cast<const uint4*>(from + first);
    const uint4 b = *reinterpret_cast<const uint4*>(from + second);
    uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    float x[kGroup];
    unpack16(w, x);
    uint32_t amax = 0;
    if constexpr (W::kRotated) {
      amax = rotate(x);
    } else if constexpr (W::kChoice != Choice::block) {
      amax = packed_amax(w);
    }
    uint32_t scale;
    if constexpr (W::kChoice == Choice::block) {  // beyond the last row of a ragged block: none
      scale = row < real_rows ? s.block[now][row / kGroup * kTileGroups + group] : 0;
      row += kRowsAtOnce;
    } else {
      scale = choose_scale<W>(p, s, plain, to_six, amax, x, 1);
    }
    uint4 q[2];
    quantize_group<W>(p, s, scale, x, w, number, q);
    if constexpr (kPacked) {
      *staged = scale;
      staged += scale_byte(kRowsAtOnce, 0);
      if (left > 0) *reinterpret_cast<uint2*>(to) = make_uint2(q[0].x, q[0].y);
    } else {
      *reinterpret_cast<uint4*>(from + first) = q[0];
      *reinterpret_cast<uint4*>(from + second) = q[1];
      __syncwarp();
      const auto* words = reinterpret_cast<const uint4*>(from + out);
      if (left > 0) *to = words[0];
      if (left > 2) *beyond(to, wide(2, row_bytes)) = words[2 * kFp4Tile / 8];
    }
    left -= kRowsAtOnce;
    from += kRowsAtOnce * (kFp4Tile / 2) + kRowsAtOnce / kGroup * 4;
    to = beyond(to, wide(kRowsAtOnce, row_bytes));
    if constexpr (W::kStochastic) number += wide(kRowsAtOnce, p.numbers[0]);
  }
}

// A tile's columns: a thread the same group of two neighbouring ones.
template <typename W>
__device__ inline void quantize_columns(const Fp4QuantizeParams& p, Shared& s, int now, Spot at) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  const bool across = at.row * kTileGroups + group < p.groups[1];
  const int columns = across ? inside(p.padded[1], at.column) : 0;
  [[maybe_unused]] const int real_columns = inside(p.job.cols, at.column);
  const float to_six = s.side[1].to_six;
  [[maybe_unused]] const bool plain = !p.job.mx && !p.job.side[1].scale_up;
  int column = 2 * (warp * 4 + lane % 4);
  const uint32_t step = p.groups[1] * kGroupBytes<W>;
  uint4* to =
      beyond(place_of<W>(p, at.column, at.row), wide(column, step) + group * kGroupBytes<W>);
  uint64_t number = 0;
  if constexpr (W::kStochastic) {
    number = number_of<W>(p, at.column, at.row) + wide(column, p.numbers[1]) + group;
  }
  auto* staged = reinterpret_cast<uint8_t*>(s.scales[now][1]) + scale_byte(column, group);
  const uint32_t* from = s.tile[now] + tile_word(group * kGroup, warp) + lane % 4;
  constexpr int kFurther = kFp4Tile / 2;  // columns of the second step
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    uint32_t words[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) words[j] = from[j * (kFp4Tile / 2)];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[kGroup];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        x[j] = __uint_as_float(half ? words[j] & 0xffff0000u : words[j] << 16);
      }
      uint32_t amax = 0;
      if constexpr (W::kRotated) {
        amax = rotate(x);
      } else if constexpr (W::kChoice != Choice::block) {
        amax = group_amax(x);
      }
      uint32_t scale;
      if constexpr (W::kChoice == Choice::block) {
        scale = column < real_columns ? s.block[now][group * kTileGroups + column / kGroup] : 0;
      } else {
        scale = choose_scale<W>(p, s, plain, to_six, amax, x, 4);
      }
      if constexpr (W::kForm == Form::codes) {
        *staged = scale;
        staged += scale_byte(1, 0);  // an even column's neighbour is in its 32 rows
      }
      const uint32_t none[8] = {};  // neighbours are not in one word
      uint4 q[2];
      quantize_group<W>(p, s, scale, x, none, number, q);
      if (column < columns) {
        if constexpr (W::kForm == Form::codes) {
          *reinterpret_cast<uint2*>(to) = make_uint2(q[0].x, q[0].y);
        } else {
          to[0] = q[0], to[1] = q[1];
        }
      }
      ++column;
      to = beyond(to, step);
      if constexpr (W::kStochastic) number += p.numbers[1];
    }
    column += kFurther - 2;
    to = beyond(to, wide(kFurther - 2, step));
    if constexpr (W::kStochastic) number += wide(kFurther - 2, p.numbers[1]);
    staged += scale_byte(kFurther, 0) - scale_byte(2, 0);
    from += tile_word(0, kFurther / 8 + warp) - tile_word(0, warp);
  }
}

template <int kSide, Form kForm, bool kStochastic, bool kRotated, Choice kChoice>
__device__ inline void quantize(const Fp4QuantizeParams& p, Shared& s, int now, Spot at) {
  using W = Way<kSide, kForm, kStochastic, kRotated, kChoice>;
  if constexpr (kSide == 0) {
    quantize_rows<W>(p, s, now, at);
  } else {
    quantize_columns<W>(p, s, now, at);
  }
}

// A side of a tile the way that its flags say: of the loops in here a launch runs one, so the
// others cost neither time nor room in the instruction cache.
template <int kSide, Form kForm, bool kSquare>
__device__ inline void quantize_form(const Fp4QuantizeParams& p, Shared& s, int now, Spot at) {
  const Fp4Side& side = p.job.side[kSide];
  if constexpr (kSquare) {  // never rotated
    if (side.stochastic) {
      quantize<kSide, kForm, true, false, Choice::block>(p, s, now, at);
    } else {
      quantize<kSide, kForm, false, false, Choice::block>(p, s, now, at);
    }
  } else if (side.four_over_six) {  // never stochastic
    if (side.rotated) {
      quantize<kSide, kForm, false, true, Choice::six_or_four>(p, s, now, at);
    } else {
      quantize<kSide, kForm, false, false, Choice::six_or_four>(p, s, now, at);
    }
  } else if (side.stochastic) {
    if (side.rotated) {
      quantize<kSide, kForm, true, true, Choice::group>(p, s, now, at);
    } else {
      quantize<kSide, kForm, true, false, Choice::group>(p, s, now, at);
    }
  } else if (side.rotated) {
    quantize<kSide, kForm, false, true, Choice::group>(p, s, now, at);
  } else {
    quantize<kSide, kForm, false, false, Choice::group>(p, s, now, at);
  }
}

template <int kSide, bool kSquare>
__device__ inline void quantize_side(const Fp4QuantizeParams& p, Shared& s, int now, Spot at) {
  const Form form = p.job.side[kSide].form;
  if (form == Form::codes) quantize_form<kSide, Form::codes, kSquare>(p, s, now, at);
  if (form == Form::operand) quantize_form<kSide, Form::operand, kSquare>(p, s, now, at);
}

}  // namespace narrowfloat
