// Host side of one instantiation of a grouped product. Included by the instances only.
#pragma once

#include <algorithm>

#include "epilogue/fused.h"
#include "kernels/wgmma/launch.cuh"
#include "kernels/wgmma/ragged_config.h"
#include "kernels/wgmma/ragged_kernel.cuh"
#include "kernels/wgmma/ragged_launch.h"

namespace tcgemm::wgmma_family {

// A matrix of `rows` rows, or `groups` of them one after another. One that is empty is never read, but
// must have an address: that of D.
struct RaggedOperand {
  const void* data;
  int64_t contiguous, rows, groups;
};

template <typename In>
Status encode_ragged_map(CUtensorMap* map, const RaggedCall& call, const RaggedOperand& x, int columns, int rows) {
  Call extents{};
  extents.batch = extents.batch_inner = std::max<int64_t>(x.groups, 1);
  extents.element_bytes = sizeof(In);
  const bool is_empty = x.contiguous == 0 || x.rows == 0 || x.groups == 0;
  const AlignedOperand operand{is_empty ? call.buffers.d : x.data, x.contiguous, 0, x.contiguous * x.rows};
  const int box[2] = {columns, rows};
  return encode_operand_map(map, map_type<In>(), extents, operand, {x.contiguous, x.rows}, box);
}

// The weights of a kernel with an epilogue: (column, k, which of a gated product's two matrices, group).
template <typename In>
Status encode_weights_map(CUtensorMap* map, const RaggedCall& call, int columns, int rows) {
  const RaggedProblem& p = *call.problem;
  const int64_t halves = p.epilogue.gated ? 2 : 1;
  Call extents{};
  extents.batch_inner = halves;
  extents.batch = halves * std::max<int64_t>(p.groups, 1);
  extents.element_bytes = sizeof(In);
  const bool is_empty = p.n == 0 || p.k == 0 || p.groups == 0;
  const AlignedOperand operand{is_empty ? call.buffers.d : call.buffers.b, halves * p.n, halves * p.n * p.k, p.n};
  const int box[2] = {columns, rows};
  return encode_operand_map(map, map_type<In>(), extents, operand, {p.n, p.k}, box);
}

template <typename Config, typename In, int kTransA, typename Epilogue>
Status launch_ragged(const RaggedCall& call) {
  using T = RaggedTraits<Config, In, kTransA, Epilogue>;
  const RaggedProblem& p = *call.problem;
  const RaggedBuffers& buffers = call.buffers;
  RaggedParams<Epilogue> params{};
  Params<Epilogue>& gemm = params.gemm;
  // Of form rows the kernel's product is the swapped one.
  gemm.m = static_cast<int32_t>(T::kIsRows ? p.n : p.m);
  gemm.n = static_cast<int32_t>(T::kIsRows ? p.m : p.n);
  gemm.k = static_cast<int32_t>(p.k);
  gemm.batch = gemm.batch_inner = gemm.num_splits = 1;
  gemm.out_type = p.out == DType::kF16 ? FloatType::kF16 : p.out == DType::kBF16 ? FloatType::kBF16 : FloatType::kF32;
  gemm.d = buffers.d;
  gemm.ldd = p.n;
  params.groups = {buffers.group_sizes, buffers.group_offset, static_cast<int32_t>(p.num_sizes),
                   static_cast<int32_t>(p.groups), static_cast<int32_t>(p.tokens())};

  Call out{};
  out.batch = T::kIsRows ? 1 : p.groups;
  out.num_splits = 1;
  out.m = gemm.m;
  out.n = gemm.n;
  out.out_type = gemm.out_type;
  out.d = buffers.d;
  const int64_t out_bytes = dtype_bytes(p.out);
  gemm.store_with_tma = is_aligned(buffers.d, 16) && gemm.ldd * out_bytes % 16 == 0;
  if (gemm.store_with_tma) {
    const auto box = [](auto shape) { return OutputBox{shape.kBoxColumns, shape.kBoxRows, shape.kRowBytes}; };
    const OutputBox d_box = out_bytes == 4 ? box(StoreShape<Config, 4>{}) : box(StoreShape<Config, 2>{});
    if (Status s = encode_output_map(&gemm.d_map, out, Config::kSwapped, d_box); !s.is_ok()) return s;
  }

  int64_t tile_columns = Config::kTileM;  // of D, where the weights are A
  if constexpr (T::kIsRows) {
    const RaggedOperand weights{buffers.b, kTransA ? p.n : p.k, kTransA ? p.k : p.n, p.groups};
    const RaggedOperand tokens{buffers.a, p.k, p.m, 1};
    const int box[2] = {kTransA ? T::kChunk : T::kTileK, kTransA ? T::kTileK : Config::kTileM};
    Status status = Status::ok();
    if constexpr (Epilogue::kFused) {
      RaggedFused& fused = gemm.epilogue;
      fused.activation = p.epilogue.activation;
      fused.gated = p.epilogue.gated;
      fused.bias_type = epilogue::float_type(p.epilogue.bias_dtype);
      fused.bias = p.epilogue.bias == Bias::kNone ? nullptr : buffers.bias;
      fused.gather = p.gathered ? buffers.gather : nullptr;
      fused.rows = buffers.a;
      fused.num_rows = static_cast<int32_t>(p.a_rows);
      tile_columns = fused.template tile_columns<Config>();
      status = encode_weights_map<In>(&gemm.a_map, call, box[0], box[1]);
    } else {
      status = encode_ragged_map<In>(&gemm.a_map, call, weights, box[0], box[1]);
    }
    if (!status.is_ok()) return status;
    // Gathered tokens are not loaded through maps, and may have no address where there are none.
    const int num_boxes = p.gathered ? 0 : T::kMaxWidth / Config::kClusterM / kBoxStep;
    for (int i = 0; i < num_boxes; ++i) {
      const int rows = (i + 1) * kBoxStep;
      if (Status s = encode_ragged_map<In>(&params.token_boxes[i], call, tokens, T::kTileK, rows); !s.is_ok()) return s;
    }
  } else {
    if (Status s = encode_ragged_map<In>(&gemm.a_map, call, {buffers.a, p.m, p.k, 1}, T::kChunk, T::kTileK);
        !s.is_ok()) {
      return s;
    }
    if (Status s = encode_ragged_map<In>(&gemm.b_map, call, {buffers.b, p.n, p.k, 1}, T::kChunk,
                                         T::kTileK / Config::kClusterM);
        !s.is_ok()) {
      return s;
    }
  }

  // At most so many tiles: how many there are is known on the device only.
  const int64_t num_tiles =
      T::kIsRows ? max_ragged_tiles(p, Config::kTileN * Config::kClusterN, tile_columns * Config::kClusterM)
                 : max_ragged_tiles(p, Config::kTileM * Config::kClusterM, Config::kTileN);
  return launch_clusters<ragged_kernel<Config, In, kTransA, Epilogue>, Config, T::kSharedBytes>(
      params, num_tiles, INT32_MAX, call.stream, "wgmma grouped kernel");
}

template <typename Config, typename In, int kTransA>
constexpr RaggedLaunchFunction ragged_function() {
  if constexpr (kTransA || Config::kSwapped) {
    return launch_ragged<Config, In, kTransA, Bare>;
  } else {
    return nullptr;
  }
}

// The configs in the order of TCGEMM_WGMMA_RAGGED_CONFIGS.
template <typename In, int kTransA>
std::vector<RaggedLaunchFunction> ragged_launch_table() {
  return {
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, swapped) \
  ragged_function<Config<tile_m, tile_n, cluster_m, cluster_n, 1, false, swapped>, In, kTransA>(),
      TCGEMM_WGMMA_RAGGED_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  };
}

// Those in the order of TCGEMM_WGMMA_RAGGED_FUSED_CONFIGS.
template <typename In>
std::vector<RaggedLaunchFunction> ragged_fused_launch_table() {
  return {
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, swapped) \
  launch_ragged<Config<tile_m, tile_n, cluster_m, cluster_n, 1, false, swapped>, In, 1, RaggedFused>,
      TCGEMM_WGMMA_RAGGED_FUSED_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  };
}

}  // namespace tcgemm::wgmma_family
