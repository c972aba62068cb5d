// An allocator for torch (CUDAPluggableAllocator) that shows what a kernel must not do: memory
// begins as NaN bytes, lies between guard zones that are checked when it is freed, and the n-th
// allocation can be made to fail. Slow: every call asks the driver.
//
// With ON_CPU it is the same for memory of the host, for the test of the allocator itself.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#ifdef ON_CPU
using cudaStream_t = void*;
#else
#include <c10/util/Exception.h>
#include <cuda_runtime.h>
#endif

namespace {

constexpr size_t kGuard = 1024;  // bytes; a multiple of what any access is aligned to
constexpr int kGuardByte = 0xa5;

struct Block {
  size_t bytes;
  int device;
};

std::mutex mutex;
std::unordered_map<void*, Block> live;
int64_t count = 0, fail_at = 0, faults = 0;
bool poisoned = true;
char what[256] = "";

#ifdef ON_CPU
void* take(size_t bytes, int) { return std::malloc(bytes); }
void fill(void* p, int byte, size_t bytes, cudaStream_t) { std::memset(p, byte, bytes); }
void wait() {}
void read(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
void give_back(void* p) { std::free(p); }
[[noreturn]] void out_of_memory(size_t) { throw std::bad_alloc(); }
#else
[[noreturn]] void out_of_memory(size_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory: injected, of ", bytes, " bytes");
}
void* take(size_t bytes, int device) {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  void* p = nullptr;
  const cudaError_t status = cudaMalloc(&p, bytes);
  cudaSetDevice(before);
  if (status != cudaSuccess) {
    cudaGetLastError();
    out_of_memory(bytes);
  }
  return p;
}
void fill(void* p, int byte, size_t bytes, cudaStream_t stream) {
  cudaMemsetAsync(p, byte, bytes, stream);
}
void wait() { cudaDeviceSynchronize(); }
void read(void* to, const void* from, size_t bytes) {
  cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
}
void give_back(void* p) { cudaFree(p); }
#endif

void check(const uint8_t* guard, size_t bytes, const char* where) {
  std::vector<uint8_t> found(kGuard);
  read(found.data(), guard, kGuard);
  for (size_t i = 0; i < kGuard; ++i) {
    if (found[i] == kGuardByte) continue;
    if (faults++ == 0) {
      std::snprintf(what, sizeof what, "byte %zu %s an allocation of %zu bytes was written", i,
                    where, bytes);
    }
    return;
  }
}

// Of everything that lives, and of what is being freed.
void check(void* p, const Block& block) {
  auto* const begin = static_cast<uint8_t*>(p);
  check(begin - kGuard, block.bytes, "before");
  check(begin + block.bytes, block.bytes, "after");
}

}  // namespace

extern "C" {

void* faults_alloc(ptrdiff_t size, int device, cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  const auto bytes = static_cast<size_t>(size);
  if (++count == fail_at) out_of_memory(bytes);
  auto* const begin = static_cast<uint8_t*>(take(bytes + 2 * kGuard, device)) + kGuard;
  fill(begin - kGuard, kGuardByte, kGuard, stream);
  fill(begin, poisoned ? 0xff : 0, bytes, stream);
  fill(begin + bytes, kGuardByte, kGuard, stream);
  live[begin] = {bytes, device};
  return begin;
}

void faults_free(void* p, ptrdiff_t, int, cudaStream_t) {
  if (p == nullptr) return;
  const std::lock_guard lock(mutex);
  const auto found = live.find(p);
  if (found == live.end()) return;
  wait();  // kernels that were told of it may still run
  check(p, found->second);
  live.erase(found);
  give_back(static_cast<uint8_t*>(p) - kGuard);
}

// The n-th allocation from now on fails, once; 0: none.
void faults_fail_at(int64_t n) {
  const std::lock_guard lock(mutex);
  count = 0, fail_at = n;
}
// Allocations since then.
int64_t faults_count() { return count; }
void faults_poison(int on) { poisoned = on != 0; }

// How many guard zones were written, those of living allocations too; faults_what() has the first.
int64_t faults_found() {
  const std::lock_guard lock(mutex);
  wait();
  for (const auto& [p, block] : live) check(p, block);
  return faults;
}
const char* faults_what() { return what; }

}  // extern "C"
