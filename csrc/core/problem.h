// The one description of a matrix product that every implementation takes.
//
//   D[b,m,n] = alpha * sum_k op(A)[b,m,k] * op(B)[b,k,n] + beta * C[b,m,n]
//
// where A and B may have block scales, by which their elements are multiplied. op(X) is X or its transpose,
// said by Operand::transposed and never by a copy. `Epilogue` says what else happens to an accumulator before it is
// stored. Host-only, free of CUDA and XLA, so that the CPU module and the queries share it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/buffers.h"
#include "core/dtype.h"
#include "core/features.h"
#include "core/names.h"

namespace tcgemm {

// Which epilogue of a library a function is, if any: of A B, or of A B + bias with `_bias`.
//
//   relu, gelu   D = f(Z), gelu by tanh          gelu_aux   D = gelu(Z), and Z beside it in an array of its own
//   dgelu        D = gelu'(operand 0) * A B
//
// The bias is operand 0, of D's type, with an element for each column.
enum class LibraryEpilogue : int32_t {
  kNone,
  kBias,
  kRelu,
  kReluBias,
  kGelu,
  kGeluBias,
  kGeluAux,
  kGeluAuxBias,
  kDGelu
};
template <>
inline constexpr std::array kNames<LibraryEpilogue>{"none",      "bias",     "relu",          "relu_bias", "gelu",
                                                    "gelu_bias", "gelu_aux", "gelu_aux_bias", "dgelu"};

// An input matrix for each batch index. Strides are in elements and never negative.
//   A, not transposed: element (m, k) at m * ld + k;  transposed: at k * ld + m.
//   B, not transposed: element (k, n) at k * ld + n;  transposed: at n * ld + k.
// Batch index b adds (b / batch_inner) * batch_outer_stride + (b % batch_inner) * batch_inner_stride;
// a stride of 0 broadcasts.
struct Operand {
  DType dtype;
  bool transposed;
  int64_t ld;
  int64_t batch_outer_stride;
  int64_t batch_inner_stride;
};

// Block scales of an operand, in float32: the scale of row r (m of A, n of B) and k is at
// r / rows * row_stride + k / depth * k_stride, after as many batch strides as of the operand.
struct BlockScales {
  int64_t rows, depth;
  int64_t row_stride, k_stride, batch_outer_stride, batch_inner_stride;
};

// Block scales of both operands of a product, or none.
struct ProductScales {
  static constexpr int64_t kFields = 6;

  std::vector<int64_t> numbers;  // kFields of A's, then of B's

  bool is_none() const { return numbers.empty(); }
  BlockScales a() const { return at(0); }
  BlockScales b() const { return at(kFields); }

 private:
  BlockScales at(int64_t first) const {
    const int64_t* x = &numbers[first];
    return {x[0], x[1], x[2], x[3], x[4], x[5]};
  }
};

// An elementwise function of the accumulators and of operands, as device code: a struct of this name in the namespace
// tcgemm::elementwise, which a program's kernels are compiled with. epilogue/function.cuh says how it is called. Places
// and strides are in elements. Of a matrix with rows of `n`, row m lies at m / period * m_outer + m % period * m_inner.
struct Function {
  struct Read {
    int64_t operand;  // its number among the function's operands
    int64_t bytes;    // of an element
    int64_t offset;   // of the first one
    int64_t batch_outer, batch_inner, m_outer, m_inner, period, n;
  };
  static constexpr int64_t kReadFields = 9;
  // The index along a dimension of the product that lies in a level: position / divisor % extent.
  struct Index {
    int64_t level;  // batch_outer, batch_inner, m, n
    int64_t divisor, extent;
  };
  static constexpr int64_t kIndexFields = 3;
  // A result, of which the first is D: an element for each of the product, or a reduction of these over so many
  // neighboring columns or rows, from a multiple of that on: (batch, m, n / neighbors) or (batch, m / neighbors, n),
  // rounded up. Or it has no array of its own but lies beside the result before it, each of whose rows of n is followed
  // by one of this: rows of 2n.
  enum class Form : int64_t { kWhole, kOverColumns, kOverRows, kBeside };
  struct Result {
    int64_t bytes;  // of an element
    Form form;
    int64_t neighbors;  // 8 or, of columns, 16; 1 where it is not reduced

    bool is_reduced() const { return form == Form::kOverColumns || form == Form::kOverRows; }
  };
  static constexpr int64_t kResultFields = 3;
  static constexpr int64_t kMostReads = 12, kMostResults = 6, kMostIndices = 8;

  std::string name;  // empty: none
  LibraryEpilogue library = LibraryEpilogue::kNone;
  std::vector<int64_t> reads;    // kReadFields of each
  std::vector<int64_t> indices;  // kIndexFields of each
  std::vector<int64_t> results;  // kResultFields of each

  bool is_none() const { return name.empty(); }
  int64_t num_reads() const { return static_cast<int64_t>(reads.size()) / kReadFields; }
  Read read(int64_t i) const {
    const int64_t* x = &reads[i * kReadFields];
    return {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8]};
  }
  int64_t num_indices() const { return static_cast<int64_t>(indices.size()) / kIndexFields; }
  Index index(int64_t i) const {
    const int64_t* x = &indices[i * kIndexFields];
    return {x[0], x[1], x[2]};
  }
  int64_t num_results() const { return static_cast<int64_t>(results.size()) / kResultFields; }
  Result result(int64_t i) const {
    const int64_t* x = &results[i * kResultFields];
    return {x[0], static_cast<Form>(x[1]), x[2]};
  }
  bool is_beside(int64_t i) const { return i < num_results() && result(i).form == Form::kBeside; }
  int64_t row_length(int64_t i, int64_t n) const { return is_beside(i) || is_beside(i + 1) ? 2 * n : n; }
  // Of the array of a result, in each of its matrices; without a function those of D.
  int64_t array_rows(int64_t i, int64_t m) const;
  int64_t array_columns(int64_t i, int64_t n) const;
  // Arrays of results after D.
  int64_t num_more_arrays() const;
  // That are one in any of the results.
  int64_t most_neighbors() const;
  // One more than the largest that is read.
  int64_t num_operands() const;
};

// What happens to a product before it is stored: D and more results are what `function` makes of it, and of the product
// by a second matrix B of the same layout where it is gated.
struct Epilogue {
  bool gated = false;     // with a function only
  int64_t up_offset = 0;  // elements from the first B to the second; 0: that is an operand of its own
  Function function;

  bool is_none() const { return !gated && function.is_none(); }
};

struct Problem {
  int64_t batch;        // product of both batch levels
  int64_t batch_inner;  // extent of the inner level; divides batch
  int64_t m, n, k;
  Operand a, b;
  DType out;        // D and C: packed row-major, ld = d_columns(), batch stride = d_rows() * d_columns()
  Compute compute;  // accumulator
  double alpha = 1.0;
  double beta = 0.0;  // 0: C is never read
  Epilogue epilogue;
  ProductScales scales;
  bool symmetric = false;  // every D[b] is its own transpose: tiles above the diagonal need not be computed

  bool has_two_b() const { return epilogue.gated; }
  int64_t d_rows() const { return epilogue.function.array_rows(0, m); }
  int64_t d_columns() const { return epilogue.function.array_columns(0, n); }
  int64_t batch_outer() const { return batch_inner > 0 ? batch / batch_inner : 0; }
  bool is_empty() const { return batch == 0 || m == 0 || n == 0; }
};

// Calls visit(name, field) for each field that the attributes of a call tell, by their names there.
template <typename Visit>
void visit_fields(Function& f, Visit&& visit) {
  visit("function", f.name);
  visit("function_library", f.library);
  visit("function_reads", f.reads);
  visit("function_indices", f.indices);
  visit("function_results", f.results);
}

template <typename Visit>
void visit_fields(Problem& p, Visit&& visit) {
  visit("compute", p.compute);
  visit("batch", p.batch);
  visit("batch_inner", p.batch_inner);
  visit("m", p.m);
  visit("n", p.n);
  visit("k", p.k);
  visit("a_transposed", p.a.transposed);
  visit("b_transposed", p.b.transposed);
  visit("a_ld", p.a.ld);
  visit("a_outer_stride", p.a.batch_outer_stride);
  visit("a_inner_stride", p.a.batch_inner_stride);
  visit("b_ld", p.b.ld);
  visit("b_outer_stride", p.b.batch_outer_stride);
  visit("b_inner_stride", p.b.batch_inner_stride);
  visit("alpha", p.alpha);
  visit("beta", p.beta);
  visit("scales", p.scales.numbers);
  visit("gated", p.epilogue.gated);
  visit("up_offset", p.epilogue.up_offset);
  visit("symmetric", p.symmetric);
  visit_fields(p.epilogue.function, visit);
}

// Calls visit(buffer, name, field) for each dtype: in a call the buffer tells it, in a query a field of this name.
template <typename Visit>
void visit_dtypes(Problem& p, Visit&& visit) {
  visit("a", "a_dtype", p.a.dtype);
  visit("b", "b_dtype", p.b.dtype);
  visit("d", "out_dtype", p.out);
}

Features features_of(const Epilogue& epilogue);
Features features_of(const Problem& problem);

// Addresses of one call. `c` is null when beta == 0; `workspace` holds at least the bytes the
// implementation asked for and is 128-byte aligned.
struct Buffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  // Block scales of a and b; null where they have none.
  const void* a_scales = nullptr;
  const void* b_scales = nullptr;
  const void* b_up = nullptr;  // of a gated product
  const void* b_up_scales = nullptr;
  // Of a function.
  struct Array {
    void* data;
    int64_t bytes;
  };
  std::vector<Array> function_operands, more_results;
};

// The arrays of a call:
//   a, b [, b_up] [, a_scales, b_scales] [, c] [, function operands] -> d [, function results].
//   b_up    of a gated product, unless up_offset finds it inside b
//   b_scales  of a gated product: the scales of gate, then those of up
//   c       where beta != 0; it may be given, but is not read, otherwise
const BufferTable<Problem, Buffers>& buffer_table(const Problem& problem);

// The rules every implementation may rely on: extents and strides are non-negative, leading
// dimensions cover their rows, batch_inner divides batch, and the epilogue makes sense for the
// dtypes. Empty when they hold, else a sentence naming the first one broken.
std::string check_problem(const Problem& problem);

// Whether the arrays hold all that a function reads, and its results exactly what it writes. As above.
std::string check_buffers(const Problem& problem, const Buffers& buffers);

// The same of a function in any kind of product: over how much of its levels it goes, whether that has an element,
// and of how many matrices each result is.
struct FunctionExtents {
  int64_t batch_outer, batch_inner, m, n;
};
std::string check_function_buffers(const Function& function, const FunctionExtents& extents, bool has_elements,
                                   int64_t num_matrices, const std::vector<Buffers::Array>& operands,
                                   const std::vector<Buffers::Array>& more_results);

// The rules of block scales, as check_problem() has them, and how many scales there must be at least for an operand
// with `rows` rows in each matrix.
std::string check_scales(const ProductScales& scales);
int64_t scale_elements(const BlockScales& scales, int64_t batch_outer, int64_t batch_inner, int64_t rows, int64_t k);

}  // namespace tcgemm
