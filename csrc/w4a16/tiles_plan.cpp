// How a product of packed FP4 weights is cut into tiles of rows x tokens, and its launches.
#include "w4a16/tiles.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <mutex>

#include "api/check.h"
#include "api/device.h"
#include "w4a16/kernels.h"

namespace narrowfloat {
namespace {

// A shape of tiles and what it costs: microseconds on an H200 with nothing in L2, fitted to 360
// measured plans of five sizes and 12 to 2048 tokens, most within 5 %.
struct Shape {
  int tokens, warpgroups, row_tiles;
  double unit;  // of K
  double part;  // of a sum, where it is one of several
  double tile;  // begun, and stored or passed on
};
constexpr Shape kShapes[] = {
    {16, 2, 1, .347, .14, 3.5},   {16, 4, 1, .630, .20, 4.0},    {32, 2, 1, .412, .59, 3.1},
    {32, 4, 1, .943, .64, 3.2},   {64, 2, 1, .494, .69, 2.9},    {64, 4, 1, 1.139, 1.25, 3.6},
    {128, 2, 1, .867, 1.49, 2.6}, {128, 2, 2, 1.367, 3.25, 8.4},
};
constexpr double kLaunches = 6.4;    // of both launches
constexpr double kArrange = 1.3e-6;  // an element of x
constexpr int kMostSplit = 8;
constexpr int kMostDepth = 4;

bool read_has_tiles(int device) {
  if (device_of(device).capability != 90) return false;
  for (const Shape& shape : kShapes) {
    const void* function = reinterpret_cast<const void*>(
        fp4_tiles_kernel(shape.tokens, shape.warpgroups, shape.row_tiles));
    cudaFuncAttributes attributes{};
    NF_CUDA(cudaFuncGetAttributes(&attributes, function));
    if (attributes.sharedSizeBytes == 0) return false;  // compiled for sm90, not for sm90a
    const int threads = tile_threads(shape.tokens, shape.warpgroups, shape.row_tiles);
    const int moved = 128 * (fetch_registers(shape.warpgroups) +
                             shape.warpgroups * multiply_registers(shape.warpgroups));
    if (moves_registers(shape.tokens, shape.warpgroups, shape.row_tiles) &&
        attributes.numRegs * threads < moved) {
      return false;
    }
    NF_CUDA(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 tile_stage_bytes(shape.warpgroups) + 1024));
  }
  return true;
}

double cost_of(const FP4TilesPlan& plan, const Shape& shape, int64_t units, double x) {
  double tiles = plan.whole, of_k = static_cast<double>(plan.whole) * static_cast<double>(units);
  double parts = 0;
  if (plan.shared > 0) {
    const bool across = units % plan.share != 0;  // a block's share lies in two tiles
    tiles += across ? 2 : 1;
    of_k += plan.share;
    if (plan.share < units) {
      parts = static_cast<double>(units) / plan.share + (across ? 1 : 0);
    }
  }
  return kLaunches + kArrange * x + shape.unit * of_k + shape.part * parts + shape.tile * tiles;
}

}  // namespace

bool has_fp4_tiles(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> read;
  static std::array<bool, kMaxDevices> has;
  NF_CHECK(index >= 0 && index < kMaxDevices, "fp4_tiles: expected a device below ", kMaxDevices,
           ", got ", index);
  std::call_once(read[index], [&] { has[index] = read_has_tiles(index); });
  return has[index];
}

int FP4TilesPlan::stage_bytes() const {
  const int bytes = depth * (tokens * kUnitCols * 2 + rows() / kUnitRows * kUnitBytes);
  return (bytes + 1023) / 1024 * 1024;
}

FP4TilesScratch::FP4TilesScratch(const FP4TilesPlan& plan, int64_t tokens, int64_t k) {
  const auto up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t rows = ceil_div(tokens, plan.tokens) * plan.tokens;
  arranged = 0;
  counters = up(rows * ceil_div(k, kUnitCols) * kUnitCols * 2);
  partials = counters + up(plan.shared * int64_t{4});
  const bool meet = plan.shared > 0 && (plan.share < ceil_div(k, kUnitCols) ||
                                        ceil_div(k, kUnitCols) % plan.share != 0);
  bytes = partials + (meet ? int64_t{plan.blocks} * 2 * plan.rows() * plan.tokens * 4 : 0);
}

FP4TilesPlan plan_fp4_tiles(int multiprocessors, int64_t tokens, int64_t n, int64_t k,
                            int tile_tokens, int warpgroups, int row_tiles, int split) {
  FP4TilesPlan plan{};
  plan.cost = std::numeric_limits<double>::infinity();
  const Shape* const shape =
      std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& s) {
        return s.tokens == tile_tokens && s.warpgroups == warpgroups && s.row_tiles == row_tiles;
      });
  if (shape == std::end(kShapes)) return plan;
  plan.tokens = tile_tokens, plan.warpgroups = warpgroups, plan.row_tiles = row_tiles;
  const int64_t units = ceil_div(k, kUnitCols);
  const int64_t tiles = ceil_div(n, plan.rows()) * ceil_div(tokens, tile_tokens);
  plan.whole = static_cast<int>(tiles / multiprocessors);
  plan.shared = static_cast<int>(tiles % multiprocessors);
  const int64_t all = plan.shared * units;
  plan.share = static_cast<int>(std::max(ceil_div(all, multiprocessors), ceil_div(units, split)));
  plan.blocks =
      plan.whole ? multiprocessors : static_cast<int>(ceil_div(all, std::max(plan.share, 1)));
  // stages of about 16 KiB or more, four of them at least
  const int room = tile_stage_bytes(warpgroups);
  for (plan.depth = 1; plan.depth < kMostDepth && plan.depth < units; ++plan.depth) {
    FP4TilesPlan deeper = plan;
    ++deeper.depth;
    if (plan.stage_bytes() >= 32 * 1024 || deeper.stage_bytes() * 4 > room) break;
  }
  plan.stages = std::min(room / plan.stage_bytes(), kMostTileStages);
  plan.cost = cost_of(plan, *shape, units, static_cast<double>(tokens) * static_cast<double>(k));
  return plan;
}

FP4TilesPlan plan_fp4_tiles(int multiprocessors, int64_t tokens, int64_t n, int64_t k) {
  FP4TilesPlan best{};
  best.cost = std::numeric_limits<double>::infinity();
  for (const Shape& shape : kShapes) {
    // a tile that the tokens fill by half at least, or, where they are more than a tile, a large
    // one
    if (shape.tokens > 16 && shape.tokens >= 2 * tokens) continue;
    if (shape.tokens < tokens && shape.tokens < 64) continue;
    for (int split = 1; split <= kMostSplit; split *= 2) {
      const FP4TilesPlan plan = plan_fp4_tiles(multiprocessors, tokens, n, k, shape.tokens,
                                               shape.warpgroups, shape.row_tiles, split);
      if (plan.cost < best.cost) best = plan;
    }
  }
  return best;
}

void fp4_tiles(const FP4Matmul& job, const FP4TilesPlan& plan, void* scratch, cudaStream_t stream) {
  const FP4TilesScratch layout(plan, job.m, job.k);
  uint8_t* const bytes = static_cast<uint8_t*>(scratch);
  FP4TilesParams p{};
  p.x = static_cast<const __nv_bfloat16*>(job.x);
  p.x_stride = job.x_stride, p.n = job.n, p.k = job.k;
  p.arranged = bytes + layout.arranged;
  p.counters = reinterpret_cast<int*>(bytes + layout.counters);
  p.partials = reinterpret_cast<float*>(bytes + layout.partials);
  p.packed = job.packed;
  p.scale = job.scale;
  p.bias = job.bias, p.bias_type = job.bias_type;
  p.y = job.y, p.y_type = job.y_type;
  p.tokens = static_cast<int>(job.m);
  p.units = static_cast<int>(ceil_div(job.k, kUnitCols));
  p.row_tiles = static_cast<int>(ceil_div(job.n, kUnitRows));
  p.token_tiles = static_cast<int>(ceil_div(job.m, plan.tokens));
  p.depth = plan.depth, p.stages = plan.stages;
  p.stage = plan.stage_bytes();
  p.weights = plan.depth * plan.tokens * kUnitCols * 2;
  p.whole = plan.whole, p.shared = plan.shared, p.share = plan.share;
  p.pairs = job.x_stride % 2 == 0 && reinterpret_cast<uintptr_t>(job.x) % 4 == 0;
  p.vectors = job.n % 4 == 0 && reinterpret_cast<uintptr_t>(job.y) % 16 == 0;
  p.constant = job.constant;

  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;

  const int64_t chunks = int64_t{p.token_tiles} * plan.tokens * p.units * (kUnitCols / 8);
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(chunks, kArrangeThreads)));
  config.blockDim = dim3(kArrangeThreads);
  const FP4TilesKernel arrange = fp4_arrange_kernel(plan.tokens);
  NF_CUDA(cudaLaunchKernelEx(&config, arrange, p));
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim =
      dim3(static_cast<unsigned>(tile_threads(plan.tokens, plan.warpgroups, plan.row_tiles)));
  config.dynamicSmemBytes = static_cast<size_t>(plan.stages * p.stage + 1024);
  const FP4TilesKernel multiply = fp4_tiles_kernel(plan.tokens, plan.warpgroups, plan.row_tiles);
  NF_CUDA(cudaLaunchKernelEx(&config, multiply, p));
}

}  // namespace narrowfloat
