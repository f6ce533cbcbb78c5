// Fragments of nvcuda::wmma from shared memory.
#pragma once

#include <cuda_bf16.h>
#include <mma.h>

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace tcgemm::ptx {

using namespace nvcuda::wmma;

// load_matrix_sync from shared memory.
template <typename Fragment, typename T>
__device__ __forceinline__ void wmma_load_shared(Fragment& fragment, const T* shared, unsigned ld) {
  load_matrix_sync(fragment, shared, ld);
}

// The compiler finds out by itself that a float16 or 8-bit fragment comes from shared memory. For
// the types added with sm_80 it does not: it emits generic loads, element by element, and
// transposes in registers. Saying .shared gives one ldmatrix (bfloat16) or LDS (TF32, float64).
// PTX ISA "wmma.load". PTX 7.0, sm_80
#define TCGEMM_WMMA_LOAD(use, use_name, layout, layout_name, m, n, k, element, type_name, Storage, declare, registers) \
  __device__ __forceinline__ void wmma_load_shared(fragment<use, m, n, k, element, layout>& fragment,                  \
                                                   const Storage* shared, unsigned ld) {                               \
    declare(fragment.x);                                                                                               \
    asm volatile("wmma.load." use_name ".sync.aligned." layout_name ".m" #m "n" #n "k" #k ".shared." type_name         \
                 " " registers(shared_address(shared), ld)                                                             \
                 : "memory");                                                                                          \
  }
#define TCGEMM_WMMA_LOADS(m, n, k, element, type_name, Storage, declare, a_registers, b_registers)              \
  TCGEMM_WMMA_LOAD(matrix_a, "a", row_major, "row", m, n, k, element, type_name, Storage, declare, a_registers) \
  TCGEMM_WMMA_LOAD(matrix_a, "a", col_major, "col", m, n, k, element, type_name, Storage, declare, a_registers) \
  TCGEMM_WMMA_LOAD(matrix_b, "b", row_major, "row", m, n, k, element, type_name, Storage, declare, b_registers) \
  TCGEMM_WMMA_LOAD(matrix_b, "b", col_major, "col", m, n, k, element, type_name, Storage, declare, b_registers)
#define TCGEMM_WORDS(x) uint32_t* const r = reinterpret_cast<uint32_t*>(x)
#define TCGEMM_DOUBLES(x) double* const r = x
#define TCGEMM_D1(address, ld) "{%0}, [%1], %2;" : "=d"(r[0]) : "r"(address), "r"(ld)
#define TCGEMM_R2(address, ld) "{%0, %1}, [%2], %3;" : "=r"(r[0]), "=r"(r[1]) : "r"(address), "r"(ld)
#define TCGEMM_R4(address, ld) \
  "{%0, %1, %2, %3}, [%4], %5;" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address), "r"(ld)
#define TCGEMM_R8(address, ld)                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;" : "=r"(r[0]), \
                                                  "=r"(r[1]), \
                                                  "=r"(r[2]), \
                                                  "=r"(r[3]), \
                                                  "=r"(r[4]), \
                                                  "=r"(r[5]), \
                                                  "=r"(r[6]), \
                                                  "=r"(r[7])  \
      : "r"(address), "r"(ld)

TCGEMM_WMMA_LOADS(16, 16, 16, __nv_bfloat16, "bf16", __nv_bfloat16, TCGEMM_WORDS, TCGEMM_R4, TCGEMM_R4)
TCGEMM_WMMA_LOADS(32, 8, 16, __nv_bfloat16, "bf16", __nv_bfloat16, TCGEMM_WORDS, TCGEMM_R8, TCGEMM_R2)
TCGEMM_WMMA_LOADS(8, 32, 16, __nv_bfloat16, "bf16", __nv_bfloat16, TCGEMM_WORDS, TCGEMM_R2, TCGEMM_R8)
TCGEMM_WMMA_LOADS(16, 16, 8, precision::tf32, "tf32", float, TCGEMM_WORDS, TCGEMM_R4, TCGEMM_R4)
TCGEMM_WMMA_LOADS(8, 8, 4, double, "f64", double, TCGEMM_DOUBLES, TCGEMM_D1, TCGEMM_D1)

#undef TCGEMM_WMMA_LOAD
#undef TCGEMM_WMMA_LOADS
#undef TCGEMM_WORDS
#undef TCGEMM_DOUBLES
#undef TCGEMM_D1
#undef TCGEMM_R2
#undef TCGEMM_R4
#undef TCGEMM_R8

}  // namespace tcgemm::ptx
