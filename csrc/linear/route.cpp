// Where a GEMM of two casts runs, and how. support.py has the same table, with reasons.
#include "linear/route.h"

#include "api/check.h"
#include "api/device.h"
#include "gemm/cublaslt.h"

namespace narrowfloat {

Route block_route(Scaling scaling, int capability, int64_t version) {
  const bool hopper = capability == 90 && version >= 120900;
  const bool has_mx =
      capability >= 120 ? version >= 120900 : capability >= 100 && version >= 120800;
  if (scaling == Scaling::none) return Route::native;
  if (capability < 89) return Route::refused;
  switch (scaling) {
    case Scaling::row:
      return hopper ? Route::native : Route::epilogue;
    case Scaling::block:
      return hopper ? Route::native : Route::refused;
    case Scaling::pow2:
      return hopper ? Route::native : has_mx ? Route::mx : Route::bf16;
    default:
      return has_mx ? Route::native : Route::bf16;
  }
}

const char* block_route_name(int64_t scaling, int capability, int64_t version) {
  NF_CHECK(scaling >= 0 && scaling <= 4, "block_route: expected a scaling from 0 to 4, got ",
           scaling);
  switch (block_route(static_cast<Scaling>(scaling), capability, version)) {
    case Route::refused:
      return "";
    case Route::epilogue:
      return "epilogue";
    case Route::bf16:
      return "bf16";
    default:
      return "native";
  }
}

Route route_of(const Cast& a, const Cast& b, int device, const char* op) {
  if (a.scaling != b.scaling)
    return Route::bf16;  // one in bf16: no tensor core takes FP8 beside it
  const Scaling scaling = a.scaling;
  if (scaling == Scaling::tensor || scaling == Scaling::none) return Route::native;
  if (is_fp4(scaling)) return has_fp4(device) ? Route::native : Route::bf16;
  const int capability = device_of(device).capability;
  const Route route = block_route(scaling, capability, cublaslt_version());
  NF_CHECK(route != Route::refused, op,
           ": expected fp32 scales by blocks of 128 on sm_90 with cuBLASLt 12.9 or newer, got sm_",
           capability, " with ", cublaslt_version(),
           " (fp8_block_pow2 runs everywhere from sm_89 on)");
  return route;
}

EdgeRule edges_of(Scaling scaling, Route route) {
  if (route == Route::epilogue) return EdgeRule::row_scales;
  const bool by_block = scaling == Scaling::block || scaling == Scaling::pow2;
  return route == Route::native && by_block ? EdgeRule::padded_rows : EdgeRule::plain;
}

}  // namespace narrowfloat
