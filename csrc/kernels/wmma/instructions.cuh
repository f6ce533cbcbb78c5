// WMMA operations as the kernels need them: fragments loaded from shared memory, and one
// multiply-accumulate with optional saturation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include <cstdint>
#include <type_traits>

#include "ptx/mbarrier.cuh"

namespace tcgemm::wmma {

using namespace nvcuda::wmma;

// The type WMMA names an operand's elements by: float32 storage holds TF32 operands.
template <typename In>
using fragment_element_t = std::conditional_t<std::is_same_v<In, float>, precision::tf32, In>;

// 16 bytes from global to shared memory past L1, of which the first `valid_bytes` are read and
// the rest are zeros. PTX ISA "cp.async". PTX 7.0, sm_80
__device__ __forceinline__ void cp_async_zfill_16(void* shared, const void* source, int valid_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(ptx::shared_address(shared)), "l"(source),
               "r"(valid_bytes)
               : "memory");
}

// load_matrix_sync from shared memory.
template <typename Fragment, typename T>
__device__ __forceinline__ void load_shared(Fragment& fragment, const T* shared, unsigned ld) {
  load_matrix_sync(fragment, shared, ld);
}

// The compiler finds out by itself that a float16 or 8-bit fragment comes from shared memory. For
// the types added with sm_80 it does not: it emits generic loads, element by element, and
// transposes in registers. Saying .shared gives one ldmatrix (bfloat16) or LDS (TF32, float64).
// PTX ISA "wmma.load". PTX 7.0, sm_80
#define TCGEMM_WMMA_LOAD(use, use_name, layout, layout_name, m, n, k, element, type_name, Storage, declare, registers) \
  __device__ __forceinline__ void load_shared(fragment<use, m, n, k, element, layout>& fragment,                       \
                                              const Storage* shared, unsigned ld) {                                    \
    declare(fragment.x);                                                                                               \
    asm volatile("wmma.load." use_name ".sync.aligned." layout_name ".m" #m "n" #n "k" #k ".shared." type_name         \
                 " " registers(ptx::shared_address(shared), ld)                                                        \
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

// TF32 operands are rounded to nearest; the tensor core would cut off the low mantissa bits.
// Other types are left alone.
template <typename In, typename Fragment>
__device__ __forceinline__ void round_operand(Fragment& fragment) {
  if constexpr (std::is_same_v<In, float>) {
#pragma unroll
    for (int i = 0; i < fragment.num_elements; ++i) fragment.x[i] = __float_to_tf32(fragment.x[i]);
  }
}

// acc += a * b. kSaturate: the accumulator stays finite after each step. For integers the tensor
// core does that; float16 lost it with sm_80, so its rule (infinities become the largest finite
// value, NaN becomes 0) is applied to the fragment.
template <bool kSaturate, typename Acc, typename A, typename B>
__device__ __forceinline__ void multiply_accumulate(Acc& acc, const A& a, const B& b) {
  if constexpr (std::is_same_v<typename Acc::element_type, int>) {
    mma_sync(acc, a, b, acc, kSaturate);
  } else {
    mma_sync(acc, a, b, acc);
    if constexpr (kSaturate) {
      static_assert(std::is_same_v<typename Acc::element_type, __half>, "only int32 and float16 accumulators saturate");
      const __half largest = __ushort_as_half(0x7bff);
#pragma unroll
      for (int i = 0; i < acc.num_elements; ++i) {
        const __half clamped = __hmax(__hmin(acc.x[i], largest), __hneg(largest));
        acc.x[i] = __hisnan(acc.x[i]) ? __ushort_as_half(0) : clamped;
      }
    }
  }
}

}  // namespace tcgemm::wmma
