// Decides what stands in for CUDA where the operators run on the CPU: a device that a test may
// choose, memory that shows who leaves it unwritten or writes beside it, and cuBLASLt's product as
// a plain loop that refuses what the library would refuse. The operators and their kernels are
// csrc's own.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "api/check.h"
#include "api/device.h"
#include "gemm/cublaslt.h"
#include "host_on_cpu.h"

namespace {

struct {
  int capability = 90, multiprocessors = 2, cooperative = 1;
  int64_t version = 130000;
  uint8_t garbage = 0xff;  // NaN in every format that has one
  bool finite = true;      // operands of products have to be
} g_device;

// ---- memory ----

constexpr int64_t kGuard = 512;  // before and after each allocation, and how it is aligned
constexpr int64_t kPieceGuard = 256;
constexpr uint8_t kGuardByte = 0xa5;

struct Range {
  const uint8_t* first;
  int64_t bytes;
  std::string what;
};

thread_local std::vector<AtenTensorHandle> kept;  // until the call is checked
thread_local std::vector<Range> guards;
struct Piece {
  int64_t first, bytes;
};
thread_local std::map<const void*, std::vector<Piece>> pieces;  // of scratches not yet allocated

void guard(uint8_t* first, int64_t bytes, const std::string& what) {
  std::memset(first, kGuardByte, bytes);
  guards.push_back({first, bytes, what});
}

int64_t size_of_dtype(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_int32()) return 4;
  if (dtype == aoti_torch_dtype_float16() || dtype == aoti_torch_dtype_bfloat16()) return 2;
  if (dtype == aoti_torch_dtype_int64() || dtype == aoti_torch_dtype_float64()) return 8;
  return 1;
}

}  // namespace

namespace host_on_cpu {

AOTITorchError empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                             int32_t dtype, int32_t device_type, int32_t device_index,
                             AtenTensorHandle* tensor) {
  const int64_t size = size_of_dtype(dtype);
  int64_t elements = 1;
  for (int64_t i = 0; i < dims; ++i) elements *= sizes[i];
  const int64_t whole = elements + 3 * kGuard / size, one = 1;
  AtenTensorHandle raw = nullptr;
  if (aoti_torch_empty_strided(1, &whole, &one, dtype, device_type, device_index, &raw)) return 1;
  kept.push_back(raw);
  void* data = nullptr;
  if (aoti_torch_get_data_ptr(raw, &data)) return 1;
  auto* const begin = static_cast<uint8_t*>(data);
  const auto address = reinterpret_cast<uintptr_t>(begin);
  auto* const at = begin + ((address + kGuard - 1) / kGuard * kGuard - address) + kGuard;
  const std::string what = narrowfloat::message("an allocation of ", elements * size, " bytes");
  guard(begin, at - begin, "before " + what);
  std::memset(at, g_device.garbage, elements * size);
  guard(at + elements * size, begin + whole * size - (at + elements * size), "after " + what);
  return aoti_torch__reinterpret_tensor(raw, dims, sizes, strides, (at - begin) / size, tensor);
}

AOTITorchError current_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

int64_t piece(const void* scratch, int64_t first, int64_t bytes) {
  auto& of_this = pieces[scratch];
  if (first == 0) of_this.clear();  // of one that lay here before
  of_this.push_back({first, bytes});
  return first + (bytes + 255) / 256 * 256 + kPieceGuard;
}

uint8_t* allocated(const void* scratch, void* base) {
  auto* const begin = static_cast<uint8_t*>(base);
  int number = 0;
  for (const auto& [first, bytes] : pieces[scratch]) {
    const int64_t end = first + (bytes + 255) / 256 * 256 + kPieceGuard;
    guard(begin + first + bytes, end - first - bytes,
          narrowfloat::message("after piece ", number++, " of a scratch, of ", bytes, " bytes"));
  }
  pieces.erase(scratch);
  return begin;
}

}  // namespace host_on_cpu

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
cudaError_t cudaGetDevice(int* device) {
  *device = -1;  // a CPU tensor's
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 0;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  if (bytes) std::memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  if (bytes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t i = 0; i < height; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch,
                static_cast<const char*>(from) + i * from_pitch, width);
  }
  return cudaSuccess;
}
}

namespace narrowfloat {

Device device_of(int) {
  return {g_device.multiprocessors, g_device.capability, g_device.capability >= 90,
          g_device.cooperative != 0};
}

int64_t cublaslt_version() { return g_device.version; }

bool has_fp4(int capability, int64_t version) {  // as gemm/cublaslt.cpp
  return capability >= 120 ? version >= 120804 : capability >= 100 && version >= 120803;
}
bool has_fp4(int) { return has_fp4(g_device.capability, g_device.version); }

PlanCacheCounters plan_cache_counters() { return {0, 0}; }

namespace {

// ---- numbers ----

float of_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

float of_small(unsigned bits, int exponent_bits, int mantissa_bits, int bias) {
  const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const float sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1.f : 1.f;
  if (exponent == 0) {
    return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  }
  return sign * std::ldexp(static_cast<float>(mantissa | 1u << mantissa_bits),
                           exponent - bias - mantissa_bits);
}
float of_e4m3(uint8_t byte) { return (byte & 0x7f) == 0x7f ? NAN : of_small(byte, 4, 3, 7); }
float of_e5m2(uint8_t byte) {
  if ((byte & 0x7c) == 0x7c) return byte & 3 ? NAN : byte & 0x80 ? -INFINITY : INFINITY;
  return of_small(byte, 5, 2, 15);
}
float of_f16(uint16_t bits) {
  if ((bits & 0x7c00) == 0x7c00) return bits & 0x3ff ? NAN : bits & 0x8000 ? -INFINITY : INFINITY;
  return of_small(bits, 5, 10, 15);
}
uint16_t to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
uint16_t to_f16(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

double load(const void* p, Real type, int64_t i) {
  if (type == Real::f32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return type == Real::bf16 ? of_bf16(bits) : of_f16(bits);
}
void store(void* p, Real type, int64_t i, float value) {
  if (type == Real::f32) {
    static_cast<float*>(p)[i] = value;
  } else {
    static_cast<uint16_t*>(p)[i] = type == Real::bf16 ? to_bf16(value) : to_f16(value);
  }
}

// ---- the product ----

bool fp8(const Operand& o) { return o.format == Element::e4m3 || o.format == Element::e5m2; }
ScaleMode mode_of(const Operand& o) {
  return o.format == Element::e2m1 ? ScaleMode::vec16_ue4m3 : o.mode;
}
bool in_blocks_of_128(const Operand& o) {
  return mode_of(o) == ScaleMode::vec128 || mode_of(o) == ScaleMode::square128;
}
int64_t bits_of(const Operand& o) {
  return o.format == Element::e2m1 ? 4 : o.format == Element::bf16 ? 16 : 8;
}
uintptr_t alignment(const void* p) {
  const auto bits = reinterpret_cast<uintptr_t>(p) | 256;
  return bits & -bits;
}

[[noreturn]] void refuse(const std::string& why, const Matmul& p) {
  const auto of = [](const Operand& o) {
    return message("[", o.rows, "] element ", static_cast<int>(o.format), " ld ", o.ld, " mode ",
                   static_cast<int>(o.mode), o.k_first ? " k first" : "", o.scale ? " scaled" : "",
                   " aligned ", alignment(o.q));
  };
  throw std::runtime_error(message("emulated cuBLASLt: ", why, "; a ", of(p.a), ", b ", of(p.b),
                                   ", k ", p.k, ", d in ", static_cast<int>(p.d_type), " ld ",
                                   p.ldd, " aligned ", alignment(p.d), p.bias ? ", bias" : "",
                                   p.alpha ? ", alpha" : "", p.fast ? ", fast" : ""));
}
#define NF_EXPECT(condition, why) \
  if (!(condition)) refuse(why, p)

// What a key of cublaslt_plan.cpp has: a plan asked for before the launch is the one launched.
using Asked = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, int, int,
                         int, int, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;
Asked asked_of(const Matmul& p) {
  const int flags = p.fast | p.accumulate << 1 | (p.alpha != nullptr) << 2 | (p.c != nullptr) << 3 |
                    p.a.k_first << 4 | p.b.k_first << 5 | (p.a.scale != nullptr) << 6 |
                    (p.b.scale != nullptr) << 7;
  return {p.a.rows,
          p.b.rows,
          p.k,
          p.a.ld,
          p.b.ld,
          p.ldd,
          static_cast<int>(p.a.format),
          static_cast<int>(p.b.format),
          static_cast<int>(p.a.mode),
          static_cast<int>(p.b.mode),
          static_cast<int>(p.d_type),
          flags,
          alignment(p.a.q),
          alignment(p.b.q),
          alignment(p.d),
          p.bias ? alignment(p.bias) : 0};
}
thread_local std::set<Asked> asked;  // in this call

void check_operand(const Operand& o, const char* name, const Matmul& p) {
  const auto expect = [&](bool condition, const char* why) {
    if (!condition) refuse(message(name, ": ", why), p);
  };
  expect(o.q != nullptr, "expected an address");
  expect(reinterpret_cast<uintptr_t>(o.q) % 16 == 0, "expected an address on 16 bytes");
  expect(o.ld * bits_of(o) % 128 == 0, "expected a leading dimension of whole 16 bytes");
  expect(o.ld >= (o.k_first ? o.rows : p.k), "expected a leading dimension that holds a row");
  expect(!o.k_first || o.format == Element::bf16, "only bf16 may lie k first");
  expect(!o.k_first || o.rows % 8 == 0, "expected whole words of 16 bytes of rows, k first");
  expect(o.format != Element::bf16 || (!o.scale && o.mode == ScaleMode::tensor),
         "expected no scales of bf16");
  expect(o.format != Element::e2m1 || o.scale, "expected scales of e2m1");
  expect(!o.scale || reinterpret_cast<uintptr_t>(o.scale) % 16 == 0, "expected scales on 16 bytes");
  expect(o.scale || mode_of(o) == ScaleMode::tensor, "expected the scales of its mode");
  const int capability = g_device.capability;
  const bool hopper = capability == 90 && g_device.version >= 120900;
  expect(!fp8(o) || capability >= 89, "no FP8 on this chip");
  expect(o.format != Element::e2m1 || has_fp4(0), "no FP4 on this chip");
  if (mode_of(o) == ScaleMode::row || in_blocks_of_128(o)) {
    expect(hopper, "no fp32 scales of rows or blocks on this chip");
  }
  if (fp8(o) && mode_of(o) == ScaleMode::vec32_ue8m0) {
    expect(capability >= 100, "no MXFP8 on this chip");
  }
  if (in_blocks_of_128(o)) expect(o.rows % 16 == 0, "expected padded rows of blocks of 128");
  expect(mode_of(o) != ScaleMode::vec16_ue4m3 || o.format == Element::e2m1, "expected e2m1");
}

void check(const Matmul& p) {
  check_operand(p.a, "a", p);
  check_operand(p.b, "b", p);
  const Element a = p.a.format, b = p.b.format;
  NF_EXPECT(p.a.rows > 0 && p.b.rows > 0 && p.k > 0, "expected sizes above 0");
  NF_EXPECT(a == b || (fp8(p.a) && fp8(p.b)), "expected operands of one kind");
  NF_EXPECT(a != Element::e5m2 || b != Element::e5m2, "expected at most one operand in e5m2");
  NF_EXPECT((p.a.scale != nullptr) == (p.b.scale != nullptr), "expected both scales or none");
  const ScaleMode ma = mode_of(p.a), mb = mode_of(p.b);
  NF_EXPECT(ma == mb || (in_blocks_of_128(p.a) && in_blocks_of_128(p.b)),
            "expected scales of one mode");
  NF_EXPECT(ma != ScaleMode::square128 || mb != ScaleMode::square128, "squares on both sides");
  NF_EXPECT(!fp8(p.a) || p.k % 16 == 0, "expected k as a multiple of 16");
  NF_EXPECT(a != Element::e2m1 || p.k % 32 == 0, "expected k as a multiple of 32");
  NF_EXPECT(p.b.rows % 8 == 0, "expected rows of b as a multiple of 8");
  NF_EXPECT(p.d && reinterpret_cast<uintptr_t>(p.d) % 16 == 0, "expected d on 16 bytes");
  NF_EXPECT(p.ldd >= p.b.rows && p.ldd * size_of(p.d_type) % 16 == 0,
            "expected rows of d of whole 16 bytes");
  NF_EXPECT(a != Element::bf16 || p.d_type != Real::f16, "no product of bf16 in fp16");
  NF_EXPECT(!p.bias || reinterpret_cast<uintptr_t>(p.bias) % 16 == 0, "expected bias on 16 bytes");
  NF_EXPECT(!p.fast || (fp8(p.a) && !in_blocks_of_128(p.a) && ma != ScaleMode::vec32_ue8m0),
            "no fast accumulation of these operands");
  NF_EXPECT(!p.alpha || !p.accumulate, "expected beta beside alpha");
  NF_EXPECT(!(a == Element::e2m1 && p.alpha) || (p.c && p.c != p.d),
            "expected a c of its own with beta on the device");
}

double scale_at(const Operand& o, int64_t row, int64_t at, int64_t k) {
  if (!o.scale) return 1;
  const auto* floats = static_cast<const float*>(o.scale);
  const auto* bytes = static_cast<const uint8_t*>(o.scale);
  const auto tiled = [&](int64_t block, int64_t blocks) {  // 128 rows x 4 blocks
    return bytes[(row / 128 * ((blocks + 3) / 4) + block / 4) * 512 + row % 32 * 16 +
                 row % 128 / 32 * 4 + block % 4];
  };
  switch (mode_of(o)) {
    case ScaleMode::tensor:
      return floats[0];
    case ScaleMode::row:
      return floats[row];
    case ScaleMode::vec128:
      return floats[at / 128 * o.rows + row];
    case ScaleMode::square128:
      return floats[row / 128 * (((k + 127) / 128 + 3) / 4 * 4) + at / 128];
    case ScaleMode::vec32_ue8m0: {
      const uint8_t byte = tiled(at / 32, (k + 31) / 32);
      return byte == 255 ? NAN : std::ldexp(1., byte - 127);
    }
    default:
      return of_e4m3(tiled(at / 16, (k + 15) / 16) & 0x7f);
  }
}

// [rows, k], with its scales but for those of a row or a tensor, which are multiplied last
std::vector<double> decoded(const Operand& o, const Matmul& p, const char* name) {
  constexpr float kE2m1[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  const bool last = mode_of(o) == ScaleMode::tensor || mode_of(o) == ScaleMode::row;
  std::vector<double> values(o.rows * p.k);
  const auto* bytes = static_cast<const uint8_t*>(o.q);
  for (int64_t r = 0; r < o.rows; ++r) {
    for (int64_t i = 0; i < p.k; ++i) {
      const int64_t at = o.k_first ? i * o.ld + r : r * o.ld + i;
      double value;
      if (o.format == Element::bf16) {
        value = of_bf16(static_cast<const uint16_t*>(o.q)[at]);
      } else if (o.format == Element::e2m1) {
        const int code = bytes[at / 2] >> (at % 2 * 4) & 15;
        value = code & 8 ? -kE2m1[code & 7] : kE2m1[code & 7];
      } else {
        value = o.format == Element::e4m3 ? of_e4m3(bytes[at]) : of_e5m2(bytes[at]);
      }
      if (!last) value *= scale_at(o, r, i, p.k);
      if (g_device.finite && !std::isfinite(value)) {
        refuse(message(name, " has ", value, " at ", r, ", ", i, " (unwritten memory?)"), p);
      }
      values[r * p.k + i] = value;
    }
  }
  return values;
}

}  // namespace

int64_t workspace_for(const Matmul& p, int, cudaStream_t) {
  asked.insert(asked_of(p));
  return 1000;
}

void matmul(const Matmul& p, void* workspace, int, cudaStream_t) {
  check(p);
  NF_EXPECT(asked.count(asked_of(p)), "expected a product that workspace_for() was asked for");
  NF_EXPECT(workspace && reinterpret_cast<uintptr_t>(workspace) % 256 == 0,
            "expected a workspace on 256 bytes");
  std::memset(workspace, g_device.garbage, 1000);
  const std::vector<double> a = decoded(p.a, p, "a"), b = decoded(p.b, p, "b");
  const double alpha = p.alpha ? p.alpha[0] : 1, beta = p.alpha ? p.alpha[1] : p.accumulate;
  NF_EXPECT(!p.alpha || beta == 0, "expected {alpha, 0}");
  const bool last_a = mode_of(p.a) == ScaleMode::tensor || mode_of(p.a) == ScaleMode::row;
  const bool last_b = mode_of(p.b) == ScaleMode::tensor || mode_of(p.b) == ScaleMode::row;
  const Real bias_type = epilogue_bias_type(p.d_type);
  for (int64_t r = 0; r < p.a.rows; ++r) {
    for (int64_t c = 0; c < p.b.rows; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < p.k; ++i) sum += a[r * p.k + i] * b[c * p.k + i];
      if (last_a) sum *= scale_at(p.a, r, 0, p.k);
      if (last_b) sum *= scale_at(p.b, c, 0, p.k);
      sum *= alpha;
      if (beta != 0) sum += load(p.c ? p.c : p.d, p.d_type, r * p.ldd + c);
      if (p.bias) sum += load(p.bias, bias_type, c);
      store(p.d, p.d_type, r * p.ldd + c, static_cast<float>(sum));
    }
  }
}

}  // namespace narrowfloat

extern "C" {

void pretend_device(int64_t capability, int64_t version, int64_t multiprocessors,
                    int64_t cooperative, int64_t garbage, int64_t finite) {
  g_device.capability = static_cast<int>(capability);
  g_device.version = version;
  g_device.multiprocessors = static_cast<int>(multiprocessors);
  g_device.cooperative = static_cast<int>(cooperative);
  g_device.garbage = static_cast<uint8_t>(garbage);
  g_device.finite = finite != 0;
}

// What the last error that was thrown is, as csrc/api/check.h numbers it, and its text; none then.
int64_t take_error(const char** text) {
  static thread_local narrowfloat::LastError taken;
  taken = narrowfloat::last_error;
  narrowfloat::last_error = {};
  *text = taken.text.c_str();
  return static_cast<int64_t>(taken.kind);
}

// After each call, while its results live: whether bytes were written that nobody may write. What
// was wrong, or null.
const char* end_of_call() {
  thread_local std::string fault;
  fault.clear();
  for (const Range& range : guards) {
    for (int64_t i = 0; i < range.bytes && fault.empty(); ++i) {
      if (range.first[i] != kGuardByte) {
        fault = narrowfloat::message("byte ", i, " ", range.what, " was written");
      }
    }
  }
  guards.clear();
  pieces.clear();
  narrowfloat::asked.clear();
  for (AtenTensorHandle tensor : kept) aoti_torch_delete_tensor_object(tensor);
  kept.clear();
  return fault.empty() ? nullptr : fault.c_str();
}

}  // extern "C"
