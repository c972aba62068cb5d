// How a test calls the GEMM with packed FP4 weights on the CPU.
#include "w4a16/warpgroup.cuh"
// after it
#include "api/device.cpp"
#include "pretended_device.h"
#include "w4a16/few_tokens.cu"
#include "w4a16/matmul.cpp"
#include "w4a16/matmul_plan.cpp"
#include "w4a16/more_tokens.cu"
#include "w4a16/tiles.cu"
#include "w4a16/tiles_plan.cpp"
#include "w4a16/unpack.cu"

#include <cmath>

using namespace narrowfloat;

namespace {

const char* problem_or_null() {
  return cluster_on_cpu::problem.empty() ? nullptr : cluster_on_cpu::problem.c_str();
}

}  // namespace

struct Call {
  FP4Matmul job;
  int64_t shared_bytes;  // of a block, at most
  // the plan's; warps 0: as planned
  int64_t warp_tiles, warps, split, row_groups;
  int64_t slab, stages, blocks;  // at most; 0: as planned
  int64_t late_copies, order;
};

// null, or what was wrong; "no plan" where this shape of one does not fit
extern "C" const char* run_fp4_matmul(const Call* c) {
  cluster_on_cpu::problem.clear();
  cluster_on_cpu::late_copies = c->late_copies != 0;
  cluster_on_cpu::order = static_cast<cluster_on_cpu::Order>(c->order);
  const FP4Device device{6, static_cast<int>(c->shared_bytes), {6, 3, 2, 1}, true};
  FP4Plan plan = c->warps == 0
                     ? plan_fp4(device, c->job.m, c->job.n, c->job.k)
                     : plan_fp4(device, c->job.m, c->job.n, c->job.k,
                                static_cast<int>(c->warp_tiles), static_cast<int>(c->warps),
                                static_cast<int>(c->split), static_cast<int>(c->row_groups));
  if (std::isinf(plan.cost)) return "no plan";
  if (plan.shared_bytes > device.shared_bytes) return "a plan with more memory than there is";
  if (c->slab && plan.warp_tiles == 0) plan.slab = std::min(plan.slab, static_cast<int>(c->slab));
  if (c->stages) plan.stages = std::min(plan.stages, static_cast<int>(c->stages));
  if (c->blocks && plan.warp_tiles == 0) {
    const int blocks = std::min(plan.blocks, static_cast<int>(c->blocks)) / plan.split;
    plan.blocks = std::max(blocks, 1) * plan.split;
  }
  fp4_few_tokens(c->job, plan, 0, nullptr);
  return problem_or_null();
}

extern "C" const char* run_fp4_unpack(const uint8_t* packed, int64_t n, int64_t k, void* operand,
                                      const float* scale, float* alpha) {
  cluster_on_cpu::problem.clear();
  cluster_on_cpu::order = cluster_on_cpu::Order::forward;
  fp4_unpack(packed, n, k, operand, scale, alpha, nullptr);
  return problem_or_null();
}

static_assert(fits_fp4_tiles(2048, 28672, 8192) && fits_fp4_tiles(64, int64_t{1} << 22, 1 << 20));
static_assert(!fits_fp4_tiles(64, 32, int64_t{1} << 28) && !fits_fp4_tiles(9, int64_t{1} << 31, 1));

struct TilesCall {
  FP4Matmul job;
  int64_t multiprocessors;
  int64_t tokens, warpgroups, row_tiles, split;  // the plan's; tokens 0: as planned
  int64_t depth, stages;                         // at most; 0: as planned
  int64_t late_copies, order;
};

extern "C" const char* run_fp4_tiles(const TilesCall* c) {
  cluster_on_cpu::problem.clear();
  cluster_on_cpu::late_copies = c->late_copies != 0;
  cluster_on_cpu::order = static_cast<cluster_on_cpu::Order>(c->order);
  const int blocks = static_cast<int>(c->multiprocessors);
  FP4TilesPlan plan =
      c->tokens == 0 ? plan_fp4_tiles(blocks, c->job.m, c->job.n, c->job.k)
                     : plan_fp4_tiles(blocks, c->job.m, c->job.n, c->job.k,
                                      static_cast<int>(c->tokens), static_cast<int>(c->warpgroups),
                                      static_cast<int>(c->row_tiles), static_cast<int>(c->split));
  if (std::isinf(plan.cost)) return "no plan";
  if (c->depth) plan.depth = std::min(plan.depth, static_cast<int>(c->depth));
  if (c->stages) plan.stages = std::min(plan.stages, static_cast<int>(c->stages));
  if (plan.stages * plan.stage_bytes() > tile_stage_bytes(plan.warpgroups)) {
    return "a plan with more memory than there is";
  }
  // what lies beyond the scratch shows in the sums, if anything is taken from there
  std::vector<uint4> scratch(FP4TilesScratch(plan, c->job.m, c->job.k).bytes / 16 + 16);
  std::memset(scratch.data(), 0xff, scratch.size() * 16);
  fp4_tiles(c->job, plan, scratch.data(), nullptr);
  return problem_or_null();
}
