// One launch: tensor maps, the grid, the epilogue's arguments.
#include "kernels/mma_sync/launch.h"

#include <algorithm>
#include <cstdint>

#include "core/extent.h"
#include "kernels/common/float_type.h"
#include "kernels/common/function.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/common/tensor_map.h"
#include "kernels/mma_sync/params.cuh"
#include "tile/triangle.cuh"

namespace tcgemm::mma {
namespace {

// What TMA copies in boxes. Without elements there may be no address, and nothing is copied.
Status encode_map(tile::TensorMap* map, const BatchedMatrix<char>& matrix, const OperandShape& shape, Box box,
                  int64_t contiguous, int64_t rows, int64_t batch) {
  if (contiguous == 0 || rows == 0) return Status::ok();
  const CUtensorMapDataType type = shape.element_bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : shape.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const TensorOperand operand{matrix.data,
                              contiguous,
                              rows,
                              matrix.batch_inner,
                              batch / matrix.batch_inner,
                              matrix.ld,
                              matrix.batch_inner_stride,
                              matrix.batch_outer_stride};
  return encode_operand_map(map, type, operand, {box.contiguous, box.rows}, CU_TENSOR_MAP_SWIZZLE_128B);
}

// How many squares a symmetric D is long.
int64_t num_squares(const Call& call) { return ceil_div(call.problem->m, call.geometry.tile.symmetric_side()); }

// The grid of tiles. A symmetric D has those of a triangle, which make a rectangle (tile/triangle.cuh).
TileGrid make_grid(const Call& call) {
  const Problem& p = *call.problem;
  const Tile& tile = call.geometry.tile;
  if (!is_symmetric(call.epilogue)) return TileGrid::make(p.batch, p.m, p.n, tile.m, tile.n);
  const TriangleRectangle squares = TriangleRectangle::make(num_squares(call));
  const int64_t square = tile.symmetric_side();
  return TileGrid::make(p.batch, squares.rows * square, squares.columns * square, tile.m, tile.n);
}

Status make_params(const Call& call, Params* params) {
  const Geometry& geometry = call.geometry;
  const Problem& p = *call.problem;
  const auto contiguous = [&](const OperandShape& shape, int64_t extent) { return shape.is_k_major() ? p.k : extent; };
  const auto rows = [&](const OperandShape& shape, int64_t extent) { return shape.is_k_major() ? extent : p.k; };
  const int64_t a_contiguous = contiguous(geometry.a, p.m), a_rows = rows(geometry.a, p.m);
  const int64_t b_contiguous = contiguous(geometry.b, p.n), b_rows = rows(geometry.b, p.n);
  params->a = in_bytes(p, p.a, call.buffers->a, a_rows, a_contiguous, &params->a_granularity);
  params->b = in_bytes(p, p.b, call.buffers->b, b_rows, b_contiguous, &params->b_granularity);
  params->batch = p.batch;
  params->m = p.m;
  params->n = p.n;
  params->k = p.k;
  const int64_t tiles_k = ceil_div(p.k, geometry.tile_k());
  params->k_per_split = std::max<int64_t>(ceil_div(tiles_k, call.num_splits), 1) * geometry.tile_k();
  params->grid = make_grid(call);
  params->num_works = static_cast<uint32_t>(params->grid.num_tiles() * call.num_splits);
  params->d = call.buffers->d;
  params->out = float_type(p.out);
  params->stores_vectors =
      (reinterpret_cast<uintptr_t>(params->d) | static_cast<uintptr_t>(p.n * dtype_bytes(p.out))) % 16 == 0;

  // The kernel decides likewise.
  const bool is_aligned = params->a_granularity == 16 && params->b_granularity == 16;
  if (!call.has_tma || !is_aligned || !geometry.is_tensor_layout()) return Status::ok();
  Status s = encode_map(&params->a_map, params->a, geometry.a, geometry.a_box(), a_contiguous, a_rows, p.batch);
  if (!s.is_ok()) return s;
  return encode_map(&params->b_map, params->b, geometry.b, geometry.b_box(), b_contiguous, b_rows, p.batch);
}

}  // namespace

BatchedMatrix<char> in_bytes(const Problem& problem, const Operand& operand, const void* data, int64_t rows,
                             int64_t contiguous, int* granularity) {
  const int64_t bytes = dtype_bytes(operand.dtype);
  const BatchedMatrix<char> matrix{static_cast<const char*>(data), operand.ld * bytes,
                                   operand.batch_outer_stride * bytes, operand.batch_inner_stride * bytes,
                                   problem.batch_inner};
  uint64_t bits = 16 | reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(contiguous * bytes);
  if (rows > 1) bits |= static_cast<uint64_t>(matrix.ld);
  if (problem.batch_outer() > 1) bits |= static_cast<uint64_t>(matrix.batch_outer_stride);
  if (problem.batch_inner > 1) bits |= static_cast<uint64_t>(matrix.batch_inner_stride);
  *granularity = static_cast<int>(bits & (~bits + 1));
  return matrix;
}

Status launch_product(const Call& call) {
  const Problem& p = *call.problem;
  Params params{};
  if (Status s = make_params(call, &params); !s.is_ok()) return s;
  const auto launch = [&](const auto& epilogue) {
    return launch_blocks("mma_sync", *call.kernel, params.num_works, call.geometry.tile.threads(),
                         call.geometry.shared_bytes(), call.stream, params, epilogue);
  };
  const Scaled scaled{static_cast<int32_t>(p.alpha), static_cast<int32_t>(p.beta),
                      static_cast<const int32_t*>(call.buffers->c), p.m, p.n};
  const auto side = static_cast<int32_t>(num_squares(call));
  switch (call.epilogue) {
    case EpilogueKind::kBare: return launch(Bare{});
    case EpilogueKind::kScaled: return launch(scaled);
    case EpilogueKind::kSymmetricBare: return launch(Symmetric<Bare>{{}, side});
    case EpilogueKind::kSymmetricScaled: return launch(Symmetric<Scaled>{scaled, side});
    case EpilogueKind::kFunction: return launch(make_function(p, *call.buffers));
  }
  return Status::internal("an epilogue of mma_sync must be one of EpilogueKind");
}

}  // namespace tcgemm::mma
