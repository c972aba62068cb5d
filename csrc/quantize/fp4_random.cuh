// Which random bits round a group: by its number, the side and the seed alone.
// reference/fp4_numerics.py says the same.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace narrowfloat {

// Philox4x32-10 (Salmon et al., SC 2011). Its keys are the same for all groups of a launch: made
// once a block, two rounds' in four words, they cost a group five loads instead of twenty
// additions.
constexpr int kPhiloxKeys = 5;

__device__ inline uint4 philox_keys(const int64_t* seed, int i) {
  const auto key = static_cast<uint64_t>(seed[0]);
  const uint32_t key0 = static_cast<uint32_t>(key) + 2 * i * 0x9E3779B9u;
  const uint32_t key1 = static_cast<uint32_t>(key >> 32) + 2 * i * 0xBB67AE85u;
  return make_uint4(key0, key1, key0 + 0x9E3779B9u, key1 + 0xBB67AE85u);
}

__device__ inline uint4 philox_round(uint4 counter, uint32_t key0, uint32_t key1) {
  const uint64_t p = uint64_t{0xD2511F53u} * counter.x, q = uint64_t{0xCD9E8D57u} * counter.z;
  return make_uint4(static_cast<uint32_t>(q >> 32) ^ counter.y ^ key0, static_cast<uint32_t>(q),
                    static_cast<uint32_t>(p >> 32) ^ counter.w ^ key1, static_cast<uint32_t>(p));
}

// A group's random bytes.
__device__ inline uint4 random_bytes(const uint4* keys, uint2 stream, uint64_t group) {
  uint4 counter = make_uint4(static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                             stream.x, stream.y);
#pragma unroll
  for (int i = 0; i < kPhiloxKeys; ++i) {
    const uint4 k = keys[i];
    counter = philox_round(philox_round(counter, k.x, k.y), k.z, k.w);
  }
  return counter;
}

__device__ inline uint2 random_stream(const int64_t* seed, int side) {
  const auto stream = static_cast<uint64_t>(seed[1]);
  return make_uint2(static_cast<uint32_t>(stream),
                    static_cast<uint32_t>(stream >> 32) << 1 | static_cast<uint32_t>(side));
}

}  // namespace narrowfloat
