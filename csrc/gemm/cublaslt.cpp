// How a GEMM is launched: a cached plan, one call.
#include "gemm/cublaslt.h"

#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>

#include "api/check.h"
#include "api/device.h"
#include "gemm/plan.h"
#include "gemm/tune.h"

namespace narrowfloat {
namespace {

std::atomic<int64_t> g_hits{0}, g_misses{0};

// Handle and plans of one thread for one device: nothing is locked or shared.
class Context {
  using Plans = std::unordered_map<Key, std::unique_ptr<Plan>, KeyHash>;

 public:
  int64_t workspace_for(const Matmul& p, int device, cudaStream_t stream) {
    Plan& plan = find(p, device, stream);
    if (plan.choices_seen != choices()) take_choice(plan, p, device);
    plan.to_measure = !plan.measured && tuning(device) && !p.accumulate && !capturing(stream);
    return static_cast<int64_t>(plan.to_measure ? most_workspace(device) : plan.chosen.workspace);
  }

  void launch(const Matmul& p, void* workspace, int device, cudaStream_t stream) {
    Plan& plan = find(p, device, stream);
    plan.set_pointers(p);
    if (plan.to_measure && !capturing(stream)) {
      plan.to_measure = false;
      plan.measured = measure_candidates(handle(), plan, p, workspace, device, stream);
      if (plan.measured) plan.choices_seen = choices();
    }
    const cublasStatus_t status = plan.launch(handle(), p, plan.chosen, workspace, stream);
    if (status != CUBLAS_STATUS_SUCCESS) {
      throw std::runtime_error(message("narrowfloat: cublasLtMatmul failed: ",
                                       cublasLtGetStatusString(status), " for ", describe(p)));
    }
  }

 private:
  Plan& find(const Matmul& p, int device, cudaStream_t stream) {
    const Key key = key_of(p);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      if (auto older = older_.extract(key)) found = add(key, std::move(older.mapped()));
    }
    if (found != plans_.end()) {
      g_hits.fetch_add(1, std::memory_order_relaxed);
      return *found->second;
    }
    g_misses.fetch_add(1, std::memory_order_relaxed);
    return *add(key, make(p, device, stream))->second;
  }

  // Token counts that never repeat would fill it without end; a plan is made anew in 0.2 ms. Only
  // those go that were not met while as many others came: a plan that a call has the workspace for
  // is still there at its launch.
  Plans::iterator add(const Key& key, std::unique_ptr<Plan> plan) {
    constexpr size_t kMostPlans = 4096;
    if (plans_.size() >= kMostPlans) {
      older_ = std::move(plans_);
      plans_.clear();
    }
    return plans_.emplace(key, std::move(plan)).first;
  }

  std::unique_ptr<Plan> make(const Matmul& p, int device, cudaStream_t stream) {
    const size_t version = cublasLtGetVersion();
    if (version >= 130501 && version <= 130600 && capturing(stream)) {
      throw std::runtime_error(message(
          "narrowfloat: expected a GEMM that ran before the capture, got a new one (cuBLASLt ",
          version,
          " breaks a capture in which it chooses an algorithm; run the model once with "
          "these shapes, in the capturing thread, before you capture): ",
          describe(p)));
    }
    auto plan = std::make_unique<Plan>(p);
    plan->chosen = candidates_for(handle(), *plan, p, device, 1).safe.front();
    return plan;
  }

  // What another thread measured, or another process.
  void take_choice(Plan& plan, const Matmul& p, int device) {
    const int64_t seen = choices();
    std::optional<Candidate> choice = choice_for(key_of(p), device);
    if (choice && !takes(handle(), plan, *choice, device)) {
      throw std::runtime_error(message(
          "narrowfloat: expected a plan that this cuBLASLt takes, got one that it refuses from a "
          "file (delete the file of plans and measure again), for ",
          describe(p)));
    }
    if (choice) plan.chosen = *choice, plan.measured = true;
    plan.choices_seen = seen;
  }

  cublasLtHandle_t handle() {
    if (!handle_.value) {
      // Making a handle may allocate, which a capture on another thread would otherwise forbid.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      NF_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
      const cublasStatus_t status = cublasLtCreate(&handle_.value);
      NF_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
      check_cublas(status, "cublasLtCreate");
    }
    return handle_.value;
  }

  Handle<cublasLtHandle_t, cublasLtDestroy> handle_;
  Plans plans_, older_;
};

Context& context(int device) {
  thread_local std::unordered_map<int, Context> contexts;
  return contexts[device];
}

}  // namespace

int64_t workspace_for(const Matmul& problem, int device, cudaStream_t stream) {
  return context(device).workspace_for(problem, device, stream);
}

void matmul(const Matmul& problem, void* workspace, int device, cudaStream_t stream) {
  context(device).launch(problem, workspace, device, stream);
}

// Its release notes: sm100 and sm103 from 12.8 (12.8.3), sm120 and sm121 from update 1 (12.8.4).
bool has_fp4(int capability, int64_t version) {
  return capability >= 120 ? version >= 120804 : capability >= 100 && version >= 120803;
}

bool has_fp4(int device) {
  return has_fp4(device_of(device).capability, static_cast<int64_t>(cublasLtGetVersion()));
}

int64_t cublaslt_version() { return static_cast<int64_t>(cublasLtGetVersion()); }

PlanCacheCounters plan_cache_counters() { return {g_hits.load(), g_misses.load()}; }

}  // namespace narrowfloat
