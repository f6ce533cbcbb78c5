// WMMA operations as the kernels need them: fragments by the type of what lies in memory, and one
// multiply-accumulate with optional saturation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include <type_traits>

namespace tcgemm::wmma {

using namespace nvcuda::wmma;

// The type WMMA names an operand's elements by: float32 storage holds TF32 operands.
template <typename In>
using fragment_element_t = std::conditional_t<std::is_same_v<In, float>, precision::tf32, In>;

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
