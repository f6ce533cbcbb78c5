// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory to registers. PTX 6.5, sm_75.
//
// Lane i gives the address of row i % 8 of matrix i / 8; lane i receives elements 2 * (i % 4) and
// 2 * (i % 4) + 1 of row i / 4 of each matrix.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices: lane i receives column i / 4, rows 2 * (i % 4) and + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace tcgemm::ptx
