// Host side of the tensor kernels: transposition and reduction of arrays of any rank that fold to the
// forms below.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

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

// out[o, i] = reduce over r of in[o, r, i], packed row-major: in (outer, reduced, inner).
//
// `in` is f16, bf16, f32 or f64; sums of all but f64 are kept in f32. `out` has in's dtype or f32 (f64
// for f64), rounded once. The order of the additions depends on the shape and the number of SMs only.
struct Reduction {
  DType in, out;
  std::string_view op;  // "add", "max", "min"
  int64_t outer, reduced, inner;
};

std::string reject_reduction(const Reduction& r);
// Partial results of a reduction that one pass of the grid cannot keep the device busy with.
int64_t reduction_workspace_bytes(const Reduction& r, int num_sms);
Status launch_reduction(const Reduction& r, int num_sms, const void* in, void* out, void* workspace, void* stream);

}  // namespace tcgemm
