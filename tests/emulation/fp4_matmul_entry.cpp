// Decides how a test calls the product with packed FP4 weights on the CPU.
#include "instructions.cuh"
// after it
#include "fp4_matmul.cpp"
#include "fp4_matmul_held.cu"
#include "fp4_matmul_plan.cpp"
#include "fp4_matmul_streamed.cu"
#include "fp4_unpack.cu"

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
