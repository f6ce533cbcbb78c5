// Host side of the WMMA kernels: instruction shapes, tiles, and one launch function for each.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda_status.h"
#include "core/implementation.h"
#include "epilogue/epilogue.cuh"
#include "kernels/common/epilogue_launch.h"
#include "kernels/wmma/naive_kernel.cuh"
#include "kernels/wmma/tiled_kernel.cuh"
#include "tile/gemm_args.h"

namespace tcgemm::wmma {

struct M16N16K16 {
  static constexpr int kMmaM = 16, kMmaN = 16, kMmaK = 16;
};
struct M32N8K16 {
  static constexpr int kMmaM = 32, kMmaN = 8, kMmaK = 16;
};
struct M8N32K16 {
  static constexpr int kMmaM = 8, kMmaN = 32, kMmaK = 16;
};
struct M16N16K8 {
  static constexpr int kMmaM = 16, kMmaN = 16, kMmaK = 8;
};
struct M8N8K4 {
  static constexpr int kMmaM = 8, kMmaN = 8, kMmaK = 4;
};

template <typename Mma, bool kSaturate_ = false>
struct NaiveConfig : Mma {
  static constexpr bool kSaturate = kSaturate_;
};

// kMinBlocks is what the registers and shared memory of a multiprocessor hold.
struct Tile128x128x32 {
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 32, kWarpM = 64, kWarpN = 64;
  static constexpr int kStages = 4, kMinBlocks = 2;
};
struct Tile64x64x32 {
  static constexpr int kTileM = 64, kTileN = 64, kTileK = 32, kWarpM = 32, kWarpN = 32;
  static constexpr int kStages = 4, kMinBlocks = 4;
};
struct Tile128x128x64 {  // 8-bit elements
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 64, kWarpM = 64, kWarpN = 64;
  static constexpr int kStages = 4, kMinBlocks = 2;
};
struct Tile128x128x16 {  // TF32
  static constexpr int kTileM = 128, kTileN = 128, kTileK = 16, kWarpM = 64, kWarpN = 64;
  static constexpr int kStages = 4, kMinBlocks = 2;
};
struct Tile64x128x16 {  // float64
  static constexpr int kTileM = 64, kTileN = 128, kTileK = 16, kWarpM = 32, kWarpN = 64;
  static constexpr int kStages = 3, kMinBlocks = 2;
};

// An instantiation for one layout, whose tiles lie in shared memory as the operands do in global
// memory; and one for all layouts, which keeps K contiguous.
template <bool kATransposed, bool kBTransposed>
struct OneLayout {
  static constexpr bool kAAlongK = !kATransposed, kBAlongK = kBTransposed, kAnyLayout = false;
};
struct AnyLayout {
  static constexpr bool kAAlongK = true, kBAlongK = true, kAnyLayout = true;
};

template <typename Mma, typename Tile, typename Layout, bool kSaturate_ = false>
struct TiledConfig : Mma, Tile, Layout {
  static constexpr bool kSaturate = kSaturate_;
};

// What a direct load_matrix_sync asks of rows that hold `elements` of a tile, see naive_kernel.cuh.
template <typename In>
constexpr int64_t direct_bytes(int elements) {
  return std::clamp<int64_t>(elements * sizeof(In), 16, 32);
}

template <typename Config, typename In, typename Acc, typename Outputs>
Status launch_naive(const Problem& p, const Buffers& buffers, void* stream) {
  auto args = make_gemm_args<In, Outputs>(p, buffers, Config::kMmaM, Config::kMmaN,
                                          direct_bytes<In>(p.a.transposed ? Config::kMmaM : Config::kMmaK),
                                          direct_bytes<In>(p.b.transposed ? Config::kMmaK : Config::kMmaN));
  // load_matrix_sync may compute offsets inside a tile in 32 bits.
  constexpr int64_t kMaxLd = (int64_t{1} << 31) / (32 * sizeof(In));
  args.a_aligned = args.a_aligned && p.a.ld < kMaxLd;
  args.b_aligned = args.b_aligned && p.b.ld < kMaxLd;
  const auto blocks = static_cast<unsigned>(args.grid.num_tiles());
  naive_kernel<Config, In, Acc, Outputs><<<blocks, 32, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return launch_status("wmma_naive");
}

template <typename Config, typename In, typename Acc, typename Outputs>
Status launch_tiled(const Problem& p, const Buffers& buffers, void* stream) {
  using Shared = TiledShared<Config, In, Acc>;
  const auto args = make_gemm_args<In, Outputs>(p, buffers, Config::kTileM, Config::kTileN, 16, 16);
  const auto kernel = &tiled_kernel<Config, In, Acc, Outputs>;
  const auto blocks = static_cast<unsigned>(args.grid.num_tiles());
  if (Status s = cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shared::kBytes),
                             "cudaFuncSetAttribute");
      !s.is_ok()) {
    return s;
  }
  kernel<<<blocks, Shared::kThreads, Shared::kBytes, static_cast<cudaStream_t>(stream)>>>(args);
  return launch_status("wmma_tiled");
}

// One instantiation for each layout.
template <typename Mma, typename Tile, typename In, typename Acc, typename Outputs>
Status launch_tiled_layouts(const Problem& p, const Buffers& buffers, void* stream) {
  const auto launch =
      p.a.transposed
          ? (p.b.transposed ? &launch_tiled<TiledConfig<Mma, Tile, OneLayout<true, true>>, In, Acc, Outputs>
                            : &launch_tiled<TiledConfig<Mma, Tile, OneLayout<true, false>>, In, Acc, Outputs>)
          : (p.b.transposed ? &launch_tiled<TiledConfig<Mma, Tile, OneLayout<false, true>>, In, Acc, Outputs>
                            : &launch_tiled<TiledConfig<Mma, Tile, OneLayout<false, false>>, In, Acc, Outputs>);
  return launch(p, buffers, stream);
}

// Float16, bfloat16 or float32: the bare product, and any epilogue.
using BareFloat = FloatOutputs<epilogue::Identity, float>;
using AnyFloat = FusedOutput;
template <typename Acc>
using Exact = Output<Acc, epilogue::AlphaBetaC<Acc, Acc>>;

// What a config's name says.
struct ConfigName {
  std::string_view shape, tile;
  bool saturates;
};

// One function a file of instantiations, for problems that reject() has let through.
Status launch_naive_16bit(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream);
Status launch_naive_other(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream);
Status launch_tiled_f16(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_bf16(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_f16_f16(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_small(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_shapes(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream);
Status launch_tiled_satf(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream);
Status launch_tiled_8bit(const Problem& p, const Buffers& buffers, const ConfigName& config, void* stream);
Status launch_tiled_tf32(const Problem& p, const Buffers& buffers, void* stream);
Status launch_tiled_f64(const Problem& p, const Buffers& buffers, void* stream);

}  // namespace tcgemm::wmma
