// Reductions over the lanes of a warp and over a block, in a fixed order and without atomics: the
// same input gives the same bits each time.
//
// A block reduces in two passes: each warp by shuffles, then one warp over the warps' partial results,
// which lie in shared memory meanwhile.
// https://docs.nvidia.com/cuda/cuda-c-programming-guide/#warp-shuffle-functions
#pragma once

#include "tile/reduce_op.cuh"

namespace tcgemm {

// An operator known at run time only; every thread of a grid takes the same one, and memory is what
// such kernels wait for. The larger or smaller of anything and NaN is NaN.
template <typename T>
struct Reducer {
  ReduceOp op;

  __device__ __forceinline__ T operator()(T x, T y) const {
    if (op == ReduceOp::kAdd) return x + y;
    const bool first = op == ReduceOp::kMax ? x >= y : x <= y;
    return first || x != x ? x : y;
  }

  // What changes nothing. `infinity` is the type's.
  __device__ __forceinline__ T identity(T infinity) const {
    return op == ReduceOp::kAdd ? T(0) : op == ReduceOp::kMax ? -infinity : infinity;
  }
};

// Over aligned groups of kWidth lanes; every lane of the group gets the result. All lanes of the warp
// must take part.
template <int kWidth = 32, typename T, typename Op>
__device__ __forceinline__ T warp_reduce(T x, const Op& op) {
  static_assert(kWidth > 0 && kWidth <= 32 && (kWidth & (kWidth - 1)) == 0, "groups are powers of two within a warp");
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Over a block of kThreads; the lanes of warp 0 get the result. `partials`: shared memory for a value
// of each warp, free again after the next __syncthreads().
template <int kThreads, typename T, typename Op>
__device__ __forceinline__ T block_reduce(T x, T identity, const Op& op, T* partials) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024, "the second pass is one warp over one value of each warp");
  constexpr int kWarps = kThreads / 32;
  const int lane_idx = static_cast<int>(threadIdx.x) % 32, warp_idx = static_cast<int>(threadIdx.x) / 32;
  x = warp_reduce(x, op);
  if (lane_idx == 0) partials[warp_idx] = x;
  __syncthreads();
  if (warp_idx == 0) x = warp_reduce(lane_idx < kWarps ? partials[lane_idx] : identity, op);
  return x;
}

}  // namespace tcgemm
