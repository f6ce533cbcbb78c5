// Host side of the simt kernels: layouts and epilogues from the problem to an instantiation.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda_status.h"
#include "core/implementation.h"
#include "epilogue/epilogue.cuh"
#include "kernels/simt/naive_kernel.cuh"
#include "kernels/simt/tiled_kernel.cuh"
#include "tile/gemm_args.h"

namespace tcgemm::simt {

// kMinBlocks is what the registers of kThreads threads leave room for on a multiprocessor.
struct Tile128x64x16 {
  static constexpr int kTileM = 128, kTileN = 64, kTileK = 16, kThreadM = 8, kThreadN = 8;
  static constexpr int kThreads = 128, kMinBlocks = 3;
};
struct Tile128x128x16 {
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 16, kThreadM = 8, kThreadN = 8;
  static constexpr int kThreads = 256, kMinBlocks = 1;
};
// 8- and 16-byte elements.
struct Tile64x64x8 {
  static constexpr int kTileM = 64, kTileN = 64, kTileK = 8, kThreadM = 8, kThreadN = 4;
  static constexpr int kThreads = 128, kMinBlocks = 3;
};
struct Tile64x64x8Wide {
  static constexpr int kTileM = 64, kTileN = 64, kTileK = 8, kThreadM = 4, kThreadN = 4;
  static constexpr int kThreads = 256, kMinBlocks = 1;
};

template <typename Tile, bool kATransposed_, bool kBTransposed_>
struct TiledConfig : Tile {
  static constexpr bool kATransposed = kATransposed_, kBTransposed = kBTransposed_;
};

template <typename Config, typename T, typename Outputs>
Status launch_tiled_layout(const Problem& p, const Buffers& buffers, void* stream) {
  const auto args = make_gemm_args<T, Outputs>(p, buffers, Config::kTileM, Config::kTileN, 16, 16);
  const auto blocks = static_cast<unsigned>(args.grid.num_tiles());
  tiled_kernel<Config, T, Outputs><<<blocks, Config::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return launch_status("simt_tiled");
}

template <typename Tile, typename T, typename Outputs>
Status launch_tiled(const Problem& p, const Buffers& buffers, void* stream) {
  const auto launch = p.a.transposed
                          ? (p.b.transposed ? &launch_tiled_layout<TiledConfig<Tile, true, true>, T, Outputs>
                                            : &launch_tiled_layout<TiledConfig<Tile, true, false>, T, Outputs>)
                          : (p.b.transposed ? &launch_tiled_layout<TiledConfig<Tile, false, true>, T, Outputs>
                                            : &launch_tiled_layout<TiledConfig<Tile, false, false>, T, Outputs>);
  return launch(p, buffers, stream);
}

template <typename In, typename Acc, typename Outputs>
Status launch_naive(const Problem& p, const Buffers& buffers, void* stream) {
  const auto args = make_gemm_args<In, Outputs>(p, buffers, NaiveConfig::kTileM, NaiveConfig::kTileN, 16, 16);
  const auto blocks = static_cast<unsigned>(args.grid.num_tiles());
  naive_kernel<In, Acc, Outputs><<<blocks, NaiveConfig::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return launch_status("simt_naive");
}

inline bool is_identity(const Problem& p) { return p.alpha == 1.0 && p.beta == 0.0; }

// One function a file of instantiations.
Status launch_naive_float(const Problem& p, const Buffers& buffers, void* stream);
Status launch_naive_other(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_f32_128x64(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_f32_128x128(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_f64(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_complex(const Problem& p, const Buffers& buffers, void* stream);

}  // namespace tcgemm::simt
