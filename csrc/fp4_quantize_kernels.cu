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
  uint4 products[kCodes];
  float multiplier[2][kCodes];
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

// Starts to bring a tile from bf16, fp16 or fp32, as bf16, to shared memory; zeros outside. Only
// the usual way is unrolled: what a tile runs has to fit into the instruction cache.
__device__ inline void load_tile(const Fp4Job& job, bool aligned, int64_t r0, int64_t c0,
                                 uint32_t* tile) {
  const int row = threadIdx.x / kTileGroups, group = threadIdx.x % kTileGroups;
  const int64_t c = c0 + group * kGroup;
  const auto store = [&](int i, const uint4& a, const uint4& b) {
    *reinterpret_cast<uint4*>(tile + tile_word(row + i * kRowsAtOnce, 2 * group)) = a;
    *reinterpret_cast<uint4*>(tile + tile_word(row + i * kRowsAtOnce, 2 * group + 1)) = b;
  };
  if (aligned && job.type == Real::bf16) {
    const auto* p = static_cast<const __nv_bfloat16*>(job.x) + (r0 + row) * job.row_stride + c;
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i, p += kRowsAtOnce * job.row_stride) {
      const bool row_inside = r0 + row + i * kRowsAtOnce < job.rows;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool inside = row_inside && c + 8 * k < job.cols;
        const void* from = inside ? static_cast<const void*>(p + 8 * k) : job.x;
        __pipeline_memcpy_async(tile + tile_word(row + i * kRowsAtOnce, 2 * group + k), from, 16,
                                inside ? 0 : 16);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int64_t r = r0 + row + i * kRowsAtOnce;
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
    store(i, make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7]));
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
  if (threadIdx.x < kCodes) s.products[threadIdx.x] = products_of(threadIdx.x);
  if (threadIdx.x < 2 * kTileGroups * kTileGroups) {
    s.block[threadIdx.x / 64][threadIdx.x % 64] = 0;
  }
  wait_for_launch_before();
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
    s.multiplier[k][code] =
        code == 0 || code == kNanScale ? 0.f : multiplier_of(code, s.side[k], p.job.mx);
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

// The scale byte of a group whose block's amax is `bits`. Where a block is more than the group, its
// threads agree: `pair_lane` is the other half's lane distance for blocks of 32.
template <int kSide, bool kSix>
__device__ inline uint32_t choose_scale(const Fp4QuantizeParams& p, const Shared& s, uint32_t bits,
                                        const float (&x)[kGroup], int pair_lane) {
  const Fp4Job& job = p.job;
  const Fp4Side& side = job.side[kSide];
  if (job.mx) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, pair_lane));
  const uint32_t six = block_scale(bits, s.side[kSide], job.mx, side.scale_up, false);
  if constexpr (kSix) {
    if (side.four_over_six && six != 0 && six != kNanScale) {
      const uint32_t four = block_scale(bits, s.side[kSide], false, false, true);
      return smaller_error(six, squared_error(x, s.multiplier[kSide][six]), four,
                           squared_error(x, s.multiplier[kSide][four]));
    }
  }
  return six;
}

// A group with its scale byte known: its codes or its operand to memory, `to` groups from the
// side's beginning. `group` numbers it for the random bits.
template <int kSide, Fp4Form kForm>
__device__ inline void write_group(const Fp4QuantizeParams& p, const Shared& s, uint32_t scale,
                                   float (&x)[kGroup], int64_t to, int64_t group) {
  const Fp4Side& side = p.job.side[kSide];
  const float multiplier = s.multiplier[kSide][scale];
  if (special(scale)) tame(x, scale, multiplier, p.job.mx);
  const uint2 magnitudes = side.stochastic
                               ? stochastic(x, multiplier, Seed(p.job.seed, kSide).bytes_of(group))
                               : nearest(x, multiplier);
  if constexpr (kForm == Fp4Form::packed) {
    const uint2 signs = sign_nibbles(x);
    reinterpret_cast<uint2*>(side.codes)[to] =
        make_uint2(magnitudes.x | signs.x, magnitudes.y | signs.y);
  } else {
    uint32_t w[8];
    to_operand(magnitudes, s.products[scale], w);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] |= __byte_perm(__float_as_uint(x[2 * i]), __float_as_uint(x[2 * i + 1]), 0x7632) &
              0x80008000u;
    }
    auto* out = static_cast<uint4*>(side.operand) + 2 * to;
    out[0] = make_uint4(w[0], w[1], w[2], w[3]);
    out[1] = make_uint4(w[4], w[5], w[6], w[7]);
  }
}

// The staged scale bytes of a tile: rows of the side from `row`, groups from `group`.
__device__ inline void write_scales(const uint32_t* staged, uint8_t* scales, int64_t row,
                                    int64_t group, int64_t length) {
  const int64_t chunks = (length + kGroup * kScaleGroups - 1) / (kGroup * kScaleGroups);
  const int64_t chunk = group / kScaleGroups + threadIdx.x / 128;
  if (chunk >= chunks) return;
  reinterpret_cast<uint32_t*>(scales + (row / kScaleRows * chunks + chunk) *
                                           kScaleTileBytes)[threadIdx.x % 128] =
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

// The scale bytes of a tile's 16 x 16 blocks, into s.block[now], which is zero before.
template <bool kSix>
__device__ inline void choose_block_scales(const Fp4QuantizeParams& p, Shared& s, int now) {
  const uint32_t* tile = s.tile[now];
  const int k = p.job.side[0].form != Fp4Form::none ? 0 : 1;
  const Fp4Side& side = p.job.side[k];
  const int group = threadIdx.x % kTileGroups;
#pragma unroll 1
  for (int i = 0; i < kRowSteps; ++i) {
    const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
    float x[kGroup];
    take16(tile, row, group, x);
    atomicMax(&s.block[now][row / kGroup * kTileGroups + group], group_amax(x));
  }
  __syncthreads();
  if constexpr (kSix) {
#pragma unroll 1
    for (int i = 0; i < kRowSteps; ++i) {
      const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
      const uint32_t bits = s.block[now][row / kGroup * kTileGroups + group];
      const uint32_t six = block_scale(bits, s.side[k], false, side.scale_up, false);
      const uint32_t four = block_scale(bits, s.side[k], false, false, true);
      float x[kGroup];
      take16(tile, row, group, x);
      s.error[0][row * kTileGroups + group] = squared_error(x, s.multiplier[k][six]);
      s.error[1][row * kTileGroups + group] = squared_error(x, s.multiplier[k][four]);
    }
    __syncthreads();
  }
  if (threadIdx.x < kTileGroups * kTileGroups) {
    const uint32_t bits = s.block[now][threadIdx.x];
    uint32_t scale = block_scale(bits, s.side[k], false, side.scale_up, false);
    if constexpr (kSix) {
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

template <Fp4Form kRows, Fp4Form kColumns, bool kTwoD, bool kSix>
__global__ void __launch_bounds__(kFp4Threads, kFp4BlocksPerSm)
    narrowfloat_fp4_quantize(const __grid_constant__ Fp4QuantizeParams p) {
  extern __shared__ __align__(16) unsigned char launch_shared[];
  Shared& s = *reinterpret_cast<Shared*>(launch_shared);
  const Fp4Job& job = p.job;
  const auto load = [&](int64_t t, int to) {
    if (t < p.tiles) {
      load_tile(job, p.aligned, t / p.col_tiles * kFp4Tile, t % p.col_tiles * kFp4Tile, s.tile[to]);
    }
    __pipeline_commit();
  };
  load(blockIdx.x, 0);  // x was there before it was measured
  prepare(p, s);
  int now = 0;
  for (int64_t t = blockIdx.x; t < p.tiles; t += gridDim.x, now ^= 1) {
    const int64_t r0 = t / p.col_tiles * kFp4Tile, c0 = t % p.col_tiles * kFp4Tile;
    load(t + gridDim.x, now ^ 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    const uint32_t* tile = s.tile[now];
    if constexpr (kTwoD) choose_block_scales<kSix>(p, s, now);

    if constexpr (kRows != Fp4Form::none) {
      auto* staged = reinterpret_cast<uint8_t*>(s.scales[0]);
      const int group = threadIdx.x % kTileGroups;
      const int64_t at = c0 / kGroup + group;
      const int64_t to = r0 * p.groups[0] + at, number = r0 * p.numbers[0] + at;
      const bool group_inside = at < p.groups[0];
      const int rows_inside =
          static_cast<int>(min(p.padded[0] - r0, static_cast<int64_t>(kFp4Tile)));
#pragma unroll 1
      for (int i = 0; i < kRowSteps; ++i) {
        const int row = threadIdx.x / kTileGroups + i * kRowsAtOnce;
        uint32_t w[8];
        take16(tile, row, group, w);
        float x[kGroup];
        unpack16(w, x);
        const uint32_t amax = job.side[0].rotated ? rotate(x) : packed_amax(w);
        const uint32_t scale = kTwoD ? s.block[now][row / kGroup * kTileGroups + group]
                                     : choose_scale<0, kSix>(p, s, amax, x, 1);
        if constexpr (kRows == Fp4Form::packed) {  // none beyond the last row, in a ragged block
          staged[scale_byte(row, group)] = r0 + row < job.rows ? scale : 0;
        }
        if (group_inside && row < rows_inside) {
          write_group<0, kRows>(p, s, scale, x, to + row * p.groups[0],
                                number + row * p.numbers[0]);
        }
      }
    }
    if constexpr (kColumns != Fp4Form::none) {
      auto* staged = reinterpret_cast<uint8_t*>(s.scales[1]);
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
      const int64_t at = r0 / kGroup + group;
      const int64_t to = c0 * p.groups[1] + at, number = c0 * p.numbers[1] + at;
      const bool group_inside = at < p.groups[1];
      const int columns_inside =
          static_cast<int>(min(p.padded[1] - c0, static_cast<int64_t>(kFp4Tile)));
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int eight = i * 8 + warp, pair = eight * 4 + lane % 4;
        const uint32_t* from = tile + tile_word(group * kGroup, eight) + lane % 4;
        uint32_t w[kGroup];
#pragma unroll
        for (int j = 0; j < kGroup; ++j) w[j] = from[j * (kFp4Tile / 2)];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[kGroup];
#pragma unroll
          for (int j = 0; j < kGroup; ++j) {
            x[j] = __uint_as_float(half ? w[j] & 0xffff0000u : w[j] << 16);
          }
          const uint32_t amax = job.side[1].rotated ? rotate(x) : group_amax(x);
          const int column = 2 * pair + half;
          const uint32_t scale = kTwoD ? s.block[now][group * kTileGroups + column / kGroup]
                                       : choose_scale<1, kSix>(p, s, amax, x, 4);
          if constexpr (kColumns == Fp4Form::packed) {
            staged[scale_byte(column, group)] = c0 + column < job.cols ? scale : 0;
          }
          if (group_inside && column < columns_inside) {
            write_group<1, kColumns>(p, s, scale, x, to + column * p.groups[1],
                                     number + column * p.numbers[1]);
          }
        }
      }
    }
    if (kTwoD && threadIdx.x < kTileGroups * kTileGroups) s.block[now ^ 1][threadIdx.x] = 0;
    __syncthreads();
    if constexpr (kRows == Fp4Form::packed) {
      write_scales(s.scales[0], job.side[0].scales, r0, c0 / kGroup, job.cols);
    }
    if constexpr (kColumns == Fp4Form::packed) {
      write_scales(s.scales[1], job.side[1].scales, c0, r0 / kGroup, job.rows);
    }
  }
  write_column_sums(p);
}

template <Fp4Form kRows, Fp4Form kColumns, bool kTwoD, bool kSix>
void launch(const Fp4QuantizeParams& p, int blocks, bool overlaps, cudaStream_t stream) {
  auto* kernel = narrowfloat_fp4_quantize<kRows, kColumns, kTwoD, kSix>;
  constexpr int kBytes = kTwoD && kSix ? sizeof(Shared) : offsetof(Shared, error);
  NF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(kFp4Threads), kBytes,
                                  stream,       &overlap,          overlaps ? 1u : 0u};
  NF_CUDA(cudaLaunchKernelEx(&config, kernel, p));
}

template <typename F>
void with_form(Fp4Form form, F&& f) {
  if (form == Fp4Form::none) {
    f(std::integral_constant<Fp4Form, Fp4Form::none>());
  } else if (form == Fp4Form::packed) {
    f(std::integral_constant<Fp4Form, Fp4Form::packed>());
  } else {
    f(std::integral_constant<Fp4Form, Fp4Form::operand>());
  }
}

}  // namespace

void launch_fp4_quantize(const Fp4QuantizeParams& p, int blocks, bool overlaps,
                         cudaStream_t stream) {
  const auto six = [](const Fp4Side& side) {
    return side.form != Fp4Form::none && side.four_over_six;
  };
  with_form(p.job.side[0].form, [&](auto rows) {
    with_form(p.job.side[1].form, [&](auto columns) {
      with_bool(p.job.two_d, [&](auto two_d) {
        with_bool(six(p.job.side[0]) || six(p.job.side[1]), [&](auto any_six) {
          launch<decltype(rows)::value, decltype(columns)::value, decltype(two_d)::value,
                 decltype(any_six)::value>(p, blocks, overlaps, stream);
        });
      });
    });
  });
}

}  // namespace narrowfloat
