// How a stream waits while launches line up behind.
#pragma once

#include <cuda_runtime.h>

namespace narrowfloat {

// What is launched after it starts so many microseconds later, a millisecond at most.
void hold(double us, cudaStream_t stream);

}  // namespace narrowfloat
