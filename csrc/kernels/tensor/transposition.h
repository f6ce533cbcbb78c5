// Host side of the kernel that transposes arrays of any rank which fold to the form below.
#pragma once

#include <cstdint>
#include <string>

#include "core/implementation.h"

namespace tcgemm {

// out[batch, c, r] = in[batch, r, c], for up to kMaxBatchModes batch modes and any order of the modes:
// element (b..., r, c) is at sum(b * in_stride) + r * in_row_stride + c of `in` and, of the same size,
// at sum(b * out_stride) + c * out_col_stride + r of `out`. Strides count elements.
struct Transposition {
  static constexpr int kMaxBatchModes = 4;
  struct Mode {
    int64_t extent, in_stride, out_stride;
  };

  int64_t element_bytes;  // 1, 2, 4, 8 or 16
  int64_t rows, cols;
  int64_t in_row_stride, out_col_stride;
  int num_batch;
  Mode batch[kMaxBatchModes];

  int64_t num_elements() const {
    int64_t count = rows * cols;
    for (int i = 0; i < num_batch; ++i) count *= batch[i].extent;
    return count;
  }
};

// The rule that stops the kernel; "" when none does. Also holds that no index of either array is at or
// over num_elements().
std::string reject_transposition(const Transposition& t);
Status launch_transposition(const Transposition& t, const void* in, void* out, void* stream);

}  // namespace tcgemm
