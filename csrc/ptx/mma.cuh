// mma.sync (PTX ISA: warp-level matrix instructions, mma), D = A * B + D. PTX 7.0, sm_80.
//
// Of A, a lane holds 32-bit registers (row g, k-half 0), (g + 8, 0), (g, 1), (g + 8, 1), where
// g = lane / 4; of B it holds (column g, k-half 0), (g, 1). A register packs the lane % 4-th run
// of consecutive k of its half. Of D it holds (row g, columns 2 * (lane % 4), + 1), (g + 8, ...).
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

#define TCGEMM_PTX_MMA(name, shape_and_types, Accumulator, constraint)                                         \
  __device__ __forceinline__ void name(Accumulator(&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                                       uint32_t b0, uint32_t b1) {                                             \
    asm volatile("mma.sync.aligned." shape_and_types                                                           \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                 : "+" constraint(d[0]), "+" constraint(d[1]), "+" constraint(d[2]), "+" constraint(d[3])      \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                      \
  }

TCGEMM_PTX_MMA(mma_m16n8k16_f32_f16, "m16n8k16.row.col.f32.f16.f16.f32", float, "f")
TCGEMM_PTX_MMA(mma_m16n8k16_f32_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32", float, "f")
TCGEMM_PTX_MMA(mma_m16n8k8_f32_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32", float, "f")
// Without .satfinite: accumulators wrap around.
TCGEMM_PTX_MMA(mma_m16n8k32_s32_s8, "m16n8k32.row.col.s32.s8.s8.s32", int32_t, "r")
TCGEMM_PTX_MMA(mma_m16n8k32_s32_u8, "m16n8k32.row.col.s32.u8.u8.s32", int32_t, "r")
TCGEMM_PTX_MMA(mma_m16n8k32_s32_s8_u8, "m16n8k32.row.col.s32.s8.u8.s32", int32_t, "r")
TCGEMM_PTX_MMA(mma_m16n8k32_s32_u8_s8, "m16n8k32.row.col.s32.u8.s8.s32", int32_t, "r")

#undef TCGEMM_PTX_MMA

// D in two registers, each packing the two columns of its row.
__device__ __forceinline__ void mma_m16n8k16_f16_f16(uint32_t (&d)[2], uint32_t a0, uint32_t a1, uint32_t a2,
                                                     uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Round to nearest TF32; the low 13 bits are then zero. Ties to even: one instruction. PTX 7.8, sm_90.
__device__ __forceinline__ uint32_t cvt_rn_tf32_f32(uint32_t x) {
  uint32_t rounded;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(x)));
  return rounded;
}

// Ties away from zero: three instructions, since NaN must not be carried into. PTX 7.0, sm_80.
__device__ __forceinline__ uint32_t cvt_rna_tf32_f32(uint32_t x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(x)));
  return rounded;
}

}  // namespace tcgemm::ptx
