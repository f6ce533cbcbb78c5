// Copies of operands that TMA cannot read, or whose layout an instruction cannot.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/implementation.h"

namespace tcgemm {

struct CopyJob {
  const void* source;
  void* target;
  int64_t rows, columns;  // of the target, columns contiguous
  int64_t source_ld, source_outer_stride, source_inner_stride;
  int64_t target_ld;      // multiple of 16 bytes; what lies past `columns` is undefined
  int64_t outer, inner;   // batch extents, packed in the target
  bool transpose;         // source holds columns x rows
  int32_t element_bytes;  // 1, 2 or 4
};
// One launch for all operands whose elements are alike; a job without rows does nothing.
Status launch_copies(const CopyJob (&jobs)[2], cudaStream_t stream);

}  // namespace tcgemm
