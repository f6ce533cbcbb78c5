// Stands in for csrc/ptx/ldmatrix.cuh.
#pragma once

#include "instructions.h"

namespace tcgemm::ptx {

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emulator::ldmatrix_x4(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emulator::ldmatrix_x4(r, address, true); }

}  // namespace tcgemm::ptx
