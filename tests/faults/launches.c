// Preloaded before libcudart and cuBLASLt: the n-th launch or copy that narrowfloat or torch asks
// for fails, as a driver's would, without touching the device. Armed by faults_launch_at().
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

enum { kLaunchOutOfResources = 701, kCublasExecutionFailed = 13 };
static int64_t count, fail_at;
static __thread int pending;

void faults_launch_at(int64_t n) { count = 0, fail_at = n; }
int64_t faults_launches(void) { return count; }

static int fails(void) { return fail_at != 0 && ++count == fail_at; }

// torch has loaded them for itself alone: they are found by name
static void* real(const char* const* libraries, const char* name) {
  for (; *libraries; ++libraries) {
    void* handle = dlopen(*libraries, RTLD_LAZY | RTLD_NOLOAD);
    void* found = handle ? dlsym(handle, name) : NULL;
    if (found) return found;
  }
  return dlsym(RTLD_NEXT, name);
}
static const char* const kCudart[] = {"libcudart.so.13", "libcudart.so.12", NULL};
static const char* const kCublasLt[] = {"libcublasLt.so.13", "libcublasLt.so.12", NULL};

typedef struct {
  unsigned x, y, z;
} Dim;

#define FORWARD(name, parameters, ...)                                   \
  int name parameters {                                                  \
    static int (*next) parameters;                                       \
    if (!next) next = (int (*) parameters)real(kCudart, #name);           \
    if (fails()) return pending = kLaunchOutOfResources;                 \
    return next(__VA_ARGS__);                                            \
  }

FORWARD(__cudaLaunchKernel, (void* f, Dim g, Dim b, void** a, size_t s, void* t), f, g, b, a, s, t)
FORWARD(cudaLaunchKernel, (const void* f, Dim g, Dim b, void** a, size_t s, void* t), f, g, b, a, s,
        t)
FORWARD(cudaLaunchCooperativeKernel, (const void* f, Dim g, Dim b, void** a, size_t s, void* t), f,
        g, b, a, s, t)
FORWARD(cudaLaunchKernelExC, (const void* c, const void* f, void** a), c, f, a)
FORWARD(cudaMemsetAsync, (void* p, int v, size_t n, void* t), p, v, n, t)
FORWARD(cudaMemcpyAsync, (void* d, const void* s, size_t n, int k, void* t), d, s, n, k, t)
FORWARD(cudaMemcpy2DAsync,
        (void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, int k, void* t), d, dp, s,
        sp, w, h, k, t)

int cudaGetLastError(void) {
  static int (*next)(void);
  if (!next) next = (int (*)(void))real(kCudart, "cudaGetLastError");
  const int found = pending;
  pending = 0;
  return found ? found : next();
}
int cudaPeekAtLastError(void) {
  static int (*next)(void);
  if (!next) next = (int (*)(void))real(kCudart, "cudaPeekAtLastError");
  return pending ? pending : next();
}

typedef int (*Matmul)(void*, void*, const void*, const void*, void*, const void*, void*,
                      const void*, const void*, void*, void*, void*, const void*, void*, size_t,
                      void*);
int cublasLtMatmul(void* h, void* d, const void* alpha, const void* a, void* la, const void* b,
                   void* lb, const void* beta, const void* c, void* lc, void* out, void* lo,
                   const void* algo, void* w, size_t n, void* t) {
  static Matmul next;
  if (!next) next = (Matmul)real(kCublasLt, "cublasLtMatmul");
  if (fails()) return kCublasExecutionFailed;
  return next(h, d, alpha, a, la, b, lb, beta, c, lc, out, lo, algo, w, n, t);
}
