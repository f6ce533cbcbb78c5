// Host side of the kernel that transposes arrays of any rank which fold to the form below.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/implementation.h"
#include "kernels/tensor/transposition_params.cuh"

namespace tcgemm {

// out[batch, c, r] = in[batch, r, c], for up to kMaxBatchModes batch modes and any order of the modes:
// element (b..., r, c) is at sum(b * in_stride) + r * in_row_stride + c of `in` and, of the same size,
// at sum(b * out_stride) + c * out_col_stride + r of `out`. Strides count elements.
struct Transposition {
  static constexpr int kMaxBatchModes = transposition::kMaxBatchModes;
  using Mode = transposition::Mode;

  int64_t element_bytes;  // 1, 2, 4, 8 or 16
  int64_t rows, cols;
  int64_t in_row_stride, out_col_stride;
  int num_batch;  // -1: the lists of a call are not equally long
  Mode batch[kMaxBatchModes];

  int64_t num_elements() const {
    int64_t count = rows * cols;
    for (int i = 0; i < num_batch; ++i) count *= batch[i].extent;
    return count;
  }
};

// See core/problem.h; element_bytes is left out, which the array of a call tells.
template <typename Visit>
void visit_fields(Transposition& t, Visit&& visit) {
  visit("rows", t.rows);
  visit("cols", t.cols);
  visit("in_row_stride", t.in_row_stride);
  visit("out_col_stride", t.out_col_stride);
  std::vector<int64_t> extents, ins, outs;
  visit("batch_extents", extents);
  visit("batch_in_strides", ins);
  visit("batch_out_strides", outs);
  const size_t count = extents.size();
  const bool are_equally_long = ins.size() == count && outs.size() == count;
  t.num_batch = are_equally_long ? static_cast<int>(std::min<size_t>(count, Transposition::kMaxBatchModes + 1)) : -1;
  for (int i = 0; i < std::min(t.num_batch, Transposition::kMaxBatchModes); ++i) {
    t.batch[i] = {extents[i], ins[i], outs[i]};
  }
}

// The rule that stops the kernel; "" when none does. Also holds that no index of either array is at or
// over num_elements().
std::string reject_transposition(const Transposition& t);
// What a program has to bring for it.
KernelSource transposition_source(const Transposition& t, const Device& device);
Status launch_transposition(const Transposition& t, const Device& device, const void* in, void* out, void* stream);

}  // namespace tcgemm
