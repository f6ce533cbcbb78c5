// What passes between the implementation (wgmma.cc) and the launcher (launch.cc).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "core/implementation.h"
#include "core/problem.h"
#include "kernels/common/alignment.h"
#include "kernels/common/kernel.h"
#include "kernels/wgmma/geometry.h"
#include "tile/numeric.cuh"

namespace tcgemm::wgmma_family {

// An operand that TMA can read: 16-byte aligned base and strides. Strides in elements.
struct AlignedOperand {
  const void* data;
  DType dtype;
  int64_t ld, outer_stride, inner_stride;
};

// Block scales of an operand, and its number of rows. `up_data`: the scales of up in a gated product.
struct OperandScales {
  const void* data;
  BlockScales blocks;
  int64_t rows;
  const void* up_data = nullptr;

  // How many consecutive rows one scale in shared memory covers, for the instruction's A and for its B in tiles of
  // `tile_n` columns. It is more than 1 only if blocks begin at its multiples, and a tile is a multiple or a divisor of
  // it. Gate and up of a gated tile have their own scales.
  static int rows_of_a(const BlockScales& x) { return x.rows % 64 == 0 ? 64 : 1; }
  static int rows_of_b(const BlockScales& x, int tile_n, bool gated) {
    const int rows = gated && tile_n == 128 ? 64 : 128;
    return (tile_n % rows == 0 || rows % tile_n == 0) && x.rows % rows == 0 ? rows : 1;
  }
};

// Returns why no kernel multiplies A, of m rows, and B, of n rows, by these block scales; empty if one does.
// `promotes`: whether accumulators are added to float32 registers after each k block.
std::string reject_scales(const ProductScales& scales, int64_t m, int64_t n, int64_t k, bool promotes);

// Block scales as the kernel's parameters.
struct StridedScales;
StridedScales strided(const OperandScales& scales, int64_t k);

// One launch, in the kernel's terms: if the config computes D^T = B^T A^T, a and b, and m and n, are exchanged here.
struct Call {
  Kernel* kernel;
  Geometry geometry;
  int64_t batch, batch_inner, m, n, k;
  AlignedOperand a, b;
  FloatType out_type;
  void* d;
  int32_t num_splits;                // > 1: d receives the partial products, (num_splits, batch, m, n)
  AlignedOperand b_up;               // of a gated product
  OperandScales a_scales, b_scales;  // without data where there are none
  bool symmetric;                    // the kernel is one of a symmetric D
  // If the kernel runs an epilogue function, the problem and the buffers that have it; else null.
  const Problem* problem;
  const Buffers* buffers;
  cudaStream_t stream;
};

// Extents of an operand: along M or N, along K, and of both batch levels.
struct OperandExtents {
  int64_t along, k, inner, outer;
};

Status encode_operand_map(CUtensorMap* map, const AlignedOperand& operand, const OperandShape& shape,
                          const OperandExtents& extents, Box box);

// A batch of row-major matrices, one after another, that a kernel stores: the first `columns` of each row of
// `row_length` elements.
struct OutputMatrices {
  const void* data;
  FloatType type;
  int64_t batch, rows, columns, row_length;

  int element_bytes() const { return type == FloatType::kF32 ? 4 : 2; }
  int64_t row_bytes() const { return row_length * element_bytes(); }
  bool is_stored_by_tma() const { return is_aligned(data, 16) && row_bytes() % 16 == 0; }
};

Status encode_output_map(CUtensorMap* map, const OutputMatrices& d, const StoreBox& box);

// Launches call.kernel, which is compiled for call.geometry, and with an epilogue function if call.problem is set.
Status launch_product(const Call& call);

}  // namespace tcgemm::wgmma_family
