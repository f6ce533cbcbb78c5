// The ring of stages through which operands pass.
#pragma once

#include <cstdint>

namespace tcgemm {

// Where a thread stands in a ring of `stages`.
struct PipelineState {
  int stages;
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int count) {
    stage += count;
    phase ^= stage / stages & 1;
    stage %= stages;
  }
};

}  // namespace tcgemm
