// What passes between the implementation (wgmma.cc) and the instances (instance_*.cu).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/implementation.h"
#include "epilogue/fused.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::wgmma_family {

// An operand that TMA can read: 16-byte aligned base and strides. Strides in elements.
struct AlignedOperand {
  const void* data;
  int64_t ld, outer_stride, inner_stride;
};

// One launch, in the kernel's terms: already swapped where the config is.
struct Call {
  int64_t batch, batch_inner, m, n, k;
  AlignedOperand a, b;
  int64_t element_bytes;  // of a and b
  FloatType out_type;
  void* d;
  int32_t num_splits;  // > 1: d receives that many partial products, one batch set after another
  // Only where the kernel itself runs an epilogue, which then says where D and all else is stored.
  const epilogue::Fused* epilogue;
  AlignedOperand b_up;  // of a gated product
  float* column_sums;   // partial sums of 64 rows of D each, or null
  cudaStream_t stream;
};

struct OperandExtent {
  int64_t contiguous, rows;
};
struct OutputBox {
  int columns, rows, row_bytes;
};

Status encode_operand_map(CUtensorMap* map, CUtensorMapDataType type, const Call& call, const AlignedOperand& operand,
                          OperandExtent extent, const int (&box)[2]);
Status encode_output_map(CUtensorMap* map, const Call& call, bool swapped, OutputBox box);
// A matrix [batch][m][halves][n] that the epilogue stores in boxes of 64 rows and 128 bytes.
Status encode_fused_map(CUtensorMap* map, const Call& call, const void* data, int64_t halves);

using LaunchFunction = Status (*)(const Call&);

// Launch functions in the order of TCGEMM_WGMMA_CONFIGS, one table for each element type and layout
// (a, b: 0 K-major, 1 M- or N-major), in several files, which compile side by side.
const std::vector<LaunchFunction>& bf16_table_00();
const std::vector<LaunchFunction>& bf16_table_01();
const std::vector<LaunchFunction>& bf16_table_10();
const std::vector<LaunchFunction>& bf16_table_11();
const std::vector<LaunchFunction>& f16_table_00();
const std::vector<LaunchFunction>& f16_table_01();
const std::vector<LaunchFunction>& f16_table_10();
const std::vector<LaunchFunction>& f16_table_11();
const std::vector<LaunchFunction>& tf32_table_00();
const std::vector<LaunchFunction>& tf32_table_10();

// Copies of operands that TMA cannot read, or whose layout the instruction cannot.
struct CopyJob {
  const void* source;
  void* target;
  int64_t rows, columns;  // of the target, columns contiguous
  int64_t source_ld, source_outer_stride, source_inner_stride;
  int64_t target_ld;     // multiple of 16 bytes; what lies past `columns` is undefined
  int64_t outer, inner;  // batch extents, packed in the target
  bool transpose;        // source holds columns x rows
};
// One launch for both operands; a job without rows does nothing.
Status launch_copies(const CopyJob (&jobs)[2], int64_t element_bytes, cudaStream_t stream);

}  // namespace tcgemm::wgmma_family
