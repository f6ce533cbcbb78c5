// One launch: tensor maps, the walk over tiles, cluster launch.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/extent.h"
#include "kernels/common/cluster_launch.h"
#include "kernels/common/column_sums.h"
#include "kernels/common/function.h"
#include "kernels/common/tensor_map.h"
#include "kernels/wgmma/launch.h"
#include "kernels/wgmma/params.cuh"

namespace tcgemm::wgmma_family {
namespace {

PersistentGrid make_grid(const Call& call, int64_t tile_n, int64_t tiles_m, int64_t tiles_n, bool may_overlap) {
  const Shape& shape = call.geometry.shape;
  PersistentGrid grid = PersistentGrid::make(call.n > call.m, tiles_m, tiles_n, shape.tiles_along_longer(), call.batch,
                                             call.batch_inner, call.num_splits);
  const auto last = [&](int64_t extent, int64_t tile) {
    constexpr int64_t kAlignment = 8;  // of elements that TMA loads and stores at their best
    if (!may_overlap || extent < tile) return PersistentGrid::kLargest;
    return static_cast<int32_t>(ceil_div(extent - tile, kAlignment) * kAlignment);
  };
  grid.last_m = last(call.m, shape.tile_m);
  grid.last_n = last(call.n, tile_n);
  return grid;
}

Status encode_stored_maps(Fused* target, const Call& call) {
  const epilogue::Fused& fused = *call.epilogue;
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t halves) {
    return encode_fused_map(map, {data, call.out_type, call.batch, call.m, call.n}, halves);
  };
  Status s = encode(&target->d_map, fused.d, fused.has_two_d() ? 2 : 1);
  if (!s.is_ok() || fused.aux_out == nullptr) return s;
  return encode(&target->aux_map, fused.aux_out, fused.gated ? 2 : 1);
}

// Of the matrices that the function reads by TMA, if it can.
Status encode_boxes(FunctionArguments* target, const Call& call) {
  if (call.geometry.shape.swapped || !target->values.in_boxes) return Status::ok();
  const tcgemm::Function& function = call.problem->epilogue.function;
  int number = 0;
  for (const BoxedRead& boxed : boxed_reads(function, call.m)) {
    const tcgemm::Function::Read x = function.read(boxed.number);
    const TensorOperand matrix{target->values.reads[boxed.number].data,
                               call.n,
                               call.m,
                               call.batch_inner,
                               call.batch / call.batch_inner,
                               boxed.row_stride * x.bytes,
                               x.batch_inner * x.bytes,
                               x.batch_outer * x.bytes};
    const CUtensorMapDataType type = x.bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT32;
    Status s = tcgemm::encode_operand_map(&target->boxes[number++], type, matrix, {static_cast<int>(128 / x.bytes), 64},
                                          CU_TENSOR_MAP_SWIZZLE_128B);
    if (!s.is_ok()) return s;
  }
  return Status::ok();
}

template <typename Epilogue>
Status launch(const Call& call) {
  const Geometry& geometry = call.geometry;
  const Shape& shape = geometry.shape;
  Params<Epilogue> params{};
  params.m = static_cast<int32_t>(call.m);
  params.n = static_cast<int32_t>(call.n);
  params.k = static_cast<int32_t>(call.k);
  params.batch = static_cast<int32_t>(call.batch);
  params.batch_inner = static_cast<int32_t>(call.batch_inner);
  params.a_outer = call.a.outer_stride != 0;
  params.a_inner = call.a.inner_stride != 0;
  params.b_outer = call.b.outer_stride != 0;
  params.b_inner = call.b.inner_stride != 0;
  params.num_splits = call.num_splits;
  const int64_t k_blocks = ceil_div(ceil_div(call.k, geometry.tile_k()), int64_t{call.num_splits} * shape.cluster_k);
  params.k_blocks = static_cast<int32_t>(std::max<int64_t>(k_blocks, 1));
  params.a_factors = strided(call.a_factors, call.k);
  params.b_factors = strided(call.b_factors, call.k);
  params.first_k_block = call.k == 0;  // a map of K = 0 is one of a little more
  params.out_type = call.out_type;
  params.d = call.d;
  params.ldd = shape.swapped ? call.m : call.n;

  const auto encode = [&](CUtensorMap* map, const AlignedOperand& operand, const OperandShape& operand_shape,
                          int64_t along, Box box) {
    const OperandExtents extents{along, call.k, call.batch_inner, call.batch / call.batch_inner};
    return encode_operand_map(map, operand, operand_shape, extents, box);
  };
  if (Status s = encode(&params.a_map, call.a, geometry.a, call.m, geometry.a_box()); !s.is_ok()) return s;
  if (Status s = encode(&params.b_map, call.b, geometry.b, call.n, geometry.b_box()); !s.is_ok()) return s;

  bool is_gated = false;
  if constexpr (Epilogue::kFused) is_gated = call.epilogue->has_two_z();
  if constexpr (Epilogue::kIsFunction) is_gated = call.problem->has_two_b();
  const int64_t tile_n = is_gated ? shape.tile_n / 2 : shape.tile_n;
  if constexpr (Epilogue::kFused || Epilogue::kIsFunction) {
    if (is_gated) {
      Status s = encode(&params.epilogue.b_up_map, call.b_up, geometry.b, call.n, geometry.b_box());
      if (!s.is_ok()) return s;
    }
  }
  if constexpr (Epilogue::kFused) {
    const epilogue::Fused& fused = *call.epilogue;
    Fused& target = params.epilogue;
    target.values = fused;
    target.column_sums = call.column_sums;
    target.sum_blocks = static_cast<int32_t>((call.m + kSumRows - 1) / kSumRows);
    params.store_with_tma = fused.vectors;
    if (fused.vectors) {
      if (Status s = encode_stored_maps(&target, call); !s.is_ok()) return s;
    }
  } else {
    const OutputMatrices d{call.d, call.out_type, call.batch * call.num_splits, shape.swapped ? call.n : call.m,
                           params.ldd};
    const int columns = is_gated ? shape.tile_n / 2 : geometry.share_tile_n();  // of a warpgroup
    const StoreBox box = StoreBox::make(shape.swapped, columns, d.element_bytes());
    params.store_with_tma = d.is_stored_by_tma();
    if constexpr (Epilogue::kIsFunction) {
      params.epilogue.values = make_function(*call.problem, *call.buffers);
      if (Status s = encode_boxes(&params.epilogue, call); !s.is_ok()) return s;
    }
    if (params.store_with_tma) {
      if (Status s = encode_output_map(&params.d_map, d, box); !s.is_ok()) return s;
    }
  }

  params.stages = params.store_with_tma ? geometry.stages_for_tma() : geometry.stages();

  const int64_t tiles_m = ceil_div(call.m, shape.tile_m * shape.cluster_m);
  const int64_t tiles_n = ceil_div(call.n, tile_n * shape.cluster_n);
  const int64_t num_tiles = tiles_m * tiles_n * call.batch * call.num_splits;
  if (num_tiles > INT32_MAX) return Status::invalid("the output must be at most 2^31 - 1 tiles");
  // An epilogue must see each element once: it adds up columns, and may read what is stored in its place. Tiles of
  // operands with factors of blocks begin where those do. Of fewer
  // k blocks, and where threads store, storing twice takes longer than loads from outside. The cost
  // model knows the same bounds.
  constexpr int32_t kWorthOverlap = 5;
  const bool is_scaled = geometry.a.scaled_rows != 0;
  const bool may_overlap = !Epilogue::kFused && !is_scaled && params.store_with_tma && params.k_blocks >= kWorthOverlap;
  params.grid = make_grid(call, tile_n, tiles_m, tiles_n, may_overlap);

  // What a block loads and stores alone is then 3 % of its time; ping-pong needs two tiles to hide any of it.
  constexpr int64_t kEnoughWork = int64_t{128} * 128 * 256;
  const int64_t tile_work = int64_t{params.k_blocks} * shape.tile_m * shape.tile_n;
  const int64_t tiles_at_least = std::max<int64_t>(ceil_div(kEnoughWork, tile_work), shape.ping_pong ? 2 : 1);
  return launch_clusters(*call.kernel, shape.cluster_size(), shape.threads(), geometry.shared_bytes(), params,
                         num_tiles, tiles_at_least, call.stream, "wgmma kernel");
}

}  // namespace

StridedFactors strided(const OperandFactors& x, int64_t k) {
  if (x.data == nullptr) return {};
  const int64_t end = ceil_div(k, int64_t{kScaledDepth});
  const int64_t k_blocks = x.blocks.depth < k ? x.blocks.depth / kScaledDepth : std::max<int64_t>(end, 1);
  return {static_cast<const float*>(x.data),
          x.blocks.batch_outer_stride,
          x.blocks.batch_inner_stride,
          x.blocks.k_stride,
          Divisor(x.blocks.rows),
          Divisor(k_blocks),
          static_cast<int32_t>(x.blocks.row_stride),
          static_cast<int32_t>(x.rows),
          static_cast<int32_t>(end)};
}

Status launch_product(const Call& call) {
  if (call.problem != nullptr) return launch<FunctionArguments>(call);
  return call.epilogue == nullptr ? launch<Bare>(call) : launch<Fused>(call);
}

}  // namespace tcgemm::wgmma_family
