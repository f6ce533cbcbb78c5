// The epilogue of the host implementation: from the sums of one block to what the problem stores.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace tcgemm::host {

// Part of one batch item's product. For a problem with an epilogue its sums are computed first, as
// a product of their own, and lie packed in the accumulator's type.
struct ProductBlock {
  int64_t batch_idx;
  int64_t m_begin, m_count;
  int64_t n_begin, n_count;
};

// `sums_up`: of a gated product's second matrix, else null.
void apply_epilogue(const Problem& problem, const Buffers& buffers, const ProductBlock& block, const void* sums,
                    const void* sums_up);

// Sums of columns [begin, end) of D's batch item, row after row.
void sum_columns(const Problem& problem, const Buffers& buffers, int64_t batch_idx, int64_t begin, int64_t end);

}  // namespace tcgemm::host
