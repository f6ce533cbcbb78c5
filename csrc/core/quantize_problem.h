// The rounding of an array to 8 bits, with scales by the largest magnitudes of its rows or blocks, and of its
// transpose.
//
//   scale  = max(max(abs(X)) * (1 / largest number of the type), 2^-126) over what has one scale
//   values = round(X * (1 / scale))
//
//   rows    a scale for each row
//   lines   a scale for 1 x 128 elements of a row
//   blocks  a scale for 128 x 128 elements
//   scaled  scales are given, one for each entry of the batch
//
// X is packed row-major, batch x rows x columns, and so are values and scales; the last block of a dimension may be
// short. What is transposed is quantized for itself: lines and blocks are of its own rows, which are columns of X.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/extent.h"
#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {

enum class QuantizeForm : int32_t { kRows, kLines, kBlocks, kScaled };
template <>
inline constexpr std::array kNames<QuantizeForm>{"rows", "lines", "blocks", "scaled"};

struct QuantizeProblem {
  static constexpr int64_t kBlock = 128;

  QuantizeForm form;
  int64_t batch, rows, columns;
  bool transposed;  // whether the transpose is made, too; not of rows
  DType in;
  DType out;  // of values

  bool is_scaled() const { return form == QuantizeForm::kScaled; }
  bool is_empty() const { return batch == 0 || rows == 0 || columns == 0; }
  int64_t elements() const { return multiply_add(multiply_add(batch, rows, 0), columns, 0); }
  // Of a matrix of which X, or its transpose, has as many as its batch.
  int64_t scales(int64_t rows, int64_t columns) const {
    const int64_t down = form == QuantizeForm::kBlocks ? ceil_div(rows, kBlock) : rows;
    const int64_t across = form == QuantizeForm::kRows ? 1 : ceil_div(columns, kBlock);
    return multiply_add(multiply_add(batch, down, 0), across, 0);
  }
};

// See problem.h.
template <typename Visit>
void visit_fields(QuantizeProblem& p, Visit&& visit) {
  visit("form", p.form);
  visit("batch", p.batch);
  visit("rows", p.rows);
  visit("columns", p.columns);
  visit("transposed", p.transposed);
}

template <typename Visit>
void visit_dtypes(QuantizeProblem& p, Visit&& visit) {
  visit("x", "in_dtype", p.in);
  visit("values", "out_dtype", p.out);
}

inline Features features_of(const QuantizeProblem&) { return {}; }

// Addresses of one call; of those that the problem does not have, null.
struct QuantizeBuffers {
  const void* x = nullptr;
  const float* given = nullptr;
  void* values = nullptr;
  float* scales = nullptr;
  void* transposed_values = nullptr;
  float* transposed_scales = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// The arrays of a call: x [, given] -> values [, scales] [, transposed_values [, transposed_scales]].
const BufferTable<QuantizeProblem, QuantizeBuffers>& buffer_table(const QuantizeProblem& problem);

using QuantizeImplementation = ImplementationOf<QuantizeProblem, QuantizeBuffers>;
using QuantizeImplementations = ImplementationsOf<QuantizeProblem, QuantizeBuffers>;

// Empty when extents are in range and dtypes known to some implementation, else the first rule broken.
std::string check_problem(const QuantizeProblem& problem);

}  // namespace tcgemm
