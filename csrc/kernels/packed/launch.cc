// One launch of a product with a packed weight.
#include "kernels/packed/launch.h"

#include <algorithm>

#include "core/extent.h"
#include "kernels/common/float_type.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/packed/params.cuh"

namespace tcgemm::packed {

int64_t num_blocks(const PackedProblem& p, int columns, int rows, int cluster) {
  // Each expert that has tokens, and the rows after all, may end in rows that are not full.
  const int64_t row_blocks = p.is_grouped() ? p.m / rows + std::min(p.num_sizes + 1, p.m) : ceil_div(p.m, rows);
  return ceil_div(p.n, columns) * row_blocks * cluster;
}

Params params_of(const PackedProblem& p, const PackedBuffers& buffers, int columns, int rows, int stage_k) {
  Params params{};
  params.x = buffers.x;
  params.row_scales = buffers.row_scales;
  params.values = static_cast<const uint8_t*>(buffers.values);
  params.scales = static_cast<const uint8_t*>(buffers.scales);
  params.zero_points = static_cast<const uint8_t*>(buffers.zero_points);
  params.column_scales = buffers.column_scales;
  params.table = buffers.table;
  params.d = buffers.d;
  params.m = static_cast<int32_t>(p.m);
  params.n = static_cast<int32_t>(p.n);
  params.k = static_cast<int32_t>(p.k);
  params.tiles = static_cast<int32_t>(p.epilogue.gated ? p.tiles() / 2 : p.tiles());
  params.weight_tiles = static_cast<int32_t>(p.tiles());
  params.chunks = static_cast<int32_t>(p.chunks());
  params.groups = static_cast<int32_t>(p.groups());
  params.row_blocks = static_cast<int32_t>(ceil_div(p.m, rows));
  params.column_blocks = static_cast<int32_t>(ceil_div(p.n, columns));
  params.experts = {buffers.group_sizes, buffers.group_offset, static_cast<int32_t>(p.num_sizes),
                    static_cast<int32_t>(p.experts), static_cast<int32_t>(p.m)};
  params.num_stages = static_cast<int32_t>(ceil_div(p.k, stage_k));
  if (p.epilogue.is_none()) params.out = float_type(p.out);
  return params;
}

Status launch(const Call& call) {
  const PackedProblem& p = *call.problem;
  const Tile& tile = call.geometry.tile;
  const Params params = params_of(p, call.buffers, tile.columns, tile.rows(), tile.stage_k());
  const int shared_bytes = call.geometry.shared_bytes();
  const char* const name = "packed kernel";
  if (Status s = cuda_status(
          cudaFuncSetAttribute(call.kernel->function(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          name);
      !s.is_ok()) {
    return s;
  }
  cudaLaunchAttribute cluster = cluster_launch(tile.cluster);
  cudaLaunchConfig_t config =
      launch_config(num_blocks(p, tile.columns, tile.rows(), tile.cluster), tile.threads(), shared_bytes, call.stream);
  config.attrs = &cluster;
  config.numAttrs = tile.cluster > 1 ? 1 : 0;
  return with_epilogue(p, call.buffers, [&](const auto& epilogue) {
    return cuda_status(launch_kernel(config, *call.kernel, params, epilogue), name);
  });
}

Status launch_weight(const PackedProblem& p, const PackedBuffers& buffers, const Kernel& kernel, cudaStream_t stream) {
  const WeightParams params{static_cast<const uint8_t*>(buffers.values),
                            buffers.scales,
                            static_cast<const int16_t*>(buffers.zero_points),
                            buffers.column_scales,
                            buffers.table,
                            buffers.d,
                            p.tiles() * p.chunks(),
                            static_cast<int32_t>(p.k),
                            static_cast<int32_t>(p.chunks()),
                            static_cast<int32_t>(p.groups()),
                            static_cast<int32_t>(p.group_size),
                            static_cast<float>(p.zero)};
  return launch_blocks("kernel of packed weights", kernel, ceil_div(params.num_chunks, kWeightThreads / 32),
                       kWeightThreads, 0, stream, params);
}

}  // namespace tcgemm::packed
