// The mma.sync instructions of the family, by the types that they multiply and add up.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/mma.cuh"
#include "ptx/types.cuh"
#include "tile/operands.cuh"

namespace tcgemm::mma {

// A lane's fragment of a 16x8 tile of accumulators, and the dtype in which the epilogue and split-K take its elements.
template <typename Acc>
struct Accumulators {
  using Partial = Acc;
  using Accumulator = Acc[4];

  // Element `i`: rows g, g, g + 8, g + 8 and columns 2 * (lane % 4) + {0, 1, 0, 1} of the tile.
  static __device__ __forceinline__ Partial element(const Accumulator& accumulator, int i) { return accumulator[i]; }
};

// Accumulators stay in f16 until K is exhausted; alpha, beta and split-K then work in f32.
template <>
struct Accumulators<__half> {
  using Partial = float;
  using Accumulator = uint32_t[2];

  static __device__ __forceinline__ Partial element(const Accumulator& accumulator, int i) {
    const uint32_t pair = accumulator[i / 2];
    return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? pair & 0xffff : pair >> 16)));
  }
};

// The instruction itself.
template <typename Mma>
struct WarpMma;

#define TCGEMM_MMA_SYNC_INSTRUCTION(A, B, Acc, function)                                        \
  template <>                                                                                   \
  struct WarpMma<tile::Mma<A, B, Acc>> : Accumulators<Acc> {                                    \
    static __device__ __forceinline__ void multiply_add(Accumulator& d, const uint32_t (&a)[4], \
                                                        const uint32_t (&b)[2]) {               \
      ptx::function(d, a[0], a[1], a[2], a[3], b[0], b[1]);                                     \
    }                                                                                           \
  };

TCGEMM_MMA_SYNC_INSTRUCTION(__half, __half, float, mma_m16n8k16_f32_f16)
TCGEMM_MMA_SYNC_INSTRUCTION(__nv_bfloat16, __nv_bfloat16, float, mma_m16n8k16_f32_bf16)
TCGEMM_MMA_SYNC_INSTRUCTION(__half, __half, __half, mma_m16n8k16_f16_f16)
TCGEMM_MMA_SYNC_INSTRUCTION(ptx::TF32, ptx::TF32, float, mma_m16n8k8_f32_tf32)
TCGEMM_MMA_SYNC_INSTRUCTION(int8_t, int8_t, int32_t, mma_m16n8k32_s32_s8)
TCGEMM_MMA_SYNC_INSTRUCTION(uint8_t, uint8_t, int32_t, mma_m16n8k32_s32_u8)
TCGEMM_MMA_SYNC_INSTRUCTION(int8_t, uint8_t, int32_t, mma_m16n8k32_s32_s8_u8)
TCGEMM_MMA_SYNC_INSTRUCTION(uint8_t, int8_t, int32_t, mma_m16n8k32_s32_u8_s8)

#undef TCGEMM_MMA_SYNC_INSTRUCTION

}  // namespace tcgemm::mma
