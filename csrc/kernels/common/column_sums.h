// Sums over the rows of D as stored, for bias gradients: a reduction of D, or of the partial sums of
// kSumRows rows each that a kernel has made while it stored D, [batch][sum_blocks][columns of D] of
// float32. No atomics: the order of the additions is fixed.
#pragma once

#include <cstdint>
#include <string>

#include "core/implementation.h"
#include "kernels/common/reduction.h"

namespace tcgemm {

inline constexpr int kSumRows = 64;

inline int64_t sum_blocks(const Problem& p) { return (p.m + kSumRows - 1) / kSumRows; }

inline bool has_column_sums(const Problem& p) { return p.epilogue.column_sums && !p.is_empty(); }

inline Reduction sum_of_rows(const Problem& p) { return {p.out, DType::kF32, "add", p.batch, p.m, p.d_columns()}; }
inline Reduction sum_of_partials(const Problem& p) {
  return {DType::kF32, DType::kF32, "add", p.batch, sum_blocks(p), p.d_columns()};
}

inline std::string reject_column_sums(const Problem& p) {
  return has_column_sums(p) ? reject_reduction(sum_of_rows(p)) : "";
}

}  // namespace tcgemm
