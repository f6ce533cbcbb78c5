// A product over groups of consecutive rows whose sizes are known on the device only.
//
// The tokens are the rows of A: group_sizes[s] of them belong to group s, one group after another.
// Of all groups a call computes `groups`, beginning with the one that group_offset names; group g
// below is counted from there.
//
//   rows         D[b,i,n] = sum_k A[b,i,k] * op(B)[b,g,k,n] for the rows i of group g, and 0 for rows of no
//                group: A m x k, B groups x (k x n, transposed: n x k), D m x n; m counts the tokens
//   contraction  D[b,g,m,n] = sum over the rows i of group g of A[b,i,m] * B[b,i,n]:
//                A k x m, B k x n, or, tokens_last, A m x k, B n x k, D groups x m x n; k counts the tokens
//
// Both operands may have block scales (problem.h): in the form rows B for each group, or, gated, for each of its
// two matrices, in a contraction where the tokens are last, of blocks that begin at the first token.
//
// In the form rows the product of a group may have an epilogue (problem.h): a function, whose levels of the batch are
// the batch entry and the group, gated with B as groups x k x 2 x n, transposed: groups x 2 x n x k. Rows of no group
// are 0 in each of its results.
//
// A may be gathered: token i is row gather[i] of it, of a_rows, and zero where there is no such row.
//
// Everything is packed row-major. A size below 0 counts as 0, and groups end with the tokens.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/implementation.h"
#include "core/problem.h"

namespace tcgemm {

enum class RaggedForm : int32_t { kRows, kContraction };
template <>
inline constexpr std::array kNames<RaggedForm>{"rows", "contraction"};

struct RaggedProblem {
  RaggedForm form;
  int64_t batch;
  int64_t m, n, k;
  int64_t groups;     // of B or D
  int64_t num_sizes;  // length of group_sizes
  bool b_transposed;  // rows only
  bool tokens_last;   // contraction only
  // Whether an operand has an entry for each batch index; else all share one. group_offset and gather
  // go with group_sizes, the bias with B.
  bool a_batched, b_batched, sizes_batched;
  DType in, out;
  Compute compute;
  Epilogue epilogue = {};  // without up_offset, of whole results
  bool gathered = false;
  int64_t a_rows = 0;  // where A is gathered, else it has as many as there are tokens
  // Rows of A's are the tokens, or those of m, of B's those of n. The outer level of the batch is that of the product,
  // the inner one the groups or, of a gated product's B, the matrices: gate and up of one group after the other.
  ProductScales scales = {};

  bool is_rows() const { return form == RaggedForm::kRows; }
  int64_t tokens() const { return is_rows() ? m : k; }
  bool is_empty() const { return batch == 0 || m == 0 || n == 0 || (!is_rows() && groups == 0); }

  // Elements of one batch entry.
  int64_t a_columns() const { return is_rows() ? k : m; }
  int64_t num_b() const { return epilogue.gated ? 2 : 1; }
  int64_t b_columns() const { return num_b() * n; }
  // From a gated product's first matrix to the second one.
  int64_t up_offset() const { return b_transposed ? n * k : n; }
  int64_t a_elements() const { return (gathered ? a_rows : tokens()) * a_columns(); }
  int64_t b_elements() const { return (is_rows() ? groups : 1) * k * b_columns(); }
  int64_t d_elements() const { return (is_rows() ? 1 : groups) * m * n; }
};

// See problem.h.
template <typename Visit>
void visit_fields(RaggedProblem& p, Visit&& visit) {
  visit("form", p.form);
  visit("compute", p.compute);
  visit("batch", p.batch);
  visit("m", p.m);
  visit("n", p.n);
  visit("k", p.k);
  visit("groups", p.groups);
  visit("num_sizes", p.num_sizes);
  visit("b_transposed", p.b_transposed);
  visit("tokens_last", p.tokens_last);
  visit("a_batched", p.a_batched);
  visit("b_batched", p.b_batched);
  visit("sizes_batched", p.sizes_batched);
  visit("gated", p.epilogue.gated);
  visit("gathered", p.gathered);
  visit("a_rows", p.a_rows);
  visit("scales", p.scales.numbers);
  visit_fields(p.epilogue.function, visit);
}

template <typename Visit>
void visit_dtypes(RaggedProblem& p, Visit&& visit) {
  visit("a", "in_dtype", p.in);
  visit("d", "out_dtype", p.out);
}

inline Features features_of(const RaggedProblem& p) {
  Features needed = features_of(p.epilogue);
  needed.add(Feature::kGathered, p.gathered);
  needed.add(Feature::kTokensLast, p.tokens_last);
  needed.add(Feature::kBlockScales, !p.scales.is_none());
  return needed;
}

// Addresses of one call. group_sizes and group_offset are device memory where D is.
struct RaggedBuffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const int32_t* group_sizes = nullptr;
  const int32_t* group_offset = nullptr;  // one number for each entry of group_sizes
  void* d = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  const void* a_scales = nullptr;
  const void* b_scales = nullptr;
  const int32_t* gather = nullptr;
  std::vector<Buffers::Array> function_operands, more_results;  // of all batch entries
};

// The arrays of a call:
//   a, b, group_sizes, group_offset [, a_scales, b_scales] [, gather] [, function operands]
//   -> d [, function results].
// Integers are int32.
const BufferTable<RaggedProblem, RaggedBuffers>& buffer_table(const RaggedProblem& problem);

using RaggedImplementation = ImplementationOf<RaggedProblem, RaggedBuffers>;
using RaggedImplementations = ImplementationsOf<RaggedProblem, RaggedBuffers>;

// Empty when extents are in range and their products fit 64 bits, else the first rule broken.
std::string check_problem(const RaggedProblem& problem);

// As that of problem.h.
std::string check_buffers(const RaggedProblem& problem, const RaggedBuffers& buffers);

// The most tiles there can be, whatever the sizes. A tile has tile_m rows, or fewer where a group ends.
int64_t max_ragged_tiles(const RaggedProblem& problem, int64_t tile_m, int64_t tile_n);

// Why so many tiles are too many for a grid; empty when they are not.
std::string reject_ragged_tiles(const RaggedProblem& problem, int64_t tile_m, int64_t tile_n);

// The product of one group of `rows` tokens, its operands packed: for the rules that hold for any product.
Problem group_problem(const RaggedProblem& problem, int64_t rows);

// The addresses of batch entry `batch_idx` alone.
RaggedBuffers batch_entry(const RaggedProblem& problem, const RaggedBuffers& buffers, int64_t batch_idx);

// Where the groups of one batch entry begin, and where the last one ends: groups + 1 rows. For
// sizes in host memory.
std::vector<int64_t> group_starts(const RaggedProblem& problem, const int32_t* group_sizes, int32_t group_offset);

}  // namespace tcgemm
