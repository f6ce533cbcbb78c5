// Stands in for csrc/ptx/special_registers.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline uint32_t tid_x() { return threadIdx.x; }
inline uint32_t ctaid_x() { return blockIdx.x; }
// Goes on at each call.
inline uint64_t globaltimer() {
  static uint64_t now = 0;
  return ++now;
}

}  // namespace tcgemm::ptx
