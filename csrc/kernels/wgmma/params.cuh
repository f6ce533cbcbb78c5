// The arguments of a launch.
#pragma once

#include <cstdint>

#include "epilogue/function_params.h"
#include "tile/divisor.cuh"
#include "tile/numeric.cuh"
#include "tile/persistent_grid.cuh"
#include "tile/tensor_map.cuh"

namespace tcgemm::wgmma_family {

// No epilogue: the kernel stores the product as it is.
struct Bare {
  static constexpr bool kIsFunction = false;
  static constexpr bool kIsGated = false;
  static constexpr bool kIsSymmetric = false;
};

// Or a function, which the kernel is compiled with. `Code` is its struct; what a launch tells is the same for all. If
// it is of a gated product, a tile has columns of two matrices B, those of the second, at `b_up_map`, in its right
// half.
struct FunctionArguments {
  static constexpr bool kIsFunction = true;
  static constexpr bool kIsSymmetric = false;

  epilogue::FunctionParams values;
  tile::TensorMap b_up_map;
  tile::TensorMap boxes[epilogue::FunctionParams::kMostBoxed];  // where values.in_boxes says so
};
template <typename CodeType>
struct Function : FunctionArguments {
  using Code = CodeType;
  static constexpr bool kIsGated = Code::kIsGated;
};

// An epilogue of a D that is its own transpose. Only tiles on and below the diagonal are computed, and those below are
// stored a second time, transposed, by `mirror_map`. `side`: how many squares (Shape::symmetric_side) D is long.
template <typename Base>
struct Symmetric : Base {
  static constexpr bool kIsSymmetric = true;

  tile::TensorMap mirror_map;
  int32_t side;
};

// Block scales of an operand: the scale of row r and k block i is at rows.divide(r) * row_stride +
// k_blocks.divide(i) * k_stride in a matrix of the batch. `end`: the number of k blocks. `up_data`: the scales of up in
// a gated product.
struct StridedScales {
  const float *data, *up_data;
  int64_t outer_stride, inner_stride, k_stride;
  Divisor rows, k_blocks;
  int32_t row_stride, num_rows, end;
};

template <typename Epilogue>
struct Params {
  tile::TensorMap a_map, b_map, d_map;
  int32_t m, n, k;
  int32_t batch, batch_inner;
  PersistentGrid grid;
  // 0 where an operand is broadcast along that level, else 1.
  int32_t a_outer, a_inner, b_outer, b_inner;
  int32_t num_splits;  // splits of K written as separate batches of D
  // Each block multiplies this many k blocks of a tile, at least one; the split number 0 of K begins at the k block
  // `first_k_block`. Past the end of K they load zeros.
  int32_t k_blocks, first_k_block;
  StridedScales a_scales, b_scales;  // of operands that are scaled
  FloatType out_type;
  bool store_with_tma;
  int32_t stages;  // of the ring, where that is not Traits::kStages
  void* d;
  int64_t ldd;  // of D as stored, batches of rows_d * ldd
  Epilogue epilogue;
};

}  // namespace tcgemm::wgmma_family
