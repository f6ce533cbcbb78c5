// What a launch tells a generated function (epilogue/function.cuh).
#pragma once

#include <cstdint>

#include "tile/divisor.cuh"

namespace tcgemm::epilogue {

// As core/problem.h has it, with addresses; made by kernels/common/function.h.
struct FunctionParams {
  static constexpr int kMostReads = 12, kMostResults = 6, kMostIndices = 8;
  // Of reads along both rows and columns, so many of 2 or 4 bytes may come by TMA: the first ones.
  static constexpr int kMostBoxed = 2;

  struct Read {
    const void* data;  // the first element
    int64_t batch_outer, batch_inner, m_outer, m_inner, n;
    Divisor period;
    int32_t period_rows;
  };
  struct Index {
    Divisor divisor, per_extent;
    int32_t level, extent;
  };

  int32_t m, n, batch_inner;
  Divisor per_batch_inner;
  // Whether eight elements of a row, from a column on that is a multiple of eight, lie side by side in all results and
  // in all matrices that are read, aligned together, or to 16 bytes, and two elements of all vectors along columns.
  bool in_eights;
  // Whether TMA can read these.
  bool in_boxes;
  Read reads[kMostReads];
  Index indices[kMostIndices];
  void* results[kMostResults];        // matrices, one after another
  int32_t row_lengths[kMostResults];  // of results that are not reduced: n, or 2n where two lie beside each other
};

// What a kernel is compiled with, for a function whose struct is `Code`; what a launch tells is the same for all.
template <typename CodeType>
struct Function : FunctionParams {
  using Code = CodeType;
};

}  // namespace tcgemm::epilogue
