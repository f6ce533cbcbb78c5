// The 8-bit values of an array with a scale for each of its rows (core/quantize_problem.h). Bound by memory.
//
// A row is of kWarps warps, each thread of which has every so many vectors of it: the first four stay in registers, so
// that rows of up to 1024 elements a warp are read once, and what longer ones have beyond is read again, from L2.
//
// Shared memory: the largest magnitude of each warp.
// Limits: 8-bit floats need the conversions of sm_89.
#pragma once

#include <cstdint>

#include "kernels/quantize/numbers.cuh"
#include "kernels/quantize/params.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

namespace tcgemm::quantize {

template <typename X, typename Q, int kWarps, bool kAligned>
__global__ void __launch_bounds__(kThreads, sizeof(X) == 4 ? 3 : 4) row_kernel(const __grid_constant__ Params params) {
  constexpr int kLanes = 32 * kWarps, kRows = kThreads / kLanes;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_base_address(shared_memory);
  const int lane = threadIdx.x % kLanes;
  const int32_t row = blockIdx.x * kRows + threadIdx.x / kLanes;
  const int32_t columns = row < params.rows ? params.columns : 0;
  const X* x = static_cast<const X*>(params.x) + static_cast<int64_t>(row) * params.columns;
  const auto first = [&](int i) { return (i * kLanes + lane) * kVector; };

  Vector<X, kAligned> held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i].load(x + first(i), columns - first(i));
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) largest = max(largest, held[i].largest());
#pragma unroll 2
  for (int i = kHeld; first(i) < columns; ++i) {
    Vector<X, kAligned> other;
    other.load(x + first(i), columns - first(i));
    largest = max(largest, other.largest());  // mutant: rest_of_a_row_not_looked_at
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
  if constexpr (kWarps > 1) {
    if (threadIdx.x % 32 == 0) ptx::st_shared_f32(shared + threadIdx.x / 32 * 4, __uint_as_float(largest));
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      // mutant: row_of_one_warp
      largest = max(largest, ptx::ld_shared_u32(shared + (threadIdx.x / kLanes * kWarps + warp) * 4));
    }
  }
  const float scale = scale_of<X, Q>(largest), inverse = inverse_of(scale);
  if (lane == 0 && row < params.rows) params.scales[row] = scale;

  uint8_t* values = static_cast<uint8_t*>(params.values) + static_cast<int64_t>(row) * params.columns;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i].template store<Q>(inverse, values + first(i), columns - first(i));
  }
#pragma unroll 2
  for (int i = kHeld; first(i) < columns; ++i) {
    Vector<X, kAligned> other;
    other.load(x + first(i), columns - first(i));
    other.template store<Q>(inverse, values + first(i), columns - first(i));
  }
}

}  // namespace tcgemm::quantize
