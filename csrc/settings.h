// Decides how the choices of a linear layer's call are read from one integer. settings.py writes it
// and says why.
#pragma once

#include <cstdint>
#include <optional>

#include "check.h"
#include "quantize.h"

namespace narrowfloat {

constexpr int64_t kFormatBits = 15, kWFormatShift = 4;
constexpr int64_t kFast = 1 << 8, kFastWgrad = 1 << 9;
constexpr int64_t kSaveX = 1 << 10, kNeedDx = 1 << 10;
constexpr int kDwShift = 12, kDbShift = 16;
constexpr int64_t kTypeBits = 15;
constexpr int64_t kGuarded = 1 << 20, kJoins = 1 << 21;  // scales of the calls before

inline Element element_of(int64_t format, const char* op) {
  NF_CHECK(format == 0 || format == 1, op, ": expected format 0 (e4m3) or 1 (e5m2), got ", format);
  return static_cast<Element>(format);
}

// Of an operand that may be left in bf16.
constexpr int64_t kInBf16 = static_cast<int64_t>(Element::bf16);
inline Element operand_of(int64_t format, const char* op) {
  return format == kInBf16 ? Element::bf16 : element_of(format, op);
}
inline bool leaves_in_bf16(int64_t settings) {  // of a layer's call: any operand
  return (settings & kFormatBits) == kInBf16 ||
         (settings >> kWFormatShift & kFormatBits) == kInBf16;
}

// 0 none, else Real + 1
inline std::optional<Real> real_of(int64_t bits, const char* op) {
  NF_CHECK(bits >= 0 && bits <= 3, op, ": expected a dtype from 0 to 3, got ", bits);
  if (bits == 0) return std::nullopt;
  return static_cast<Real>(bits - 1);
}

struct ForwardSettings {
  Element x, w;
  bool fast, save_x;

  ForwardSettings(int64_t bits, const char* op)
      : x(operand_of(bits & kFormatBits, op)),
        w(operand_of(bits >> kWFormatShift & kFormatBits, op)),
        fast((bits & kFast) != 0),
        save_x((bits & kSaveX) != 0) {}
};

struct BackwardSettings {
  Element dy, w;
  bool fast_dgrad, fast_wgrad, need_dx;
  std::optional<Real> dw, db;  // types of the gradients that are wanted

  BackwardSettings(int64_t bits, const char* op)
      : dy(operand_of(bits & kFormatBits, op)),
        w(operand_of(bits >> kWFormatShift & kFormatBits, op)),
        fast_dgrad((bits & kFast) != 0),
        fast_wgrad((bits & kFastWgrad) != 0),
        need_dx((bits & kNeedDx) != 0),
        dw(real_of(bits >> kDwShift & kTypeBits, op)),
        db(real_of(bits >> kDbShift & kTypeBits, op)) {}
};

}  // namespace narrowfloat
