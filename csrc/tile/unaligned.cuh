// 16-byte accesses for rows that start anywhere.
#pragma once

#include <cstdint>

namespace tcgemm {

// The 16 bytes that start `skipped` bytes (0..16) into (first, second).
__device__ __forceinline__ uint4 skip_bytes(const uint4& first, const uint4& second, int skipped) {
  if (skipped == 16) return second;
  uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  if (skipped & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
  }
  if (skipped & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
  const int bits = skipped % 4 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bits);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace tcgemm
