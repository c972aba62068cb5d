// Rolling the amax histories of layers: their new scales, once a step.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

namespace narrowfloat {

// How the amax that a scale covers follows from a history.
struct HistoryRoll {
  int rows, width;  // of each layer's [rows, width], see History
  bool latest;      // of the newest step; else the largest of all
  float factor;     // what it is multiplied by, 2^margin
};

// One launch for up to a few hundred layers. A row whose tensor took part in no call since stays as
// it is.
void roll_histories(const std::vector<uintptr_t>& layers, const HistoryRoll& how,
                    cudaStream_t stream);

}  // namespace narrowfloat
