// Which kernel multiplies packed FP4 weights with a number of tokens, and how its blocks
// share the work: what a device can do, what each plan would cost.
#include <algorithm>
#include <array>
#include <limits>
#include <mutex>

#include "api/check.h"
#include "w4a16/kernels.h"

namespace narrowfloat {
namespace {

int groups_for(int64_t tokens) { return tokens <= 8 ? 1 : tokens <= 16 ? 2 : tokens <= 32 ? 4 : 8; }

FP4Device read_device(int index) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    NF_CUDA(cudaDeviceGetAttribute(&value, which, index));
    return value;
  };
  FP4Device device{};
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.overlaps = attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  device.clusters[0] = device.multiprocessors;
  for (const int groups : {1, 2, 4, 8}) {
    for (int warp_tiles = 0; warp_tiles <= kMostWarpTiles; ++warp_tiles) {
      const FP4Kernel kernel = fp4_kernel(groups, warp_tiles);
      if (!kernel) continue;
      NF_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   device.shared_bytes));
    }
  }
  if (!device.overlaps) return device;
  for (int log = 1; log < 4; ++log) {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = 1u << log;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << log);
    config.blockDim = dim3(kHoldWarps * 32);
    config.dynamicSmemBytes = device.shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&device.clusters[log],
                                       reinterpret_cast<const void*>(fp4_kernel(1, 0)),
                                       &config) != cudaSuccess) {
      cudaGetLastError();
      device.clusters[log] = 0;  // K is then shared within a block only
    }
  }
  return device;
}

// Costs are fitted to measurements on an H200, of the blocks that hold x; of those through which it
// streams they are estimates.
constexpr double kStart = 3.8;     // until a launch has its first weights, and its end
constexpr double kUnit = .0705;    // to load a unit of weights into each multiprocessor
constexpr double kXBytes = 12e-6;  // to load a byte of x into a multiprocessor, from L2
constexpr double kCycle = 1 / 1.75e3;

// Completes a plan where x is held.
void plan_held(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, FP4Plan& plan) {
  const int clusters = device.clusters[log2_of(plan.split)];
  if (plan.row_groups > plan.split || plan.warps > kHoldWarps) return;
  const int64_t units = ceil_div(ceil_div(k, kUnitCols), plan.split);  // a block's
  const int k_warps = plan.warps / plan.row_groups;
  const int64_t a_unit = tokens * kUnitCols * 2;
  const int64_t room =
      (device.shared_bytes - FP4SharedLayout(plan, tokens).all()) / a_unit;  // for a slab of x
  if (room < 1) return;
  int64_t slab = std::max<int64_t>(std::min(units, room), 1);  // where K is 0 too
  if (slab < units && slab > k_warps) slab -= slab % k_warps;
  plan.slab = static_cast<int>(slab);
  plan.shared_bytes = FP4SharedLayout(plan, tokens).all();
  const int64_t tiles = ceil_div(ceil_div(n, kUnitRows), plan.row_groups);
  const int64_t at_once = std::min<int64_t>(clusters, tiles);
  plan.blocks = static_cast<int>(at_once) * plan.split;

  const double rounds = static_cast<double>(ceil_div(tiles, at_once));
  const double slabs = static_cast<double>(ceil_div(units, slab));
  const double x = kXBytes * static_cast<double>(units * a_unit);
  const double few_warps =
      plan.warps >= 16 ? 1 : (plan.warps >= 8 ? 1.05 : 1.25) + .006 * static_cast<double>(tokens);
  double tile = few_warps * kUnit * static_cast<double>(units * plan.row_groups) +
                static_cast<double>(tokens) * (plan.split > 1 ? .05 : .015);
  if (plan.split > 1) tile += .4;
  if (slabs > 1) tile += x + slabs;
  plan.cost = kStart + rounds * tile + (slabs > 1 ? 0 : x);
}

// Completes a plan where x streams.
void plan_streamed(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, FP4Plan& plan) {
  const int k_warps = plan.warps / plan.row_groups;
  if (plan.warps > most_warps(plan.groups, plan.warp_tiles) ||
      k_warps * plan.row_groups != plan.warps || 1 << log2_of(k_warps) != k_warps) {
    return;
  }
  for (plan.stages = kMostStages; plan.stages >= 2; --plan.stages) {
    plan.shared_bytes = FP4SharedLayout(plan, tokens).all();
    if (plan.shared_bytes <= device.shared_bytes) break;
  }
  if (plan.stages < 2) return;
  plan.slab = k_warps;
  const int64_t units = ceil_div(ceil_div(k, kUnitCols), plan.split);  // a block's
  const int tile = plan.row_groups * plan.warp_tiles;
  const int64_t tiles = ceil_div(ceil_div(n, kUnitRows), tile);
  plan.blocks = static_cast<int>(tiles) * plan.split;

  const auto rounds = static_cast<double>(ceil_div(tiles, device.clusters[log2_of(plan.split)]));
  const auto slabs = static_cast<double>(ceil_div(units, k_warps));
  const int a_quarter = (plan.warps + 3) / 4;  // warps of the busiest scheduler
  const auto used = static_cast<double>(units * tile),
             x = static_cast<double>(units * tokens * 256);
  // what weights, x, shared memory, mma and the instructions that decode need
  const double needs[4] = {
      std::max(used * kUnit, (used * kUnitBytes + x) / 55e3),
      kCycle * (slabs * plan.warps * (16 * plan.groups + 36 * plan.warp_tiles) + x / 128),
      kCycle * slabs * a_quarter * plan.warp_tiles * plan.groups * 16 * 6.4,
      kCycle * slabs * a_quarter * (plan.warp_tiles * (230 + 16 * plan.groups) + 60)};
  double most = 0, sum = 0;
  for (const double need : needs) most = std::max(most, need), sum += need;
  const double busy = most + (sum - most) * .5 / a_quarter;
  double end = kCycle * static_cast<double>(tokens) * tile * kUnitRows *
               (2 * k_warps + (plan.split > 1 ? 6 : 2)) / 32;
  if (plan.split > 1) end += 1;
  plan.cost = kStart + rounds * (busy + slabs * (plan.stages == 2 ? .4 : .08) + end);
}

}  // namespace

// Read once a device; the values never change.
FP4Device fp4_device(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> read;
  static std::array<FP4Device, kMaxDevices> devices;
  NF_CHECK(index >= 0 && index < kMaxDevices, "fp4_few_tokens: expected a device below ",
           kMaxDevices, ", got ", index);
  std::call_once(read[index], [&] { devices[index] = read_device(index); });
  return devices[index];
}

FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k, int warp_tiles,
                 int warps, int split, int row_groups) {
  FP4Plan plan{};
  plan.groups = groups_for(tokens);
  plan.warp_tiles = warp_tiles;
  plan.warps = warps;
  plan.split = split;
  plan.row_groups = row_groups;
  plan.cost = std::numeric_limits<double>::infinity();
  if (!fp4_kernel(plan.groups, warp_tiles) || device.clusters[log2_of(split)] == 0 ||
      row_groups > warps) {
    return plan;
  }
  (warp_tiles == 0 ? plan_held : plan_streamed)(device, tokens, n, k, plan);
  return plan;
}

FP4Plan plan_fp4(const FP4Device& device, int64_t tokens, int64_t n, int64_t k) {
  FP4Plan best{};
  best.cost = std::numeric_limits<double>::infinity();
  const auto consider = [&](int warp_tiles, int warps, int split, int row_groups) {
    const FP4Plan plan = plan_fp4(device, tokens, n, k, warp_tiles, warps, split, row_groups);
    if (plan.cost < best.cost) best = plan;
  };
  const int groups = groups_for(tokens);
  for (const int split : {1, 2, 4, 8}) {
    const int clusters = device.clusters[log2_of(split)];
    if (clusters == 0) continue;
    for (const int warps : {16, 8, 4}) {
      for (int row_groups = 1; row_groups <= split; row_groups *= 2) {
        consider(0, warps, split, row_groups);
      }
    }
    for (int warp_tiles = 1; warp_tiles <= kMostWarpTiles; ++warp_tiles) {
      // as few rows a tile as the least number of rounds allows, or some more; few where shared
      // memory is short
      const int most = most_warps(groups, warp_tiles);
      const int64_t tiles = ceil_div(ceil_div(n, kUnitRows), warp_tiles);
      const int64_t least = ceil_div(tiles, static_cast<int64_t>(clusters) * most);
      for (int more = 0; more < 4; ++more) {
        const int row_groups =
            more < 3 ? static_cast<int>(ceil_div(tiles, clusters * (least + more))) : 4;
        for (int k_warps = 1; k_warps * row_groups <= most; k_warps *= 2) {
          consider(warp_tiles, k_warps * row_groups, split, row_groups);
        }
      }
    }
  }
  NF_CHECK(best.blocks > 0, "fp4_few_tokens: expected a device with more shared memory, got ",
           device.shared_bytes, " bytes a block for ", tokens, " tokens");
  return best;
}

}  // namespace narrowfloat
