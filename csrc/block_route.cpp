// Decides where a product with a scaling runs, and how. support.py has the same table, with
// reasons.
#include "block_route.h"

#include "check.h"

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

}  // namespace narrowfloat
