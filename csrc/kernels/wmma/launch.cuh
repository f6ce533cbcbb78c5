// Host side of the WMMA kernels, from a problem to an instantiation. Included by the files that instantiate.
#pragma once

#include <algorithm>

#include "epilogue/epilogue.cuh"
#include "kernels/common/gemm_args.h"
#include "kernels/common/launch.cuh"
#include "kernels/wmma/config.h"
#include "kernels/wmma/instance.h"
#include "kernels/wmma/launch.h"
#include "kernels/wmma/naive_kernel.cuh"
#include "kernels/wmma/tiled_kernel.cuh"

namespace tcgemm::wmma {

// Float16, bfloat16 or float32: the bare product. What becomes of it is a function.
using AnyFloat = FloatOutputs<epilogue::Identity, float>;
template <typename Acc>
using Exact = Output<Acc, epilogue::AlphaBetaC<Acc, Acc>>;

// What a direct load_matrix_sync asks of rows that hold `elements` of a tile, see naive_kernel.cuh.
template <typename In>
constexpr int64_t direct_bytes(int elements) {
  return std::clamp<int64_t>(elements * sizeof(In), 16, 32);
}

template <typename Config, typename In, typename Acc, typename Outputs>
Status launch_naive(const Problem& p, const Buffers& buffers, cudaStream_t stream) {
  auto args = make_gemm_args<In, Outputs>(p, buffers, Config::kMmaM, Config::kMmaN,
                                          direct_bytes<In>(p.a.transposed ? Config::kMmaM : Config::kMmaK),
                                          direct_bytes<In>(p.b.transposed ? Config::kMmaK : Config::kMmaN));
  // load_matrix_sync may compute offsets inside a tile in 32 bits.
  constexpr int64_t kMaxLd = (int64_t{1} << 31) / (32 * sizeof(In));
  args.a_aligned = args.a_aligned && p.a.ld < kMaxLd;
  args.b_aligned = args.b_aligned && p.b.ld < kMaxLd;
  return launch_blocks("wmma_naive", naive_kernel<Config, In, Acc, Outputs>, args.grid.num_tiles(), 32, 0, stream,
                       args);
}

template <typename Config, typename In, typename Acc, typename Outputs>
Status launch_tiled(const Problem& p, const Buffers& buffers, const Kernel* with_function, cudaStream_t stream) {
  using Shared = TiledShared<Config, In, Acc>;
  const auto launch = [&](const auto& kernel, const auto& args) {
    return launch_blocks("wmma_tiled", kernel, args.grid.num_tiles(), Shared::kThreads, Shared::kBytes, stream, args);
  };
  const auto make_args = [&](auto outputs) {
    return make_gemm_args<In, decltype(outputs)>(p, buffers, Config::kTileM, Config::kTileN, 16, 16);
  };
  if (with_function != nullptr) return launch(*with_function, make_args(epilogue::FunctionParams{}));
  return launch(tiled_kernel<Config, In, Acc, Outputs>, make_args(Outputs{}));
}

template <typename Config, typename In, typename Acc, typename Outputs>
Tiled make_tiled() {
  return {&function_source<Config, In, Acc>, &launch_tiled<Config, In, Acc, Outputs>};
}

// One instantiation for each layout.
template <typename Mma, typename Tile, typename In, typename Acc, typename Outputs>
Tiled make_tiled_layouts(const Problem& p) {
  return visit_layouts(
      p, [](auto ta, auto tb) { return make_tiled<TiledConfig<Mma, Tile, OneLayout<ta, tb>>, In, Acc, Outputs>(); });
}

}  // namespace tcgemm::wmma
