// Kernel arguments.
#pragma once

#include <cstdint>

#include "tile/grid.cuh"
#include "tile/matrix.cuh"

namespace tcgemm::mma {

enum class OutputType : int { kF16, kBF16, kF32, kS32 };

struct Params {
  BatchedMatrix<char> a, b;          // ld and strides in bytes
  int a_granularity, b_granularity;  // 16, 8, 4 or the element's bytes: divides addresses, strides and extents
  void* d;
  OutputType out;
  bool stores_vectors;  // 16-byte stores of D are aligned and never straddle rows
  int64_t batch, m, n;
  int64_t k, k_per_split;
  TileGrid grid;
  // Block i computes tile i % num_tiles of split i / num_tiles, whose sums go to entries
  // split * batch + batch_idx of D.
};

}  // namespace tcgemm::mma
