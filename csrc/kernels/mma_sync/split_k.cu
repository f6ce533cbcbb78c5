// Second kernel of split-K: adds the partial sums of all splits in order, so that the result does
// not depend on which block finished first, and applies the epilogue once.
#include <algorithm>
#include <cstdint>

#include "core/cuda_status.h"
#include "kernels/mma_sync/epilogues.cuh"
#include "kernels/mma_sync/launch.h"
#include "tile/numeric.cuh"

namespace tcgemm::mma {
namespace {

constexpr int kThreads = 256;

// One thread reduces kCount adjacent elements of a row at a time.
template <typename Partial, typename Out, int kCount>
__global__ void __launch_bounds__(kThreads)
    reduce_splits(const Partial* partials, Out* d, int splits, int64_t elements, AlphaBetaC epilogue) {
  const auto functor = epilogue.bind<Partial, Out>();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kCount;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount; i < elements; i += step) {
    Partial sums[kCount] = {};
    for (int split = 0; split < splits; ++split) {
      const Partial* source = partials + split * elements + i;
      alignas(16) Partial values[kCount];
      if constexpr (kCount == 4) {
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(source);
      } else {
        values[0] = *source;
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j] = sums[j] + values[j];
    }
    const int64_t row = i / epilogue.n;
    functor(sums, row / epilogue.m, row % epilogue.m, i % epilogue.n);
#pragma unroll
    for (int j = 0; j < kCount; ++j) d[i + j] = convert<Out>(sums[j]);
  }
}

template <typename Partial, typename Out>
Status launch_typed(const Problem& p, const Buffers& buffers, int splits, cudaStream_t stream) {
  const AlphaBetaC epilogue{p.alpha, p.beta, buffers.c, p.m, p.n};
  const auto* partials = static_cast<const Partial*>(buffers.workspace);
  auto* d = static_cast<Out*>(buffers.d);
  const int64_t elements = p.batch * p.m * p.n;
  const int count = p.n % 4 == 0 ? 4 : 1;
  // Enough blocks to fill any device several times; each then strides over the rest.
  const int64_t blocks = std::min<int64_t>((elements / count + kThreads - 1) / kThreads, 4096);
  if (count == 4) {
    reduce_splits<Partial, Out, 4>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(partials, d, splits, elements, epilogue);
  } else {
    reduce_splits<Partial, Out, 1>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(partials, d, splits, elements, epilogue);
  }
  return launch_status("mma_sync reduction of splits");
}

}  // namespace

Status launch_reduction(const Problem& problem, const Buffers& buffers, int splits, cudaStream_t stream) {
  switch (problem.out) {
    case DType::kF16: return launch_typed<float, __half>(problem, buffers, splits, stream);
    case DType::kBF16: return launch_typed<float, __nv_bfloat16>(problem, buffers, splits, stream);
    case DType::kS32: return launch_typed<int32_t, int32_t>(problem, buffers, splits, stream);
    default: return launch_typed<float, float>(problem, buffers, splits, stream);
  }
}

}  // namespace tcgemm::mma
