// The arguments of a launch of a grouped product, and what of it the launcher must know.
#pragma once

#include <cstdint>

#include "kernels/wgmma/geometry.h"
#include "kernels/wgmma/params.cuh"
#include "tile/groups.cuh"

namespace tcgemm::wgmma_family {

// Tokens that are rows of a matrix in any order: each is row indices[i] of `num_rows` rows of k.
struct Gather {
  const int32_t* indices;
  const void* rows;
  int32_t num_rows;
};

// Boxes of tokens of form rows have 16, 32 ... 128 of them: a k block takes one box, the smallest that holds
// what a block loads.
inline constexpr int kBoxStep = 16, kNumBoxes = 8;

template <typename Epilogue>
struct RaggedParams {
  Params<Epilogue> gemm;  // rows: the swapped product, D's rows being n; contraction: D's batch is the group
  tile::TensorMap token_boxes[kNumBoxes];
  Groups groups;
  Gather gather;  // where blocks share the weights; without indices the tokens are loaded as they lie
  int32_t entry;  // of the batch, which D and everything else here is of, but what a function reads and stores
};

// Behind the barriers: the ring through which a block's warps learn their tiles.
inline constexpr int kRingBytes = 192;
constexpr int ring_offset(const Geometry& geometry) { return (geometry.shared_bytes() + 31) / 32 * 32; }

}  // namespace tcgemm::wgmma_family
