// The arguments of a launch of a grouped product, and what of it the launcher must know.
#pragma once

#include <cstdint>

#include "epilogue/activations.h"
#include "kernels/wgmma/geometry.h"
#include "kernels/wgmma/params.cuh"
#include "tile/segment_walk.cuh"

namespace tcgemm::wgmma_family {

// The epilogue of a kernel that can do all of them, and that may gather its tokens.
struct RaggedFused {
  static constexpr bool kFused = true;

  Activation activation;
  bool gated;
  FloatType bias_type;
  const void* bias;  // (groups, 1 or, gated, 2, columns of D); or null
  // Null, or for each token its row among `num_rows` rows of k at `rows`.
  const int32_t* gather;
  const void* rows;
  int32_t num_rows;

  // Columns of D in a tile of `tile_m` weights.
  __host__ __device__ int32_t tile_columns(int32_t tile_m) const { return gated ? tile_m / 2 : tile_m; }
};

// Boxes of tokens of form rows have 16, 32 ... 128 of them: a k block takes one box, the smallest that holds
// what a block loads.
inline constexpr int kBoxStep = 16, kNumBoxes = 8;

template <typename Epilogue>
struct RaggedParams {
  Params<Epilogue> gemm;  // rows: the swapped product, D's rows being n; contraction: D's batch is the group
  tile::TensorMap token_boxes[kNumBoxes];
  Groups groups;
};

// Behind the barriers: the ring through which a block's warps learn their tiles.
inline constexpr int kRingBytes = 192;
constexpr int ring_offset(const Geometry& geometry) { return (geometry.shared_bytes() + 31) / 32 * 32; }

}  // namespace tcgemm::wgmma_family
