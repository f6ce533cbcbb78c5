// Stands in for csrc/ptx/stmatrix.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulator::stmatrix_x4(address, {r0, r1, r2, r3}, false);
}
inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulator::stmatrix_x4(address, {r0, r1, r2, r3}, true);
}

}  // namespace tcgemm::ptx
