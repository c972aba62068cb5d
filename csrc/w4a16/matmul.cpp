// How packed FP4 weights are multiplied with a few tokens: the launch that a plan stands
// for.
#include "w4a16/matmul.h"

#include "api/check.h"
#include "w4a16/kernels.h"

namespace narrowfloat {

void fp4_few_tokens(const FP4Matmul& job, const FP4Plan& plan, int device, cudaStream_t stream) {
  const FP4Device facts = fp4_device(device);
  const FP4SharedLayout layout(plan, job.m);
  FP4Params p{};
  p.x = static_cast<const __nv_bfloat16*>(job.x);
  p.packed = job.packed;
  p.scale = job.scale;
  p.bias = job.bias;
  p.y = job.y;
  p.x_stride = job.x_stride, p.n = job.n, p.k = job.k;
  p.bias_type = job.bias_type, p.y_type = job.y_type;
  p.tokens = static_cast<int>(job.m);
  p.units = static_cast<int>(ceil_div(job.k, kUnitCols));
  p.row_tiles = static_cast<int>(ceil_div(job.n, kUnitRows));
  p.tiles = static_cast<int>(ceil_div(p.row_tiles, plan.row_groups));  // where x is held
  p.split = plan.split, p.row_groups = plan.row_groups;
  p.k_warps = plan.warps / plan.row_groups;
  p.log_split = log2_of(plan.split), p.log_k_warps = log2_of(p.k_warps);
  p.stages = plan.stages, p.stage = layout.stage;
  p.slab = plan.slab;
  p.log_rows = log2_of(plan.row_groups * kUnitRows);
  p.log_slice = p.log_rows - p.log_split;
  p.x_first = layout.ring;
  p.sums_first = layout.ring + layout.x;
  p.exchange = plan.warp_tiles == 0 ? p.sums_first + layout.sums : layout.sums;
  p.vectors =
      job.k % 8 == 0 && job.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(job.x) % 16 == 0;
  p.constant = job.constant;

  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (facts.overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (plan.split > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(plan.split);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.warps) * 32);
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  NF_CUDA(cudaLaunchKernelEx(&config, fp4_kernel(plan.groups, plan.warp_tiles), p));
}

void fp4_few_tokens(const FP4Matmul& job, int device, cudaStream_t stream) {
  constexpr int64_t kMost = int64_t{1} << 30;
  NF_CHECK(job.m <= kFewTokens && job.n <= kMost && job.k <= kMost,
           "fp4_few_tokens: expected at most ", kFewTokens, " tokens and sizes up to 2^30, got ",
           job.m, " x ", job.k, " x ", job.n);
  if (job.m == 0 || job.n == 0) return;
  fp4_few_tokens(job, plan_fp4(fp4_device(device), job.m, job.n, job.k), device, stream);
}

}  // namespace narrowfloat
