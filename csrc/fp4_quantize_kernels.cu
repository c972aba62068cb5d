// Decides how a tensor becomes FP4 on the device: both orientations of a tile from one read.
#include <cuda_pipeline_primitives.h>

#include "check.h"
#include "fp4_kernels.h"
#include "fp4_numerics.cuh"
#include "kernels.cuh"

namespace narrowfloat {
namespace {

constexpr int kTileGroups = kFp4Tile / kGroup;
constexpr int kRowsAtOnce = kFp4Threads / kTileGroups;  // of a tile: a thread a group of a row
constexpr int kRowSteps = kFp4Tile / kRowsAtOnce;
constexpr int kTileWords = kFp4Tile * kFp4Tile / 2 + 4 * kTileGroups;
constexpr int kCodes = 128;  // scale bytes

// Where 16 bytes of a tile's row, eight columns, lie in words of two bf16. The swap in the right
// half lets eight lanes that read every other one meet no bank twice; sixteen rows further is
// another four banks, for lanes on eight groups of rows and four pairs of columns.
__device__ inline int tile_word(int row, int eight) {
  return row * (kFp4Tile / 2) + row / kGroup * 4 + (eight ^ (eight >> 3)) * 4;
}

// The byte of (row, group) in a tile's share of the scales, which is two runs of 512 bytes.
__device__ inline int scale_byte(int row, int group) {
  return group / 4 * 512 + row % 32 * 16 + row / 32 * 4 + group % 4;
}

struct Shared {
  uint32_t tile[2][kTileWords];  // this one and the next, which is on its way
  Factors factors[2][kCodes];
  uint4 keys[kPhiloxKeys];
  uint2 stream[2];  // of random bytes, of each side
  SideScale side[2];
  uint32_t scales[2][kFp4Tile * kTileGroups / 4];  // bytes, as scale_byte() has them
  uint32_t
      block[2][kTileGroups * kTileGroups];  // 16 x 16: amax, then scale; this tile's and the next's
  float error[2][kFp4Tile * kTileGroups];   // last: only four over six with 16 x 16 has it
};

// Sixteen neighbours of a row, any strides, as bf16 in eight words.
__device__ inline void load16(const Fp4Job& job, int64_t r, int64_t c, uint32_t (&w)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float v[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (r < job.rows && c + 2 * i + j < job.cols) {
        v[j] = load_real(job.x, job.type, r * job.row_stride + (c + 2 * i + j) * job.col_stride);
      }
    }
    w[i] = pack_bf16(v[0], v[1]);
  }
}

// Brings a tile from bf16, fp16 or fp32, as bf16, to shared memory; zeros outside. What is not the
// usual way is kept small: a tile's code has to fit into the instruction cache.
__device__ __noinline__ void load_slowly(const Fp4Job& job, bool aligned, int64_t r0, int64_t c0,
                                         uint32_t* tile) {
  const int group = threadIdx.x % kTileGroups;
  const int64_t c = c0 + group * kGroup;
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
    const int64_t r = r0 + row;
    uint32_t w[8];
    if (aligned && job.type == Real::f32) {
      const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(job.x) +
                                                      r * job.row_stride + c);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 q =
            r < job.rows && c + 4 * k < job.cols ? p[k] : make_float4(0.f, 0.f, 0.f, 0.f);
        w[2 * k] = pack_bf16(q.x, q.y), w[2 * k + 1] = pack_bf16(q.z, q.w);
      }
    } else {
      load16(job, r, c, w);
    }
    *reinterpret_cast<uint4*>(tile + tile_word(row, 2 * group)) =
        make_uint4(w[0], w[1], w[2], w[3]);
    *reinterpret_cast<uint4*>(tile + tile_word(row, 2 * group + 1)) =
        make_uint4(w[4], w[5], w[6], w[7]);
  }
}

// Starts to. A tile of aligned bf16 that is wholly inside is copied without looking at bounds.
__device__ inline void load_tile(const Fp4Job& job, bool aligned, int64_t r0, int64_t c0,
                                 uint32_t* tile) {
  if (!aligned || job.type != Real::bf16) {
    load_slowly(job, aligned, r0, c0, tile);
    return;
  }
  const int row = threadIdx.x / kTileGroups, group = threadIdx.x % kTileGroups;
  const auto* from =
      static_cast<const __nv_bfloat16*>(job.x) + (r0 + row) * job.row_stride + c0 + group * kGroup;
  uint32_t* const to[2] = {tile + tile_word(row, 2 * group), tile + tile_word(row, 2 * group + 1)};
  // kRowsAtOnce rows further every group's words lie as far on
  constexpr int kFurther = kRowsAtOnce * (kFp4Tile / 2) + kRowsAtOnce / kGroup * 4;
  static_assert(kRowsAtOnce % kGroup == 0);
  const int64_t step = kRowsAtOnce * job.row_stride;
  if (r0 + kFp4Tile <= job.rows && c0 + kFp4Tile <= job.cols) {
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i, from += step) {
      __pipeline_memcpy_async(to[0] + i * kFurther, from, 16);
      __pipeline_memcpy_async(to[1] + i * kFurther, from + 8, 16);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i, from += step) {
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      const bool inside =
          r0 + row + i * kRowsAtOnce < job.rows && c0 + group * kGroup + 8 * k < job.cols;
      __pipeline_memcpy_async(to[k] + i * kFurther,
                              inside ? static_cast<const void*>(from + 8 * k) : job.x, 16,
                              inside ? 0 : 16);
    }
  }
}

__device__ inline void take16(const uint32_t* tile, int row, int group, uint32_t (&w)[8]) {
  const uint4 a = *reinterpret_cast<const uint4*>(tile + tile_word(row, 2 * group));
  const uint4 b = *reinterpret_cast<const uint4*>(tile + tile_word(row, 2 * group + 1));
  w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
  w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

__device__ inline void take16(const uint32_t* tile, int row, int group, float (&x)[kGroup]) {
  uint32_t w[8];
  take16(tile, row, group, w);
  unpack16(w, x);
}

// Largest of the partial maxima, in every lane of a warp.
__device__ inline uint32_t largest(const uint32_t* partials, int count) {
  uint32_t bits = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) bits = max(bits, __ldcg(partials + i));
  return __reduce_max_sync(0xffffffffu, bits);
}

// Tables of what depends on the scale byte alone, and the sides' scales.
__device__ inline void prepare(const Fp4QuantizeParams& p, Shared& s) {
  if (threadIdx.x < 2 * kTileGroups * kTileGroups) {
    s.block[threadIdx.x / 64][threadIdx.x % 64] = 0;
  }
  wait_for_launch_before();
  if (p.job.seed && threadIdx.x < kPhiloxKeys) {
    s.keys[threadIdx.x] = philox_keys(p.job.seed, threadIdx.x);
    if (threadIdx.x < 2) s.stream[threadIdx.x] = random_stream(p.job.seed, threadIdx.x);
  }
  if (threadIdx.x < 64) {  // a warp a side
    const int k = threadIdx.x / 32;
    const Fp4Side& side = p.job.side[k];
    if (side.form != Fp4Form::none) {
      const SideScale own = side_scale(largest(p.amax[k], p.amax_count[k]), side, p.job.mx);
      if (threadIdx.x % 32 == 0) {
        s.side[k] = own;
        if (blockIdx.x == 0) {
          *side.tensor_scale = own.tensor_scale;
          if (side.alpha) {
            side.alpha[0] = own.tensor_scale * *side.other_scale;
            side.alpha[1] = 0.f;
          }
        }
      }
    }
  }
  __syncthreads();
  const int k = threadIdx.x / kCodes, code = threadIdx.x % kCodes;
  if (p.job.side[k].form != Fp4Form::none) {
    const uint32_t value = __float_as_uint(e4m3_value(code)) >> 16;
    s.factors[k][code] = {
        code == 0 || code == kNanScale ? 0.f : multiplier_of(code, s.side[k], p.job.mx),
        value | value << 16};
  }
  __syncthreads();
}

// Of two scale bytes the one with the smaller error, given in units of codes; ties keep `six`.
__device__ inline uint32_t smaller_error(uint32_t six, float six_error, uint32_t four,
                                         float four_error) {
  const float at_six = e4m3_value(six), at_four = e4m3_value(four);
  return __fmul_rn(__fmul_rn(four_error, at_four), at_four) <
                 __fmul_rn(__fmul_rn(six_error, at_six), at_six)
             ? four
             : six;
}

// Where a group's scale byte comes from.
enum class Choice { group, six_or_four, block };

// How a side is quantized: what is the same for a launch, and where it decides what a group costs,
// is known when it is compiled.
template <int kSide_, Fp4Form kForm_, bool kStochastic_, bool kRotated_, Choice kChoice_>
struct Way {
  static constexpr int kSide = kSide_;
  static constexpr Fp4Form kForm = kForm_;
  static constexpr bool kStochastic = kStochastic_, kRotated = kRotated_;
  static constexpr Choice kChoice = kChoice_;
  // neighbours lie in a word, unchanged
  static constexpr bool kWords = kSide == 0 && !kRotated;
};

// The scale byte of a group whose block's amax is `bits`. Where a block is more than the group, its
// threads agree: `pair_lane` is the other half's lane distance for blocks of 32.
template <typename W>
__device__ inline uint32_t choose_scale(const Fp4QuantizeParams& p, const Shared& s, float to_six,
                                        uint32_t bits, const float (&x)[kGroup], int pair_lane) {
  const Fp4Job& job = p.job;
  const Fp4Side& side = job.side[W::kSide];
  const auto& factors = s.factors[W::kSide];
  if constexpr (W::kChoice == Choice::six_or_four) {
    const uint32_t six = block_scale(bits, s.side[W::kSide], false, side.scale_up, false);
    if (six != 0 && six != kNanScale) {
      const uint32_t four = block_scale(bits, s.side[W::kSide], false, false, true);
      return smaller_error(six, squared_error(x, factors[six].multiplier), four,
                           squared_error(x, factors[four].multiplier));
    }
    return six;
  }
  if (!job.mx && !side.scale_up) return nearest_block_scale(bits, to_six);
  if (job.mx) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, pair_lane));
  return block_scale(bits, s.side[W::kSide], job.mx, side.scale_up, false);
}

// A group with its scale byte known: its codes or its operand to `to`. `group` numbers it for the
// random bits.
template <typename W>
__device__ inline void write_group(const Fp4QuantizeParams& p, const Shared& s, uint32_t scale,
                                   float (&x)[kGroup], uint32_t (&w)[8], uint4* to,
                                   uint64_t group) {
  const Factors factors = s.factors[W::kSide][scale];
  constexpr bool kPacked = W::kForm == Fp4Form::packed;
  if (special(scale)) {
    if (!kPacked && scale == kNanScale) {
      to[0] = to[1] = make_uint4(0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u);
      return;
    }
    tame(x, scale, factors.multiplier, p.job.mx);
    if constexpr (W::kWords) {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
  }
  uint4 random;
  if constexpr (W::kStochastic) random = random_bytes(s.keys, s.stream[W::kSide], group);
  if constexpr (kPacked) {
    uint2 codes;
    if constexpr (W::kStochastic) {
      codes = stochastic_codes<W::kWords>(x, w, factors.multiplier, random);
    } else {
      codes = nearest_codes<W::kWords>(x, w, factors.multiplier);
    }
    *reinterpret_cast<uint2*>(to) = codes;
  } else {
    uint32_t out[8];
    if constexpr (W::kStochastic) {
      stochastic_operand<W::kWords>(x, w, factors, random, out);
    } else {
      nearest_operand<W::kWords>(x, w, factors, out);
    }
    to[0] = make_uint4(out[0], out[1], out[2], out[3]);
    to[1] = make_uint4(out[4], out[5], out[6], out[7]);
  }
}

// Where a side's group `at`, counted from its beginning, is written.
template <typename W>
__device__ inline uint4* place_of(const Fp4Side& side, int64_t at) {
  if constexpr (W::kForm == Fp4Form::packed) {
    return reinterpret_cast<uint4*>(side.codes + at * (kGroup / 2));
  } else {
    return static_cast<uint4*>(side.operand) + at * 2;
  }
}
// Bytes of a group there.
template <typename W>
constexpr int64_t kGroupBytes = W::kForm == Fp4Form::packed ? kGroup / 2 : kGroup * 2;

__device__ inline uint4* beyond(uint4* p, int64_t bytes) {
  return reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(p) + bytes);
}

// Where in a tile: what is the same for its threads is added apart.
__device__ inline int64_t wide(int row, int64_t groups, int group) {
  return static_cast<int64_t>(static_cast<uint64_t>(row) * static_cast<uint32_t>(groups) + group);
}

// What of a tile from `first` on is inside.
__device__ inline int inside(int64_t size, int64_t first) {
  return static_cast<int>(min(size - first, static_cast<int64_t>(kFp4Tile)));
}

// A tile's rows: a thread a group of a row.
template <typename W>
__device__ inline void quantize_rows(const Fp4QuantizeParams& p, Shared& s, int now, int64_t r0,
                                     int64_t c0) {
  const int group = threadIdx.x % kTileGroups;
  int row = threadIdx.x / kTileGroups;
  uint4* to = beyond(place_of<W>(p.job.side[0], r0 * p.groups[0] + c0 / kGroup),
                     wide(row, p.groups[0], group) * kGroupBytes<W>);
  const int64_t step = kRowsAtOnce * p.groups[0] * kGroupBytes<W>;
  uint64_t number = 0;
  if constexpr (W::kStochastic) {
    number = r0 * p.numbers[0] + c0 / kGroup + wide(row, p.numbers[0], group);
  }
  const int rows = c0 / kGroup + group < p.groups[0] ? inside(p.padded[0], r0) : 0;
  [[maybe_unused]] const int real_rows = inside(p.job.rows, r0);
  const float to_six = s.side[0].to_six;
  auto* staged = reinterpret_cast<uint8_t*>(s.scales[0]) + scale_byte(row, group);
  const uint32_t* from = s.tile[now] + tile_word(row, 0);
  const int first = tile_word(0, 2 * group), second = tile_word(0, 2 * group + 1);
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
    } else {
      scale = choose_scale<W>(p, s, to_six, amax, x, 1);
    }
    if constexpr (W::kForm == Fp4Form::packed) {
      *staged = scale;
      staged += scale_byte(kRowsAtOnce, 0);
    }
    if (row < rows) write_group<W>(p, s, scale, x, w, to, number);
    row += kRowsAtOnce;
    from += kRowsAtOnce * (kFp4Tile / 2) + kRowsAtOnce / kGroup * 4;
    to = beyond(to, step);
    if constexpr (W::kStochastic) number += kRowsAtOnce * p.numbers[0];
  }
}

// A tile's columns: a thread the same group of two neighbouring ones.
template <typename W>
__device__ inline void quantize_columns(const Fp4QuantizeParams& p, Shared& s, int now, int64_t r0,
                                        int64_t c0) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  const int columns = r0 / kGroup + group < p.groups[1] ? inside(p.padded[1], c0) : 0;
  [[maybe_unused]] const int real_columns = inside(p.job.cols, c0);
  const float to_six = s.side[1].to_six;
  int column = 2 * (warp * 4 + lane % 4);
  uint4* to = beyond(place_of<W>(p.job.side[1], c0 * p.groups[1] + r0 / kGroup),
                     wide(column, p.groups[1], group) * kGroupBytes<W>);
  const int64_t step = p.groups[1] * kGroupBytes<W>;
  uint64_t number = 0;
  if constexpr (W::kStochastic) {
    number = c0 * p.numbers[1] + r0 / kGroup + wide(column, p.numbers[1], group);
  }
  auto* staged = reinterpret_cast<uint8_t*>(s.scales[1]) + scale_byte(column, group);
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
        scale = choose_scale<W>(p, s, to_six, amax, x, 4);
      }
      if constexpr (W::kForm == Fp4Form::packed) {
        *staged = scale;
        staged += scale_byte(1, 0);  // an even column's neighbour is in its 32 rows
      }
      uint32_t none[8];  // neighbours are not in one word
      if (column < columns) write_group<W>(p, s, scale, x, none, to, number);
      ++column;
      to = beyond(to, step);
      if constexpr (W::kStochastic) number += p.numbers[1];
    }
    column += kFurther - 2;
    to = beyond(to, (kFurther - 2) * step);
    if constexpr (W::kStochastic) number += (kFurther - 2) * p.numbers[1];
    staged += scale_byte(kFurther, 0) - scale_byte(2, 0);
    from += tile_word(0, kFurther / 8 + warp) - tile_word(0, warp);
  }
}

template <int kSide, Fp4Form kForm, bool kStochastic, bool kRotated, Choice kChoice>
__device__ inline void quantize(const Fp4QuantizeParams& p, Shared& s, int now, int64_t r0,
                                int64_t c0) {
  using W = Way<kSide, kForm, kStochastic, kRotated, kChoice>;
  if constexpr (kSide == 0) {
    quantize_rows<W>(p, s, now, r0, c0);
  } else {
    quantize_columns<W>(p, s, now, r0, c0);
  }
}

// A side of a tile the way that its flags say: of the loops in here a launch runs one, so the
// others cost neither time nor room in the instruction cache.
template <int kSide, Fp4Form kForm, bool kTwoD>
__device__ inline void quantize_form(const Fp4QuantizeParams& p, Shared& s, int now, int64_t r0,
                                     int64_t c0) {
  const Fp4Side& side = p.job.side[kSide];
  if constexpr (kTwoD) {  // never rotated
    if (side.stochastic) {
      quantize<kSide, kForm, true, false, Choice::block>(p, s, now, r0, c0);
    } else {
      quantize<kSide, kForm, false, false, Choice::block>(p, s, now, r0, c0);
    }
  } else if (side.four_over_six) {  // never stochastic
    if (side.rotated) {
      quantize<kSide, kForm, false, true, Choice::six_or_four>(p, s, now, r0, c0);
    } else {
      quantize<kSide, kForm, false, false, Choice::six_or_four>(p, s, now, r0, c0);
    }
  } else if (side.stochastic) {
    if (side.rotated) {
      quantize<kSide, kForm, true, true, Choice::group>(p, s, now, r0, c0);
    } else {
      quantize<kSide, kForm, true, false, Choice::group>(p, s, now, r0, c0);
    }
  } else if (side.rotated) {
    quantize<kSide, kForm, false, true, Choice::group>(p, s, now, r0, c0);
  } else {
    quantize<kSide, kForm, false, false, Choice::group>(p, s, now, r0, c0);
  }
}

template <int kSide, bool kTwoD>
__device__ inline void quantize_side(const Fp4QuantizeParams& p, Shared& s, int now, int64_t r0,
                                     int64_t c0) {
  const Fp4Form form = p.job.side[kSide].form;
  if (form == Fp4Form::packed) quantize_form<kSide, Fp4Form::packed, kTwoD>(p, s, now, r0, c0);
  if (form == Fp4Form::operand) quantize_form<kSide, Fp4Form::operand, kTwoD>(p, s, now, r0, c0);
}

// The staged scale bytes of a tile, the `row`th and `column`th of its side.
__device__ inline void write_scales(const uint32_t* staged, uint8_t* scales, uint32_t row,
                                    uint32_t column, int64_t chunks) {
  constexpr int kTileChunks = kTileGroups / kScaleGroups;
  const int64_t first = int64_t{column} * kTileChunks;
  if (first + threadIdx.x / kScaleRows >= chunks) return;
  reinterpret_cast<uint32_t*>(scales + (row * chunks + first) * kScaleTileBytes)[threadIdx.x] =
      staged[threadIdx.x];
}

__device__ inline void write_column_sums(const Fp4QuantizeParams& p) {
  if (p.job.column_sums == nullptr) return;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFp4Threads;
  for (int64_t c = static_cast<int64_t>(blockIdx.x) * kFp4Threads + threadIdx.x; c < p.job.cols;
       c += step) {
    float total = 0.f;
    for (int64_t i = 0; i < p.sum_count; ++i) total += p.sum_partials[i * p.job.cols + c];
    store_real(p.job.column_sums, p.job.sums_type, c, total);
  }
}

__host__ __device__ inline bool any_six(const Fp4Job& job) {
  return (job.side[0].form != Fp4Form::none && job.side[0].four_over_six) ||
         (job.side[1].form != Fp4Form::none && job.side[1].four_over_six);
}

// The scale bytes of a tile's 16 x 16 blocks, into s.block[now], which is zero before.
__device__ inline void choose_block_scales(const Fp4QuantizeParams& p, Shared& s, int now) {
  const uint32_t* tile = s.tile[now];
  const int k = p.job.side[0].form != Fp4Form::none ? 0 : 1;
  const Fp4Side& side = p.job.side[k];
  const bool six_or_four = any_six(p.job);
  const int group = threadIdx.x % kTileGroups;
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
    uint32_t w[8];
    take16(tile, row, group, w);
    atomicMax(&s.block[now][row / kGroup * kTileGroups + group], packed_amax(w));
  }
  __syncthreads();
  if (six_or_four) {
#pragma unroll 1
    for (int i = 0; i < kRowSteps; ++i) {
      const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
      const uint32_t bits = s.block[now][row / kGroup * kTileGroups + group];
      const uint32_t six = block_scale(bits, s.side[k], false, side.scale_up, false);
      const uint32_t four = block_scale(bits, s.side[k], false, false, true);
      float x[kGroup];
      take16(tile, row, group, x);
      s.error[0][row * kTileGroups + group] = squared_error(x, s.factors[k][six].multiplier);
      s.error[1][row * kTileGroups + group] = squared_error(x, s.factors[k][four].multiplier);
    }
    __syncthreads();
  }
  if (threadIdx.x < kTileGroups * kTileGroups) {
    const uint32_t bits = s.block[now][threadIdx.x];
    uint32_t scale = block_scale(bits, s.side[k], false, side.scale_up, false);
    if (six_or_four) {
      if (scale != 0 && scale != kNanScale) {
        float six_error = 0.f, four_error = 0.f;
        const int row = static_cast<int>(threadIdx.x) / kTileGroups * kGroup;
        for (int i = 0; i < kGroup; ++i) {
          const int at = (row + i) * kTileGroups + group;
          six_error = __fadd_rn(six_error, s.error[0][at]);
          four_error = __fadd_rn(four_error, s.error[1][at]);
        }
        scale = smaller_error(scale, six_error, block_scale(bits, s.side[k], false, false, true),
                              four_error);
      }
    }
    s.block[now][threadIdx.x] = scale;
  }
  __syncthreads();
}

struct Position {  // of a tile, in tiles
  uint32_t row, column;
};

template <bool kTwoD>
__global__ void __launch_bounds__(kFp4Threads, kFp4BlocksPerSm)
    narrowfloat_fp4_quantize(const __grid_constant__ Fp4QuantizeParams p) {
  extern __shared__ __align__(16) unsigned char launch_shared[];
  Shared& s = *reinterpret_cast<Shared*>(launch_shared);
  const Fp4Job& job = p.job;
  const auto tiles = static_cast<uint32_t>(p.tiles);
  const auto across = static_cast<uint32_t>(p.col_tiles);
  const auto load = [&](uint32_t t, int to) {
    Position at{};
    if (t < tiles) {
      at = {t / across, t % across};
      load_tile(job, p.aligned, int64_t{at.row} * kFp4Tile, int64_t{at.column} * kFp4Tile,
                s.tile[to]);
    }
    __pipeline_commit();
    return at;
  };
  Position next = load(blockIdx.x, 0);  // x was there before it was measured
  prepare(p, s);
  int now = 0;
  for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x, now ^= 1) {
    const Position at = next;
    const int64_t r0 = int64_t{at.row} * kFp4Tile, c0 = int64_t{at.column} * kFp4Tile;
    next = load(t + gridDim.x, now ^ 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    if constexpr (kTwoD) choose_block_scales(p, s, now);
    quantize_side<0, kTwoD>(p, s, now, r0, c0);
    quantize_side<1, kTwoD>(p, s, now, r0, c0);
    if (kTwoD && threadIdx.x < kTileGroups * kTileGroups) s.block[now ^ 1][threadIdx.x] = 0;
    __syncthreads();
    if (job.side[0].form == Fp4Form::packed) {
      write_scales(s.scales[0], job.side[0].scales, at.row, at.column, p.chunks[0]);
    }
    if (job.side[1].form == Fp4Form::packed) {
      write_scales(s.scales[1], job.side[1].scales, at.column, at.row, p.chunks[1]);
    }
  }
  write_column_sums(p);
}

template <bool kTwoD>
void launch(const Fp4QuantizeParams& p, int blocks, bool overlaps, cudaStream_t stream) {
  auto* kernel = narrowfloat_fp4_quantize<kTwoD>;
  const int bytes = kTwoD && any_six(p.job) ? sizeof(Shared) : offsetof(Shared, error);
  NF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(kFp4Threads), static_cast<size_t>(bytes),
                                  stream,       &overlap,          overlaps ? 1u : 0u};
  NF_CUDA(cudaLaunchKernelEx(&config, kernel, p));
}

}  // namespace

void launch_fp4_quantize(const Fp4QuantizeParams& p, int blocks, bool overlaps,
                         cudaStream_t stream) {
  with_bool(p.job.two_d,
            [&](auto two_d) { launch<decltype(two_d)::value>(p, blocks, overlaps, stream); });
}

}  // namespace narrowfloat
