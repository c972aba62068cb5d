// Which of cuBLASLt's candidates for a GEMM is taken, by measuring them.
#include "gemm/tune.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>

#include "api/device.h"
#include "gemm/difference.h"
#include "gemm/hold.h"

namespace narrowfloat {
namespace {

std::atomic<int> g_tuning{0}, g_tuning_older{0};
std::atomic<int64_t> g_choices{0};

struct Choice {
  Candidate candidate;
  std::string what;
  double first_us = 0, chosen_us = 0;
  int offered = 0, tried = 0, right = 0;
};

struct KeyOrder {
  bool operator()(const std::pair<int, Key>& a, const std::pair<int, Key>& b) const {
    if (a.first != b.first) return a.first < b.first;
    return std::memcmp(&a.second, &b.second, sizeof(Key)) < 0;
  }
};

std::mutex g_mutex;
std::map<std::pair<int, Key>, Choice, KeyOrder>& table() {
  static std::map<std::pair<int, Key>, Choice, KeyOrder> choices;
  return choices;
}

// What all threads have from now on: the first, where two measured at once.
Candidate keep(int device, const Key& key, Choice choice) {
  const std::lock_guard lock(g_mutex);
  const auto [at, fresh] = table().try_emplace({device, key}, std::move(choice));
  if (fresh) g_choices.fetch_add(1);
  return at->second.candidate;
}

template <typename T>
std::string to_hex(const T& value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::array<unsigned char, sizeof value> bytes;
  std::memcpy(bytes.data(), &value, sizeof value);
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

template <typename T>
void from_hex(const std::string& text, T& value, const char* name) {
  NF_CHECK(text.size() == 2 * sizeof value &&
               text.find_first_not_of("0123456789abcdef") == std::string::npos,
           "load_plans: expected ", 2 * sizeof value, " hexadecimal digits as ", name, ", got ",
           text.size(), " characters (the file is of another version of narrowfloat)");
  std::array<unsigned char, sizeof value> bytes;
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (size_t i = 0; i < sizeof value; ++i) {
    bytes[i] = static_cast<unsigned char>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  }
  std::memcpy(&value, bytes.data(), sizeof value);
}

// Two sums of the same products in fp32, rounded to 8 bits, differ by about 2^-10 of their norm; a
// candidate that drops part of K by orders more.
constexpr double kSame = 1e-2;

}  // namespace

bool tuning(int device) {
  if (g_tuning.load(std::memory_order_relaxed) == 0) return false;
  return device_of(device).capability >= 90 || g_tuning_older.load() > 0;
}

void start_tuning(bool older_devices) {
  g_tuning.fetch_add(1);
  if (older_devices) g_tuning_older.fetch_add(1);
}

void stop_tuning(bool older_devices) {
  if (older_devices) g_tuning_older.fetch_sub(1);
  g_tuning.fetch_sub(1);
}

bool measure_candidates(cublasLtHandle_t handle, Plan& plan, const Matmul& p, void* workspace,
                        int device, cudaStream_t stream) {
  constexpr int kMost = 16, kRounds = 7;
  constexpr double kGain = .98;   // of the first one's time
  constexpr double kRunUs = 100;  // of one timed run, so that the events' own time is small
  const Offer offer = candidates_for(handle, plan, p, device, kMost);
  const std::vector<Candidate>& candidates = offer.safe;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  const auto run = [&](const Candidate& c) {
    status = plan.launch(handle, p, c, workspace, stream);
    return status == CUBLAS_STATUS_SUCCESS;
  };
  const auto failed = [&] {
    throw std::runtime_error(message("narrowfloat: cublasLtMatmul failed: ",
                                     cublasLtGetStatusString(status), " for ", describe(p)));
  };

  // the first is the measure of the others
  if (!run(candidates[0])) failed();
  const size_t bytes = static_cast<size_t>(p.a.rows * p.ldd * size_of(p.d_type));
  const PoolMemory first(bytes, stream);
  NF_CUDA(cudaMemcpyAsync(first.get(), p.d, bytes, cudaMemcpyDeviceToDevice, stream));
  double norm = 0, apart = 0;
  const auto compare = [&] {
    difference(first.get(), p.d, p.d_type, p.a.rows, p.b.rows, p.ldd, norm, apart, stream);
  };
  compare();
  if (!std::isfinite(norm) || norm == 0) return false;
  std::vector<Candidate> right{candidates[0]};
  for (size_t i = 1; i < candidates.size(); ++i) {
    NF_CUDA(cudaMemsetAsync(p.d, 0xff, bytes, stream));  // NaN: what is not written shows
    if (!run(candidates[i])) {
      cudaGetLastError();
      continue;
    }
    compare();
    if (apart <= kSame * kSame * norm) right.push_back(candidates[i]);  // NaN is not
  }

  // In turns, so that what drifts is the same for all. The stream is held until all launches of a
  // run are in line: a short GEMM would else take as long as the host needs to launch it, and
  // all candidates the same.
  Event begin, end;
  double host_us = 0;  // of a launch
  const auto time = [&](const Candidate& c, int times) {
    hold(1.5 * host_us * times + 20, stream);
    NF_CUDA(cudaEventRecord(begin.value, stream));
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) {
      if (!run(c)) failed();
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    host_us = took.count() / times;
    NF_CUDA(cudaEventRecord(end.value, stream));
    NF_CUDA(cudaEventSynchronize(end.value));
    float ms = 0;
    NF_CUDA(cudaEventElapsedTime(&ms, begin.value, end.value));
    return 1e3 * static_cast<double>(ms) / times;
  };
  time(right[0], 3);
  const int times = static_cast<int>(std::clamp(kRunUs / std::max(time(right[0], 3), .1), 1., 50.));
  std::vector<std::vector<double>> us(right.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < right.size(); ++i) us[i].push_back(time(right[i], times));
  }
  std::vector<double> median;
  for (auto& all : us) {
    std::nth_element(all.begin(), all.begin() + kRounds / 2, all.end());
    median.push_back(all[kRounds / 2]);
  }
  size_t best = std::min_element(median.begin(), median.end()) - median.begin();
  if (median[best] > kGain * median[0]) best = 0;
  const auto count = [](const auto& of) { return static_cast<int>(of.size()); };
  plan.chosen = keep(device, key_of(p),
                     {right[best], describe(p), median[0], median[best], offer.offered,
                      count(candidates), count(right)});
  return true;
}

int64_t choices() { return g_choices.load(std::memory_order_relaxed); }

std::optional<Candidate> choice_for(const Key& key, int device) {
  const std::lock_guard lock(g_mutex);
  const auto found = table().find({device, key});
  if (found == table().end()) return std::nullopt;
  return found->second.candidate;
}

std::vector<SavedChoice> saved_choices() {
  const std::lock_guard lock(g_mutex);
  std::vector<SavedChoice> saved;
  for (const auto& [at, choice] : table()) {
    saved.push_back({at.first, to_hex(at.second), to_hex(choice.candidate.algorithm), choice.what,
                     choice.first_us, choice.chosen_us, choice.offered, choice.tried,
                     choice.right});
  }
  return saved;
}

void load_choice(int device, const std::string& key, const std::string& algorithm,
                 const std::string& what) {
  Key k;
  Choice choice{{}, what};
  from_hex(key, k, "key");
  from_hex(algorithm, choice.candidate.algorithm, "algorithm");
  const std::lock_guard lock(g_mutex);
  table().insert_or_assign({device, k}, std::move(choice));
  g_choices.fetch_add(1);
}

}  // namespace narrowfloat
