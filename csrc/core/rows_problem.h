// Weighted sums and dot products of gathered rows: the steps before and after the grouped products of a mixture of
// experts.
//
//   sums  D[t] = sum of weights[p] * A[indices[p]] over the pairs p from starts[t] to starts[t + 1] - 1
//         A a_rows x n, D targets x n, in the order of p; weights may be left out
//   dots  D[p] = sum over n of A[indices[p], n] * B[b_indices[p], n]
//         A a_rows x n, B b_rows x n, one number for each pair
//
// `starts` has targets + 1 offsets of pairs. Everything is packed row-major. A pair with an index out of range adds 0
// to its sum, and its dot is 0; starts are clamped to 0 and the number of pairs.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {

enum class RowsForm : int32_t { kSums, kDots };
template <>
inline constexpr std::array kNames<RowsForm>{"sums", "dots"};

struct RowsProblem {
  RowsForm form;
  int64_t a_rows, b_rows;  // b_rows: dots only
  int64_t targets;         // sums only
  int64_t pairs, n;
  bool weighted;  // sums only
  DType in;       // of A and B, and of a sum's D

  bool is_sums() const { return form == RowsForm::kSums; }
  bool is_empty() const { return is_sums() ? targets == 0 || n == 0 : pairs == 0; }
  // Dtype of accumulators, weights and dots.
  DType accumulator() const { return in == DType::kF64 ? DType::kF64 : DType::kF32; }

  int64_t d_elements() const { return is_sums() ? targets * n : pairs; }
};

// See problem.h.
template <typename Visit>
void visit_fields(RowsProblem& p, Visit&& visit) {
  visit("form", p.form);
  visit("a_rows", p.a_rows);
  visit("b_rows", p.b_rows);
  visit("targets", p.targets);
  visit("pairs", p.pairs);
  visit("n", p.n);
  visit("weighted", p.weighted);
}

template <typename Visit>
void visit_dtypes(RowsProblem& p, Visit&& visit) {
  visit("a", "in_dtype", p.in);
}

inline Features features_of(const RowsProblem& p) {
  Features needed;
  needed.add(Feature::kWeighted, p.weighted);
  return needed;
}

// Addresses of one call; of those that the form does not have, null.
struct RowsBuffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const int32_t* indices = nullptr;
  const int32_t* b_indices = nullptr;
  const int32_t* starts = nullptr;
  const void* weights = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

// The arrays of a call: sums have a, indices, starts [, weights], dots a, b, indices, b_indices -> d. Indices and
// starts are int32.
const BufferTable<RowsProblem, RowsBuffers>& buffer_table(const RowsProblem& problem);

using RowsImplementation = ImplementationOf<RowsProblem, RowsBuffers>;
using RowsImplementations = ImplementationsOf<RowsProblem, RowsBuffers>;

// Empty when extents are in range and dtypes known to some implementation, else the first rule broken.
std::string check_problem(const RowsProblem& problem);

}  // namespace tcgemm
