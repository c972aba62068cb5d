// When cuBLASLt's candidates for a GEMM are measured, and who learns which one won.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gemm/plan.h"

namespace narrowfloat {

// Inside at least one start_tuning(), on devices from sm90 on unless older ones are asked for.
bool tuning(int device);
void start_tuning(bool older_devices);
void stop_tuning(bool older_devices);

// Runs each candidate for `problem` on its operands, drops those whose result differs from the
// first one's by more than the order of a sum can, times the others in turns, and sets plan.chosen
// to the fastest if it gains 2 % on the first; or to what another thread measured meanwhile. Waits
// for the device. workspace: most_workspace(). False where nothing could be learnt: a result that
// is not finite.
bool measure_candidates(cublasLtHandle_t handle, Plan& plan, const Matmul& problem, void* workspace,
                        int device, cudaStream_t stream);

// What was measured or loaded, of all threads. choices() grows with each.
int64_t choices();
std::optional<Candidate> choice_for(const Key& key, int device);

// A choice as text that this library, device and driver can take again.
struct SavedChoice {
  int device;
  std::string key, algorithm, what;  // the first two in hexadecimal digits
  double first_us, chosen_us;        // 0 where it was loaded, as the rest
  int offered, tried, right;  // algorithms: cuBLASLt's, safe ones, those with the same result
};
std::vector<SavedChoice> saved_choices();
void load_choice(int device, const std::string& key, const std::string& algorithm,
                 const std::string& what);

}  // namespace narrowfloat
