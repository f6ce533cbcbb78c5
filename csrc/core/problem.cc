#include "core/problem.h"

#include <algorithm>
#include <utility>

#include "core/extent.h"

namespace tcgemm {
namespace {

struct Shape {
  int64_t rows, columns;  // in memory
};

Shape shape_of_a(const Problem& p) { return p.a.transposed ? Shape{p.k, p.m} : Shape{p.m, p.k}; }
Shape shape_of_b(const Problem& p) { return p.b.transposed ? Shape{p.n, p.k} : Shape{p.k, p.n}; }

bool has_elements(const Problem& p, Shape shape) { return p.batch > 0 && shape.rows > 0 && shape.columns > 0; }

// From the first element to the end of the last.
int64_t span(const Problem& p, const Operand& x, Shape shape) {
  const auto steps = [](int64_t extent) { return extent > 0 ? extent - 1 : 0; };
  const int64_t matrix = multiply_add(steps(shape.rows), x.ld, shape.columns);
  return multiply_add(steps(p.batch_outer()), x.batch_outer_stride,
                      multiply_add(steps(p.batch_inner), x.batch_inner_stride, matrix));
}

// `offset`: from the operand to a second one.
std::string check_operand(const char* name, const Problem& p, const Operand& x, Shape shape, int64_t offset) {
  const std::string prefix = std::string(name) + ".";
  const int64_t columns = shape.columns;
  if (x.ld < columns) {
    return must(prefix + "ld", "be at least " + std::to_string(columns), x.ld);
  }
  if (x.batch_outer_stride < 0 || x.batch_inner_stride < 0) {
    return must(prefix + "batch stride", "not be negative",
                x.batch_outer_stride < 0 ? x.batch_outer_stride : x.batch_inner_stride);
  }
  // Strides that are taken are borne out by the buffer. Others are kept to what a TMA descriptor can hold.
  constexpr int64_t kMaxSpan = int64_t{1} << 36;
  if (const int64_t got = multiply_add(1, offset, span(p, x, shape)); !has_elements(p, shape) && got >= kMaxSpan) {
    return must(name, "span fewer than 2^36 elements where it has none", got);
  }
  for (const auto& [extent, stride] :
       {std::pair{shape.rows, x.ld}, {p.batch_outer(), x.batch_outer_stride}, {p.batch_inner, x.batch_inner_stride}}) {
    if (extent <= 1 && stride >= kMaxSpan)
      return must(prefix + "stride", "be less than 2^36 where none follows", stride);
  }
  return "";
}

std::string check_function(const Problem& p) {
  const Function& f = p.epilogue.function;
  if (f.is_none()) {
    const bool is_of_library = f.library != LibraryEpilogue::kNone;
    if (f.reads.empty() && f.indices.empty() && f.results.empty() && !is_of_library) return "";
    return "function must be named where it reads or gives something";
  }
  const auto is_identifier = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  if (!std::all_of(f.name.begin(), f.name.end(), is_identifier)) return "function must be a name, got " + f.name;
  const auto num_reads = static_cast<int64_t>(f.reads.size()), num_indices = static_cast<int64_t>(f.indices.size());
  const auto num_results = static_cast<int64_t>(f.results.size());
  if (num_reads % Function::kReadFields != 0 || f.num_reads() > Function::kMostReads) {
    return must("function_reads", "be at most 12 times nine numbers", num_reads);
  }
  if (num_indices % Function::kIndexFields != 0 || f.num_indices() > Function::kMostIndices) {
    return must("function_indices", "be at most 8 times three numbers", num_indices);
  }
  if (num_results % Function::kResultFields != 0 || f.num_results() < 1 || f.num_results() > Function::kMostResults) {
    return must("function_results", "be one to six times three numbers", num_results);
  }
  const auto is_size = [](int64_t bytes) { return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8; };
  for (int64_t i = 0; i < f.num_reads(); ++i) {
    const Function::Read x = f.read(i);
    if (x.operand < 0 || x.operand >= Function::kMostReads) return must("a read's operand", "be in [0, 12)", x.operand);
    if (!is_size(x.bytes)) return must("bytes of a read", "be 1, 2, 4 or 8", x.bytes);
    if (x.period < 1 || x.period > INT32_MAX) return must("a read's period", "be in [1, 2^31)", x.period);
  }
  for (int64_t i = 0; i < f.num_indices(); ++i) {
    const Function::Index x = f.index(i);
    if (x.level < 0 || x.level > 3) return must("an index's level", "be in [0, 4)", x.level);
    for (int64_t number : {x.divisor, x.extent}) {
      if (number < 1 || number > INT32_MAX) return must("numbers of an index", "be in [1, 2^31)", number);
    }
  }
  for (int64_t i = 0; i < f.num_results(); ++i) {
    const Function::Result x = f.result(i);
    const auto form = static_cast<int64_t>(x.form);
    if (!is_size(x.bytes)) return must("bytes of a function's result", "be 1, 2, 4 or 8", x.bytes);
    if (form < 0 || form > 3) return must("a function's result", "be whole, reduced, or beside another", form);
    const bool may_be_16 = x.form == Function::Form::kOverColumns && !p.epilogue.gated;
    if (x.neighbors != (x.is_reduced() ? 8 : 1) && !(may_be_16 && x.neighbors == 16)) {
      return must("neighbors that a function reduces", "be 8, or 16 columns of one product", x.neighbors);
    }
    if (!f.is_beside(i)) continue;
    if (i == 0 || f.result(i - 1).form != Function::Form::kWhole || x.bytes != f.result(i - 1).bytes) {
      return "a function's result must lie beside a whole one with elements of as many bytes";
    }
  }
  if (const int64_t bytes = f.result(0).bytes; bytes != dtype_bytes(p.out)) {
    return must("bytes of a function's first result", "be those of d", bytes);
  }
  if (p.alpha != 1.0 || p.beta != 0.0) return "a function must be all that follows the product";
  return "";
}

std::string check_epilogue(const Problem& p) {
  const Epilogue& e = p.epilogue;
  if (e.up_offset < 0 || (e.up_offset != 0 && !e.gated)) {
    return must("up_offset", e.gated ? "not be negative" : "be 0 unless gated", e.up_offset);
  }
  if (e.gated && e.function.is_none()) return "a gated product must have a function";
  return check_function(p);
}

// Elements an operand or a result must hold so that no index of `p` falls outside it; the largest int64 where that
// does not fit one. B: with up_offset both matrices of a gated product, else each of them.
int64_t d_elements(const Problem& p) { return multiply_add(multiply_add(p.batch, p.d_rows(), 0), p.d_columns(), 0); }

int64_t a_elements(const Problem& p) { return has_elements(p, shape_of_a(p)) ? span(p, p.a, shape_of_a(p)) : 0; }

int64_t b_elements(const Problem& p) {
  if (!has_elements(p, shape_of_b(p))) return 0;
  return multiply_add(1, p.epilogue.up_offset, span(p, p.b, shape_of_b(p)));
}

int64_t scale_elements(const Problem& p, const BlockScales& x, int64_t rows) {
  return p.is_empty() ? 0 : scale_elements(x, p.batch_outer(), p.batch_inner, rows, p.k);
}

// Of one matrix B.
int64_t b_scale_elements(const Problem& p) { return scale_elements(p, p.scales.b(), p.n); }

// Whether each element is read where D has the one that is made of it, or the one beside it.
bool is_read_as_d(const Problem& p, const Function::Read& x) {
  const int64_t row = p.d_columns(), matrix = p.m * row;
  const auto is = [](int64_t stride, int64_t expected, int64_t extent) { return stride == expected || extent <= 1; };
  return p.d_rows() == p.m && x.bytes == dtype_bytes(p.out) && (x.offset == 0 || (x.offset == p.n && row == 2 * p.n)) &&
         is(x.n, 1, p.n) && is(x.m_inner, row, std::min(p.m, x.period)) &&
         is(x.m_outer, x.period * row, ceil_div(p.m, x.period)) && is(x.batch_inner, matrix, p.batch_inner) &&
         is(x.batch_outer, p.batch_inner * matrix, p.batch_outer());
}

// From the first element that is read to the last, both included; the least int64 and the largest where one does not
// fit.
struct Range {
  __int128 first, last;
};

Range range_of(const FunctionExtents& p, const Function::Read& x) {
  Range range{x.offset, x.offset};
  const auto add = [&](int64_t stride, int64_t extent) {
    const __int128 way = static_cast<__int128>(stride) * std::max<int64_t>(extent - 1, 0);
    (way < 0 ? range.first : range.last) += way;
  };
  add(x.batch_outer, p.batch_outer);
  add(x.batch_inner, p.batch_inner);
  add(x.m_outer, ceil_div(p.m, x.period));
  add(x.m_inner, std::min(p.m, x.period));
  add(x.n, p.n);
  return range;
}

}  // namespace

int64_t Function::num_operands() const {
  int64_t num = 0;
  for (int64_t i = 0; i < num_reads(); ++i) num = std::max(num, read(i).operand + 1);
  return num;
}

int64_t Function::num_more_arrays() const {
  int64_t num = 0;
  for (int64_t i = 1; i < num_results(); ++i) num += !is_beside(i);
  return num;
}

int64_t Function::most_neighbors() const {
  int64_t most = 1;
  for (int64_t i = 0; i < num_results(); ++i) most = std::max(most, result(i).neighbors);
  return most;
}

int64_t Function::array_rows(int64_t i, int64_t m) const {
  return i < num_results() && result(i).form == Form::kOverRows ? ceil_div(m, result(i).neighbors) : m;
}

int64_t Function::array_columns(int64_t i, int64_t n) const {
  const bool is_reduced = i < num_results() && result(i).form == Form::kOverColumns;
  return is_reduced ? ceil_div(n, result(i).neighbors) : row_length(i, n);
}

std::string check_function_buffers(const Function& f, const FunctionExtents& extents, bool has_elements,
                                   int64_t num_matrices, const std::vector<Buffers::Array>& operands,
                                   const std::vector<Buffers::Array>& more_results) {
  for (int64_t i = 0; i < f.num_reads() && has_elements; ++i) {
    const Function::Read x = f.read(i);
    const Range range = range_of(extents, x);
    if (range.first < 0 || (range.last + 1) * x.bytes > operands[x.operand].bytes) {
      return "operand " + std::to_string(x.operand) + " of the function must hold all that is read of it";
    }
  }
  auto array = more_results.begin();
  for (int64_t i = 1; i < f.num_results(); ++i) {
    if (f.is_beside(i)) continue;
    const int64_t elements = multiply_add(f.array_rows(i, extents.m), f.array_columns(i, extents.n), 0);
    const int64_t bytes = multiply_add(f.result(i).bytes, multiply_add(num_matrices, elements, 0), 0);
    const int64_t got = array++->bytes;
    if (got != bytes) return must("a function's result", "have exactly " + std::to_string(bytes) + " bytes", got);
  }
  return "";
}

std::string check_buffers(const Problem& p, const Buffers& buffers) {
  const Function& f = p.epilogue.function;
  for (int64_t i = 0; i < f.num_reads() && !p.is_empty(); ++i) {
    const Function::Read x = f.read(i);
    if (buffers.function_operands[x.operand].data == buffers.d && !is_read_as_d(p, x)) {
      return "an operand in the place of d must be read where that is written";
    }
  }
  return check_function_buffers(f, {p.batch_outer(), p.batch_inner, p.m, p.n}, !p.is_empty(), p.batch,
                                buffers.function_operands, buffers.more_results);
}

std::string check_scales(const ProductScales& scales) {
  if (scales.is_none()) return "";
  if (scales.numbers.size() != 2 * ProductScales::kFields) {
    return must("scales", "be six numbers of a and six of b", static_cast<int64_t>(scales.numbers.size()));
  }
  for (const BlockScales& x : {scales.a(), scales.b()}) {
    for (int64_t block : {x.rows, x.depth}) {
      if (block < 1 || block > INT32_MAX) return must("a block's extents", "be in [1, 2^31)", block);
    }
    for (int64_t stride : {x.row_stride, x.k_stride, x.batch_outer_stride, x.batch_inner_stride}) {
      if (stride < 0) return must("strides of block scales", "not be negative", stride);
    }
  }
  return "";
}

int64_t scale_elements(const BlockScales& x, int64_t batch_outer, int64_t batch_inner, int64_t rows, int64_t k) {
  if (batch_outer == 0 || batch_inner == 0 || rows == 0 || k == 0) return 0;
  int64_t last = multiply_add(ceil_div(rows, x.rows) - 1, x.row_stride, 1);
  last = multiply_add(ceil_div(k, x.depth) - 1, x.k_stride, last);
  last = multiply_add(batch_outer - 1, x.batch_outer_stride, last);
  return multiply_add(batch_inner - 1, x.batch_inner_stride, last);
}

std::string check_problem(const Problem& p) {
  if (std::string error = check_extents({{"m", p.m}, {"n", p.n}, {"k", p.k}, {"batch", p.batch}}); !error.empty()) {
    return error;
  }
  if (p.batch > 0 && (p.batch_inner <= 0 || p.batch % p.batch_inner != 0)) {
    return must("batch_inner", "divide batch=" + std::to_string(p.batch), p.batch_inner);
  }
  if (p.symmetric && p.m != p.n) {
    return "symmetric must be false where m and n differ, got m=" + std::to_string(p.m) +
           " and n=" + std::to_string(p.n);
  }
  if (std::string error = check_epilogue(p); !error.empty()) return error;
  if (std::string error = check_scales(p.scales); !error.empty()) return error;
  if (std::string error = check_operand("a", p, p.a, shape_of_a(p), 0); !error.empty()) return error;
  return check_operand("b", p, p.b, shape_of_b(p), p.epilogue.up_offset);
}

Features features_of(const Epilogue& e) {
  Features needed;
  needed.add(Feature::kGated, e.gated);
  needed.add(Feature::kFunction, !e.function.is_none());
  return needed;
}

Features features_of(const Problem& p) {
  Features needed = features_of(p.epilogue);
  needed.add(Feature::kAlpha, p.alpha != 1.0);
  needed.add(Feature::kBeta, p.beta != 0.0);
  needed.add(Feature::kBlockScales, !p.scales.is_none());
  return needed;
}

const BufferTable<Problem, Buffers>& buffer_table(const Problem&) {
  using P = const Problem;
  const auto always = [](P&) -> int64_t { return 1; };
  const auto out = [](P& p) { return p.out; };
  const auto f32 = [](P&) { return DType::kF32; };
  const auto is_scaled = [](P& p) -> int64_t { return !p.scales.is_none(); };
  const auto b_dtype = [](P& p) { return p.b.dtype; };
  static const BufferTable<Problem, Buffers> table{
      {"a", BufferRole::kOperand, always, a_elements, [](P& p) { return p.a.dtype; }, put<&Buffers::a>},
      {"b", BufferRole::kOperand, always, b_elements, b_dtype,
       [](P& p, Buffers& buffers, void* x, int64_t) {
         buffers.b = x;
         // The second one may lie in the same array.
         if (p.epilogue.up_offset != 0 && x != nullptr) {
           buffers.b_up = static_cast<char*>(x) + p.epilogue.up_offset * dtype_bytes(p.b.dtype);
         }
       }},
      {"b_up", BufferRole::kOperand, [](P& p) -> int64_t { return p.has_two_b() && p.epilogue.up_offset == 0; },
       b_elements, b_dtype, put<&Buffers::b_up>},
      {"a_scales", BufferRole::kOperand, is_scaled, [](P& p) { return scale_elements(p, p.scales.a(), p.m); }, f32,
       put<&Buffers::a_scales>},
      {"b_scales", BufferRole::kOperand, is_scaled,
       [](P& p) { return multiply_add(p.has_two_b() ? 2 : 1, b_scale_elements(p), 0); }, f32,
       [](P& p, Buffers& buffers, void* x, int64_t) {
         buffers.b_scales = x;
         if (p.has_two_b() && x != nullptr) buffers.b_up_scales = static_cast<float*>(x) + b_scale_elements(p);
       }},
      {"c", BufferRole::kOptional, [](P& p) -> int64_t { return p.beta != 0.0; }, d_elements, out,
       [](P& p, Buffers& buffers, void* x, int64_t) { buffers.c = p.beta != 0.0 ? x : nullptr; }},
      {"function operand", BufferRole::kReplaced, [](P& p) { return p.epilogue.function.num_operands(); }, nullptr,
       nullptr, [](P&, Buffers& buffers, void* x, int64_t bytes) { buffers.function_operands.push_back({x, bytes}); }},
      {"d", BufferRole::kResult, always, d_elements, out, put<&Buffers::d>},
      {"function result", BufferRole::kResult, [](P& p) { return p.epilogue.function.num_more_arrays(); }, nullptr,
       nullptr, [](P&, Buffers& buffers, void* x, int64_t bytes) { buffers.more_results.push_back({x, bytes}); }},
  };
  return table;
}

}  // namespace tcgemm
