// What vector accesses ask of addresses and strides.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace tcgemm {

inline bool is_aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether every row of `operand` starts on a multiple of `bytes`.
inline bool rows_aligned(const void* data, const Operand& operand, int64_t bytes) {
  const int64_t size = dtype_bytes(operand.dtype);
  return is_aligned(data, bytes) && operand.ld * size % bytes == 0 && operand.batch_outer_stride * size % bytes == 0 &&
         operand.batch_inner_stride * size % bytes == 0;
}

}  // namespace tcgemm
