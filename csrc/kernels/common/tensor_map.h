// Tensor maps for TMA. Encoded anew for each launch: they hold addresses, and XLA moves buffers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/implementation.h"

namespace tcgemm {

// cuTensorMapEncodeTiled with zeros outside the tensor and element strides of 1; `extents` and `box`
// have `rank` entries, `stride_bytes` one less.
Status encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* data,
                         const cuuint64_t* extents, const cuuint64_t* stride_bytes, const cuuint32_t* box,
                         CUtensorMapSwizzle swizzle);

// An operand as a tensor of rank 4: contiguous elements, rows and two batch levels. A stride of 0
// broadcasts: the level then has one entry.
struct TensorOperand {
  const void* data;
  int64_t contiguous, rows, inner, outer;
  int64_t row_bytes, inner_bytes, outer_bytes;
};

// `box` in contiguous elements and rows. An extent of 0 is encoded as 1: a kernel may then only ask for
// coordinates past it, which read as zero without touching memory.
Status encode_operand_map(CUtensorMap* map, CUtensorMapDataType type, const TensorOperand& operand, const int (&box)[2],
                          CUtensorMapSwizzle swizzle);

}  // namespace tcgemm
