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

  // Number of rows that share a block scale in the stages: of the instruction's A, and of its B in tiles of `tile_n`
  // columns. A tile begins where the scale changes, or has one scale. Each half of a gated tile has its own scales.
  static int rows_of_a(const BlockScales& x) { return x.rows % 64 == 0 ? 64 : 1; }
  static int rows_of_b(const BlockScales& x, int tile_n, bool gated) {
    const int rows = gated && tile_n == 128 ? 64 : 128;
    return (tile_n % rows == 0 || rows % tile_n == 0) && x.rows % rows == 0 ? rows : 1;
  }
};

// Why no kernel multiplies operands with m and n rows by their block scales, or nothing.
std::string reject_scales(const ProductScales& scales, int64_t m, int64_t n, int64_t k, bool promotes);

// The same in the kernel's terms.
struct StridedScales;
StridedScales strided(const OperandScales& scales, int64_t k);

// One launch, in the kernel's terms: already swapped where the config is.
struct Call {
  Kernel* kernel;
  Geometry geometry;
  int64_t batch, batch_inner, m, n, k;
  AlignedOperand a, b;
  FloatType out_type;
  void* d;
  int32_t num_splits;                // > 1: d receives that many partial products, one batch set after another
  AlignedOperand b_up;               // of a gated product
  OperandScales a_scales, b_scales;  // without data where there are none
  bool symmetric;                    // the kernel is one of a symmetric D
  // Only where the kernel itself runs a function: that of this problem.
  const Problem* problem;
  const Buffers* buffers;
  cudaStream_t stream;
};

// How far an operand goes along M or N, along K, and over two batch levels.
struct OperandExtents {
  int64_t along, k, inner, outer;
};

Status encode_operand_map(CUtensorMap* map, const AlignedOperand& operand, const OperandShape& shape,
                          const OperandExtents& extents, Box box);

// Matrices that a kernel stores, one after another, in packed rows of which it stores the first `columns`.
struct OutputMatrices {
  const void* data;
  FloatType type;
  int64_t batch, rows, columns, row_length;

  int element_bytes() const { return type == FloatType::kF32 ? 4 : 2; }
  int64_t row_bytes() const { return row_length * element_bytes(); }
  bool is_stored_by_tma() const { return is_aligned(data, 16) && row_bytes() % 16 == 0; }
};

Status encode_output_map(CUtensorMap* map, const OutputMatrices& d, const StoreBox& box);

// Launches call.kernel, which is of call.geometry, and of kind Function where there is one.
Status launch_product(const Call& call);

}  // namespace tcgemm::wgmma_family
