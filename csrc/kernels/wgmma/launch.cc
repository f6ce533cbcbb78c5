// One launch: tensor maps, the walk over tiles, cluster launch.
#include "kernels/wgmma/launch.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/extent.h"
#include "kernels/common/cluster_launch.h"
#include "kernels/common/function.h"
#include "kernels/common/tensor_map.h"
#include "kernels/wgmma/params.cuh"
#include "tile/triangle.cuh"

namespace tcgemm::wgmma_family {
namespace {

// How many tiles of a cluster there are along D, and how many squares of a symmetric D, whose triangle makes a
// rectangle (tile/triangle.cuh).
struct Tiles {
  int64_t m, n, side;

  static Tiles make(const Call& call, int64_t tile_n) {
    const Shape& shape = call.geometry.shape;
    const int64_t rows = shape.tile_m * shape.cluster_m, columns = tile_n * shape.cluster_n;
    if (!call.symmetric) return {ceil_div(call.m, rows), ceil_div(call.n, columns), 0};
    const int64_t square = shape.symmetric_side(), side = ceil_div(call.m, square);
    const TriangleRectangle squares = TriangleRectangle::make(side);
    return {squares.rows * (square / rows), squares.columns * (square / columns), side};
  }
};

PersistentGrid make_grid(const Call& call, int64_t tile_n, int64_t tiles_m, int64_t tiles_n, bool may_overlap) {
  // Of elements that TMA loads and stores at their best, and of those that a function reduces to one.
  int64_t alignment = 8;
  if (call.problem != nullptr) alignment = std::max(alignment, call.problem->epilogue.function.most_neighbors());

  const Shape& shape = call.geometry.shape;
  PersistentGrid grid = PersistentGrid::make(call.n > call.m, tiles_m, tiles_n, shape.tiles_along_longer(), call.batch,
                                             call.batch_inner, call.num_splits);
  const auto last = [&](int64_t extent, int64_t tile) {
    if (!may_overlap || extent < tile) return PersistentGrid::kLargest;
    return static_cast<int32_t>(ceil_div(extent - tile, alignment) * alignment);
  };
  grid.last_m = last(call.m, shape.tile_m);
  grid.last_n = last(call.n, tile_n);
  return grid;
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
  params.a_scales = strided(call.a_scales, call.k);
  params.b_scales = strided(call.b_scales, call.k);
  params.first_k_block = call.k == 0;  // a map of K = 0 is one of a little more
  params.out_type = call.out_type;
  params.d = call.d;

  const auto encode = [&](CUtensorMap* map, const AlignedOperand& operand, const OperandShape& operand_shape,
                          int64_t along, Box box) {
    const OperandExtents extents{along, call.k, call.batch_inner, call.batch / call.batch_inner};
    return encode_operand_map(map, operand, operand_shape, extents, box);
  };
  if (Status s = encode(&params.a_map, call.a, geometry.a, call.m, geometry.a_box()); !s.is_ok()) return s;
  if (Status s = encode(&params.b_map, call.b, geometry.b, call.n, geometry.b_box()); !s.is_ok()) return s;

  const int64_t d_columns = shape.swapped ? call.m : call.n;
  params.ldd = d_columns;
  int64_t tile_n = shape.tile_n;
  int columns = geometry.share_tile_n();  // of a warpgroup
  bool may_overlap = true;
  if constexpr (Epilogue::kIsFunction) {
    params.ldd = call.problem->d_columns();
    if (call.problem->has_two_b()) {
      tile_n /= 2;
      columns = static_cast<int>(tile_n);
      Status s = encode(&params.epilogue.b_up_map, call.b_up, geometry.b, call.n, geometry.b_box());
      if (!s.is_ok()) return s;
    }
    params.epilogue.values = make_function(*call.problem, *call.buffers);
    if (Status s = encode_boxes(&params.epilogue, call); !s.is_ok()) return s;
    // What is stored in the place of an operand must not be read again.
    for (const Buffers::Array& x : call.buffers->function_operands) may_overlap &= x.data != call.d;
  }
  const OutputMatrices d{call.d,    call.out_type, call.batch * call.num_splits, shape.swapped ? call.n : call.m,
                         d_columns, params.ldd};
  const bool reduces_d = Epilogue::kIsFunction && call.problem->epilogue.function.result(0).is_reduced();
  params.store_with_tma = !reduces_d && d.is_stored_by_tma();
  if (params.store_with_tma) {
    const StoreBox box = StoreBox::make(shape.swapped, columns, d.element_bytes());
    if (Status s = encode_output_map(&params.d_map, d, box); !s.is_ok()) return s;
    if constexpr (Epilogue::kIsSymmetric) {
      const StoreBox mirrored = StoreBox::make(!shape.swapped, columns, d.element_bytes());
      if (Status s = encode_output_map(&params.epilogue.mirror_map, d, mirrored); !s.is_ok()) return s;
    }
  }

  params.stages = params.store_with_tma ? geometry.stages_for_tma() : geometry.stages();

  const Tiles tiles = Tiles::make(call, tile_n);
  if constexpr (Epilogue::kIsSymmetric) {
    params.epilogue.side = static_cast<int32_t>(tiles.side);
    // Tiles that overlap compute some elements from either side of the diagonal, which are the same bits only if both
    // operands are one array.
    may_overlap &= call.a.data == call.b.data;
  }
  const int64_t num_tiles = tiles.m * tiles.n * call.batch * call.num_splits;
  if (num_tiles > INT32_MAX) return Status::invalid("the output must be at most 2^31 - 1 tiles");
  // Tiles of operands with block scales begin where those do. Of fewer k blocks, and where threads store, storing
  // twice takes longer than loads from outside. The cost model knows the same bounds.
  constexpr int32_t kWorthOverlap = 5;
  const bool is_scaled = geometry.a.scaled_rows != 0;
  may_overlap &= !is_scaled && params.store_with_tma && params.k_blocks >= kWorthOverlap;
  params.grid = make_grid(call, tile_n, tiles.m, tiles.n, may_overlap);

  // What a block loads and stores alone is then 3 % of its time; ping-pong needs two tiles to hide any of it.
  constexpr int64_t kEnoughWork = int64_t{128} * 128 * 256;
  const int64_t tile_work = int64_t{params.k_blocks} * shape.tile_m * shape.tile_n;
  const int64_t tiles_at_least = std::max<int64_t>(ceil_div(kEnoughWork, tile_work), shape.ping_pong ? 2 : 1);
  return launch_clusters(*call.kernel, shape.cluster_size(), shape.threads(), geometry.shared_bytes(), params,
                         num_tiles, tiles_at_least, call.stream, "wgmma kernel");
}

}  // namespace

StridedScales strided(const OperandScales& x, int64_t k) {
  if (x.data == nullptr) return {};
  const int64_t end = ceil_div(k, int64_t{kScaledDepth});
  const int64_t k_blocks = x.blocks.depth < k ? x.blocks.depth / kScaledDepth : std::max<int64_t>(end, 1);
  return {static_cast<const float*>(x.data),
          static_cast<const float*>(x.up_data),
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
  if (call.symmetric) {
    return call.problem == nullptr ? launch<Symmetric<Bare>>(call) : launch<Symmetric<FunctionArguments>>(call);
  }
  return call.problem == nullptr ? launch<Bare>(call) : launch<FunctionArguments>(call);
}

}  // namespace tcgemm::wgmma_family
