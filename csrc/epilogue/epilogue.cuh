// The two simplest epilogues, as functors over accumulators in registers: nothing, and alpha and beta.
// function.cuh has everything else.
//
// A kernel calls `epilogue(acc, batch_idx, m_idx, n_idx)` for kCount horizontally adjacent
// accumulators of row m_idx, starting at column n_idx, all inside the matrix, and stores what
// is left in `acc` as the output type. Kernels never know what an epilogue computes.
#pragma once

#include <cstdint>

#include "tile/numeric.cuh"

namespace tcgemm::epilogue {

// D = A * B
template <typename Acc, typename Out>
struct Identity {
  static constexpr bool kReadsC = false;

  template <int kCount>
  __device__ __forceinline__ void operator()(Acc (&)[kCount], int64_t, int64_t, int64_t) const {}
};

// D = alpha * A * B + beta * C, with C laid out as D (packed row-major, batch stride m * n).
// beta == 0 never reads C, so C may be null and a NaN in it does not spread.
template <typename Acc, typename Out>
struct AlphaBetaC {
  static constexpr bool kReadsC = true;

  real_of_t<Acc> alpha;
  real_of_t<Acc> beta;
  const Out* c;
  int64_t m, n;

  template <int kCount>
  __device__ __forceinline__ void operator()(Acc (&acc)[kCount], int64_t batch_idx, int64_t m_idx,
                                             int64_t n_idx) const {
    const Out* source = c + (batch_idx * m + m_idx) * n + n_idx;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      acc[i] = acc[i] * alpha;
      if (beta != real_of_t<Acc>(0)) acc[i] = acc[i] + convert<Acc>(source[i]) * beta;
    }
  }
};

}  // namespace tcgemm::epilogue
