// The product of rows and a weight of few bits, or that weight as an array.
//
//   product  D[m,n] = sum over k of X[m,k] * value(u[k,n]) * scale[k / group_size, n]
//
//   weight   D[n,k] = value(u[k,n]) * scale[k / group_size, n]
//
//   grouped  a product whose rows are tokens sorted by expert, each multiplied by the weight of its own: of `num_sizes`
//            experts, group_sizes[s] tokens each, the call has the weights of `experts`, from number group_offset on.
//            Rows of others are 0 in D, and in every result of a function. A size below 0 counts as 0, and experts end
//            with the rows.
//
// A value is u[k,n] - zero[k / group_size, n], table[u[k,n]], or that of a float whose bits are u (packed_code.h). The
// accumulators of x in float8_e4m3fn are multiplied by row_scales[m] before they are rounded. X and D are packed
// row-major. D and more results may be what a function makes of a product, or, of a gated one, of its first half of
// columns and its second; of experts its inner batch level is the expert, by its number in the call, and no result is
// reduced. The weight lies in tiles of 16 columns, which fill D's columns up:
//
//   values       (n / 16, chunks, 512) bytes, a chunk 64 rows of 4 bits or 32 rows of 8 bits
//   scales       (n / 16, groups, 16), columns g and g + 8 side by side
//   zero_points  (n / 16, groups, 16) int16, the same
//   column_scales  (n / 16, 16) float32, the same: a column's value * scale is multiplied by its own
//
// and those of experts one after the other. Inside of a chunk: jax_tcgemm/problem/operands/packed_weight.py and
// kernels/packed/fragments.cuh.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/implementation.h"
#include "core/packed_code.h"
#include "core/problem.h"

namespace tcgemm {

enum class PackedForm : int32_t { kProduct, kWeight, kGrouped };
template <>
inline constexpr std::array kNames<PackedForm>{"product", "weight", "grouped"};

template <>
inline constexpr std::array kNames<PackedCode>{"integer", "table", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"};

struct PackedProblem {
  static constexpr int64_t kTile = 16, kMultipleK = 64, kChunkBytes = 512;  // K is padded to a multiple of kMultipleK

  PackedForm form;
  int64_t m, n, k;  // n is a multiple of kTile; m is 0 of a weight
  int64_t group_size;
  int64_t bits;
  PackedCode code;
  int64_t zero;        // of all integers, where there are no zero points
  bool zero_points;    // whether every group and column has its own
  bool column_scales;  // whether every column has a scale beside those of its groups
  bool row_scales;     // whether each row of X has a scale
  DType scale;
  DType in;                // of X; of a weight that of D
  DType out;               // of D
  int64_t experts = 1;     // weights; several of form grouped only
  int64_t num_sizes = 0;   // length of group_sizes
  Epilogue epilogue = {};  // of products only; without up_offset

  bool is_product() const { return form != PackedForm::kWeight; }
  bool is_grouped() const { return form == PackedForm::kGrouped; }
  bool is_empty() const { return n == 0 || (is_product() && m == 0); }
  int64_t tiles() const { return n / kTile; }
  int64_t all_tiles() const { return experts * tiles(); }
  int64_t groups() const { return k / group_size; }
  int64_t chunks() const { return (k + kMultipleK - 1) / kMultipleK * (bits / 4); }
  int64_t d_columns() const { return epilogue.gated ? n / 2 : n; }
};

// See problem.h.
template <typename Visit>
void visit_fields(PackedProblem& p, Visit&& visit) {
  visit("form", p.form);
  visit("m", p.m);
  visit("n", p.n);
  visit("k", p.k);
  visit("group_size", p.group_size);
  visit("bits", p.bits);
  visit("code", p.code);
  visit("zero", p.zero);
  visit("zero_points", p.zero_points);
  visit("column_scales", p.column_scales);
  visit("row_scales", p.row_scales);
  visit("scale", p.scale);
  visit("experts", p.experts);
  visit("num_sizes", p.num_sizes);
  visit("gated", p.epilogue.gated);
  visit_fields(p.epilogue.function, visit);
}

template <typename Visit>
void visit_dtypes(PackedProblem& p, Visit&& visit) {
  visit(p.is_product() ? "x" : "d", "in_dtype", p.in);
  visit("d", "out_dtype", p.out);
}

inline Features features_of(const PackedProblem& p) { return features_of(p.epilogue); }

// Addresses of one call; of those that the problem does not have, null.
struct PackedBuffers {
  const void* x = nullptr;
  const float* row_scales = nullptr;
  const void* values = nullptr;
  const void* scales = nullptr;
  const void* zero_points = nullptr;
  const float* column_scales = nullptr;
  const float* table = nullptr;
  const int32_t* group_sizes = nullptr;
  const int32_t* group_offset = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  std::vector<Buffers::Array> function_operands, more_results;
};

// The arrays of a call: of products x [, row_scales], then values, scales [, zero_points] [, column_scales] [, table],
// then, grouped, group_sizes and group_offset [, function operands] -> d [, function results]. Those of the weight are
// bytes.
const BufferTable<PackedProblem, PackedBuffers>& buffer_table(const PackedProblem& problem);

using PackedImplementation = ImplementationOf<PackedProblem, PackedBuffers>;
using PackedImplementations = ImplementationsOf<PackedProblem, PackedBuffers>;

// Empty when extents are in range and dtypes known to some implementation, else the first rule broken.
std::string check_problem(const PackedProblem& problem);

// Whether the arrays hold all that a function reads, and its results exactly what it writes. As above.
std::string check_buffers(const PackedProblem& problem, const PackedBuffers& buffers);

}  // namespace tcgemm
