// One launch of a product of many rows with a packed weight, and of the copy of these before it.
#include "kernels/packed/wide_launch.h"

#include "core/extent.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/common/tensor_map.h"
#include "kernels/packed/launch.h"
#include "kernels/packed/wide_params.cuh"

namespace tcgemm::packed {
namespace {

// Bytes (tile, item, item_bytes) of all of the weight's tiles as words; a box has all words of `items` of so many
// tiles.
Status encode_weight_map(CUtensorMap* map, const PackedProblem& p, const void* data, int64_t items, int64_t item_bytes,
                         int box_items, int box_tiles) {
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(item_bytes / 4), static_cast<cuuint64_t>(items),
                                static_cast<cuuint64_t>(p.all_tiles()), 1};
  const cuuint64_t tile_bytes = static_cast<cuuint64_t>(items * item_bytes);
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(item_bytes), tile_bytes, tile_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(item_bytes / 4), static_cast<cuuint32_t>(box_items),
                            static_cast<cuuint32_t>(box_tiles), 1};
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, data, extents, strides, box,
                           CU_TENSOR_MAP_SWIZZLE_NONE);
}

Status encode_maps(const WideCall& call, WideParams* params) {
  const PackedProblem& p = *call.problem;
  const WideGeometry& geometry = call.geometry;
  const WideTile& tile = geometry.tile;
  const TensorOperand x{call.buffers.workspace, ordered_k(p), p.m, 1, 1, ordered_bytes(p, 1), 0, 0};
  const bool is_float8 = geometry.x_size == 1;
  const CUtensorMapDataType type = is_float8             ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : p.in == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // Rows of 128 bytes; CTAs that share x each load half of the rows where a stage has one such row, else half of K.
  const int rows = tile.rows() / (tile.stage_k() * geometry.x_size == 128 ? tile.multicast_size : 1);
  if (Status s = encode_operand_map(&params->x, type, x, {128 / geometry.x_size, rows}, CU_TENSOR_MAP_SWIZZLE_128B);
      !s.is_ok()) {
    return s;
  }
  const int tiles = tile.tiles() / (p.epilogue.gated ? 2 : 1), groups = geometry.groups_per_stage();
  if (Status s = encode_weight_map(&params->values, p, call.buffers.values, p.chunks(), kChunkBytes,
                                   geometry.chunks_per_stage(), tiles);
      !s.is_ok() || groups == 0) {
    return s;
  }
  if (Status s = encode_weight_map(&params->scales, p, call.buffers.scales, p.groups(),
                                   kTile * geometry.format.scale_bytes, groups, tiles);
      !s.is_ok() || !p.zero_points) {
    return s;
  }
  return encode_weight_map(&params->zero_points, p, call.buffers.zero_points, p.groups(), kTile * 2, groups, tiles);
}

int64_t order_units(const PackedProblem& p) { return ordered_bytes(p, 1) / kUnitBytes; }
int64_t order_blocks_per_row(const PackedProblem& p) { return ceil_div(order_units(p), kOrderThreads); }

Status launch_order(const WideCall& call) {
  const PackedProblem& p = *call.problem;
  return launch_early("kernel of packed weights' rows", *call.order, num_order_blocks(p), kOrderThreads,
                      /*starts_early=*/true, call.stream, call.buffers.x, call.buffers.workspace,
                      static_cast<int32_t>(p.k), static_cast<int32_t>(order_units(p)),
                      static_cast<int32_t>(order_blocks_per_row(p)));
}

}  // namespace

int64_t num_order_blocks(const PackedProblem& p) { return p.m * order_blocks_per_row(p); }

Status launch_wide(const WideCall& call) {
  const PackedProblem& p = *call.problem;
  const WideTile& tile = call.geometry.tile;
  WideParams params{};
  params.params = params_of(p, call.buffers, tile.columns * tile.multicast_size, tile.rows(), tile.stage_k());
  if (Status s = encode_maps(call, &params); !s.is_ok()) return s;
  if (Status s = launch_order(call); !s.is_ok()) return s;

  const int shared_bytes = call.geometry.shared_bytes();
  const char* const name = "wide packed kernel";
  // All of it is for shared memory, as in launch_early: two blocks take nearly as much as there is.
  for (const cudaError_t error :
       {cudaFuncSetAttribute(call.kernel->function(), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        prefer_shared_memory(*call.kernel)}) {
    if (Status s = cuda_status(error, name); !s.is_ok()) return s;
  }
  cudaLaunchAttribute attributes[2] = {programmatic_launch(), cluster_launch(tile.blocks())};
  cudaLaunchConfig_t config =
      launch_config(num_blocks(p, tile.columns * tile.multicast_size, tile.rows(), tile.blocks()), tile.threads(),
                    shared_bytes, call.stream);
  config.attrs = attributes;
  config.numAttrs = tile.blocks() > 1 ? 2 : 1;
  return with_epilogue(p, call.buffers, [&](const auto& epilogue) {
    return cuda_status(launch_kernel(config, *call.kernel, params, epilogue), name);
  });
}

}  // namespace tcgemm::packed
