// Epilogues: functors over accumulators in registers, composed at compile time.
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

// AlphaBetaC over float32 accumulators with C's type known at run time, for kernels that convert
// to their output type when they store.
struct AlphaBetaFloatC {
  static constexpr bool kReadsC = true;

  float alpha, beta;
  FloatType type;
  const void* c;
  int64_t m, n;

  template <int kCount>
  __device__ __forceinline__ void operator()(float (&acc)[kCount], int64_t batch_idx, int64_t m_idx,
                                             int64_t n_idx) const {
    switch (type) {
      case FloatType::kF16: apply<__half>(acc, batch_idx, m_idx, n_idx); break;
      case FloatType::kBF16: apply<__nv_bfloat16>(acc, batch_idx, m_idx, n_idx); break;
      case FloatType::kF32: apply<float>(acc, batch_idx, m_idx, n_idx); break;
    }
  }

 private:
  template <typename Out, int kCount>
  __device__ __forceinline__ void apply(float (&acc)[kCount], int64_t batch_idx, int64_t m_idx, int64_t n_idx) const {
    AlphaBetaC<float, Out>{alpha, beta, static_cast<const Out*>(c), m, n}(acc, batch_idx, m_idx, n_idx);
  }
};

}  // namespace tcgemm::epilogue
