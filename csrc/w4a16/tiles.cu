// How packed FP4 weights are multiplied with tens to hundreds of tokens: by warpgroups,
// which turn the weights into bf16 in their registers, while one warp keeps the copies going.
#include "quantize/kernels.cuh"
#include "w4a16/tiles.cuh"
#include "w4a16/warpgroup.cuh"

namespace narrowfloat {
namespace {

// x once, in the order that the weights have along K: then a bulk copy brings a tile as the
// products read it. A thread has 16 bytes.
template <int kTokens>
__global__ void __launch_bounds__(kArrangeThreads)
    narrowfloat_fp4_arrange(const __grid_constant__ FP4TilesParams p) {
  let_next_launch_start();
  const int chunk = static_cast<int>(blockIdx.x) * kArrangeThreads + threadIdx.x;
  const int in_row = p.units * (kUnitCols / 8);
  const int row = chunk / in_row, block = (chunk - row * in_row) / 8,
            c = chunk % 8;  // of 64 columns
  wait_for_launch_before();
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.shared; i += kArrangeThreads) p.counters[i] = 0;
  }
  if (row >= p.token_tiles * kTokens) return;
  uint32_t words[4] = {};
  if (row < p.tokens) {
    const __nv_bfloat16* from = p.x + row * p.x_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t col = static_cast<int64_t>(block) * 64 + arranged_pair(c, i) * 2;
      if (p.pairs && col + 1 < p.k) {
        words[i] = *reinterpret_cast<const uint32_t*>(from + col);
      } else {
        if (col < p.k) words[i] = bits_of(from + col);
        if (col + 1 < p.k) words[i] |= bits_of(from + col + 1) << 16;
      }
    }
  }
  const int64_t tile = static_cast<int64_t>(row / kTokens) * (2 * p.units) + block;
  uint8_t* to = p.arranged + (tile * kTokens + row % kTokens) * 128 + (c ^ row % 8) * 16;
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Of a tile, a warpgroup has kTiles times 64 rows and all tokens. The last warp fetches: a stage
// holds up to `depth` units of K of x and of each 32 rows of weights.
template <int kTokens, int kWarpgroups, int kTiles>
__global__ void __launch_bounds__(tile_threads(kTokens, kWarpgroups, kTiles), 1)
    narrowfloat_fp4_tiles(const __grid_constant__ FP4TilesParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
  constexpr int kThreads = kWarpgroups * 128;           // that multiply
  constexpr int kUnitTiles = kWarpgroups * kTiles * 2;  // of 32 rows
  constexpr int kXUnit = kTokens * kUnitCols * 2;       // bytes
  constexpr int kSteps = kTiles == 1 ? 4 : 2;           // of 16 along K, of a group of products
  constexpr int kTurned = kTokens == 16 ? 2 : turned_at_once(kWarpgroups);  // groups of 8 tokens
  constexpr bool kMoves = moves_registers(kTokens, kWarpgroups, kTiles);
  extern __shared__ uint4 shared_words[];
  // has_fp4_tiles() knows by this memory that there is a body
  __shared__ Barrier full[kMostTileStages], used[kMostTileStages];
  __shared__ __align__(16) float turn_all[kThreads / 32][turned_at_once(kWarpgroups) * kTurnWords];
  __shared__ int ticket;
  uint8_t* const shared = from_boundary(shared_words, 1024);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = threadIdx.x % 32;

  let_next_launch_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      start_barrier(full + i, 1);
      start_barrier(used + i, kThreads);  // each gives back what it read
    }
    barriers_started();
  }
  __syncthreads();

  int slot = 0, parity = 0;
  const auto advance = [&](int& at, int& of) {
    if (++at == p.stages) at = 0, of ^= 1;
  };
  if (warp >= kThreads / 32) {
    if constexpr (kMoves) give_up_registers<fetch_registers(kWarpgroups)>();
    if (warp > kThreads / 32) return;
    const auto fetch_weights = [&](const Segment& piece, int at) {
      const int first = piece.tile / p.token_tiles * kUnitTiles;
      const int tiles = min(kUnitTiles, p.row_tiles - first);  // that exist
      if (lane == 0) {
        arrive_and_announce(full + at, piece.units * (kXUnit + tiles * kUnitBytes));
      }
      __syncwarp();
      if (lane < tiles) {
        copy_bulk(
            shared + at * p.stage + p.weights + lane * (p.depth * kUnitBytes),
            p.packed + (static_cast<int64_t>(first + lane) * p.units + piece.unit) * kUnitBytes,
            piece.units * kUnitBytes, full + at);
      }
    };
    const auto fetch_x = [&](const Segment& piece, int at) {
      if (lane < piece.units) {
        const int64_t tile = static_cast<int64_t>(piece.tile % p.token_tiles) * p.units;
        copy_bulk(shared + at * p.stage + lane * kXUnit,
                  p.arranged + (tile + piece.unit + lane) * kXUnit, kXUnit, full + at);
      }
    };
    Pieces ahead(p), pieces(p);
    Segment piece;
    int early = 0;  // stages whose weights need not wait for the launch before
    if (p.constant) {
      for (; early < p.stages && ahead.next(piece); ++early) fetch_weights(piece, early);
    }
    wait_for_launch_before();
    written_for_copies();
    for (int i = 0; pieces.next(piece); ++i) {
      if (i >= early) {
        wait_for_phase(used + slot, parity ^ 1);
        fetch_weights(piece, slot);
      }
      fetch_x(piece, slot);
      advance(slot, parity);
    }
    return;
  }

  if constexpr (kMoves) take_registers<multiply_registers(kWarpgroups)>();
  wait_for_launch_before();
  const int warpgroup = warp / 4, own = warp % 4;  // 16 rows of each 64
  const float scale = *p.scale * kRestore;
  float* const turn = turn_all[warp];
  // where the warp's codes and scales lie in the weights of a stage
  const int codes_at = p.weights + (warpgroup * kTiles * 2 + own / 2) * (p.depth * kUnitBytes) +
                       own % 2 * 512 + lane * 16;
  const int scales_at = p.weights + (warpgroup * kTiles * 2 + own / 2) * (p.depth * kUnitBytes) +
                        kUnitCodes + lane * 8;
  const uint32_t low = own % 2 ? 0x4242 : 0x4040;  // of row g

  float sum[kTiles][kTokens / 2];
  uint32_t a[2][kTiles][kSteps][4];
  Segments segments(p);
  for (Segment segment; segments.next(segment);) {
    int add = 0, before = slot;  // the stage whose last products may still run
#pragma unroll 1
    for (int left = segment.units; left > 0; left -= p.depth) {
      wait_for_phase(full + slot, parity);
      const uint8_t* stage = shared + slot * p.stage;
      uint32_t x = swizzled_matrix(stage);
      const int units = min(left, p.depth);
      bool release = before != slot;
#pragma unroll 1
      for (int unit = 0; unit < units; ++unit) {
        uint4 codes[2][kTiles];
        uint2 scales[kTiles];
        const auto load_codes = [&](int half) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            codes[half][i] = *reinterpret_cast<const uint4*>(
                stage + codes_at + 2 * i * p.depth * kUnitBytes + half * 1024);
          }
        };
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          scales[i] =
              *reinterpret_cast<const uint2*>(stage + scales_at + 2 * i * p.depth * kUnitBytes);
        }
        load_codes(0);
        if constexpr (kTiles == 1) load_codes(1);  // early: else registers are too few
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (half == 1 && kTiles > 1) load_codes(1);
          uint32_t words[kTiles][4], scale_pair[kTiles][2];
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            const uint4& four = codes[half][i];
            words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
            const uint32_t bytes = half ? scales[i].y : scales[i].x;
            scale_pair[i][0] = widen_scales(__byte_perm(bytes, 0, low));
            scale_pair[i][1] = widen_scales(__byte_perm(bytes, 0, low + 0x0101));
          }
#pragma unroll
          for (int group = 0; group < 4 / kSteps; ++group) {
            auto& operands = a[(half * (4 / kSteps) + group) % 2];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
#pragma unroll
              for (int step = 0; step < kSteps; ++step) {
                uint32_t (&four)[4] = operands[i][step];
                spread_codes(words[i][group * kSteps + step], four);
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = multiply_pair(four[j], scale_pair[i][j % 2]);
              }
            }
            begin_products();
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
              for (int i = 0; i < kTiles; ++i) {
                multiply_warpgroup(
                    sum[i], operands[i][step],
                    moved_by(x, half * (kTokens * 128) + (group * kSteps + step) * 32), add);
              }
              add = 1;
            }
            end_products();
            wait_for_products<1>();  // those before, whose operands are overwritten next
            if (half == 0 && group == 0) {
              arrive_if(release, used + before);
              release = false;
            }
          }
        }
        x = moved_by(x, kXUnit);
        stage += kUnitBytes;
      }
      before = slot;
      advance(slot, parity);
    }
    wait_for_sums(sum);
    arrive_if(true, used + before);

    if (segment.tile < p.shared && !meet<kThreads>(p, segment, sum, &ticket)) continue;
    const int tile = segment.tile / p.token_tiles, token = segment.tile % p.token_tiles * kTokens;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int64_t row = static_cast<int64_t>(tile) * (kUnitTiles * kUnitRows) +
                          (warpgroup * kTiles + i) * 64 + own * 16;
      store_sums<kTurned>(p, sum[i], turn, scale, row, token);
    }
  }
#endif
}

}  // namespace

FP4TilesKernel fp4_tiles_kernel(int tokens, int warpgroups, int row_tiles) {
  switch (tokens * 100 + warpgroups * 10 + row_tiles) {
    case 1621:
      return narrowfloat_fp4_tiles<16, 2, 1>;
    case 1641:
      return narrowfloat_fp4_tiles<16, 4, 1>;
    case 3221:
      return narrowfloat_fp4_tiles<32, 2, 1>;
    case 3241:
      return narrowfloat_fp4_tiles<32, 4, 1>;
    case 6421:
      return narrowfloat_fp4_tiles<64, 2, 1>;
    case 6441:
      return narrowfloat_fp4_tiles<64, 4, 1>;
    case 12821:
      return narrowfloat_fp4_tiles<128, 2, 1>;
    case 12822:
      return narrowfloat_fp4_tiles<128, 2, 2>;
    default:
      return nullptr;
  }
}

FP4TilesKernel fp4_arrange_kernel(int tile_tokens) {
  switch (tile_tokens) {
    case 16:
      return narrowfloat_fp4_arrange<16>;
    case 32:
      return narrowfloat_fp4_arrange<32>;
    case 64:
      return narrowfloat_fp4_arrange<64>;
    default:
      return narrowfloat_fp4_arrange<128>;
  }
}

}  // namespace narrowfloat
