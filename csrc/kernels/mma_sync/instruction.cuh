// The mma.sync instructions of the family: element type, accumulator, operand preparation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/mma.cuh"

namespace tcgemm::mma {

// kElementBytes: size of an element of A and B. Accumulator: what a lane holds of a 16x8 tile.
// Partial: the type in which sums leave it. kHasIdentityEpilogue: see launch.cuh.
template <typename PartialType>
struct FourRegisterAccumulator {
  using Partial = PartialType;
  using Accumulator = Partial[4];

  // Element `i`: rows g, g, g + 8, g + 8 and columns 2 * (lane % 4) + {0, 1, 0, 1} of the tile.
  static __device__ __forceinline__ Partial element(const Accumulator& accumulator, int i) { return accumulator[i]; }
};

struct F16F32 : FourRegisterAccumulator<float> {
  static constexpr int kElementBytes = 2;
  static constexpr bool kHasIdentityEpilogue = true;
  static __device__ __forceinline__ void multiply_add(Accumulator& d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k16_f32_f16(d, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
};

struct BF16F32 : FourRegisterAccumulator<float> {
  static constexpr int kElementBytes = 2;
  static constexpr bool kHasIdentityEpilogue = true;
  static __device__ __forceinline__ void multiply_add(Accumulator& d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k16_f32_bf16(d, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
};

struct TF32F32 : FourRegisterAccumulator<float> {
  static constexpr int kElementBytes = 4;
  static constexpr bool kHasIdentityEpilogue = false;
  static __device__ __forceinline__ void multiply_add(Accumulator& d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k8_f32_tf32(d, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
};

struct S8S32 : FourRegisterAccumulator<int32_t> {
  static constexpr int kElementBytes = 1;
  static constexpr bool kHasIdentityEpilogue = false;
  static __device__ __forceinline__ void multiply_add(Accumulator& d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k32_s32_s8(d, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
};

struct U8S32 : FourRegisterAccumulator<int32_t> {
  static constexpr int kElementBytes = 1;
  static constexpr bool kHasIdentityEpilogue = false;
  static __device__ __forceinline__ void multiply_add(Accumulator& d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k32_s32_u8(d, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
};

// Sums stay in f16 until K is exhausted; alpha, beta and split-K then work in f32.
struct F16F16 {
  using Partial = float;
  using Accumulator = uint32_t[2];
  static constexpr int kElementBytes = 2;
  static constexpr bool kHasIdentityEpilogue = false;
  static __device__ __forceinline__ void multiply_add(Accumulator& d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_m16n8k16_f16_f16(d, a[0], a[1], a[2], a[3], b[0], b[1]);
  }
  static __device__ __forceinline__ Partial element(const Accumulator& accumulator, int i) {
    const uint32_t pair = accumulator[i / 2];
    return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? pair & 0xffff : pair >> 16)));
  }
};

}  // namespace tcgemm::mma
