#include "core/problem.h"

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

std::string check_epilogue(const Problem& p) {
  const Epilogue& e = p.epilogue;
  if (e.up_offset < 0 || (e.up_offset != 0 && !p.has_two_b())) {
    return must("up_offset", p.has_two_b() ? "not be negative" : "be 0 unless gated and no derivative", e.up_offset);
  }
  if (e.bias_batch_stride < 0) return must("bias_batch_stride", "not be negative", e.bias_batch_stride);
  if (e.is_none()) return "";
  if (p.out != DType::kF16 && p.out != DType::kBF16 && p.out != DType::kF32 && p.out != DType::kF64) {
    return std::string("d of a product with an epilogue must be f16, bf16, f32 or f64, got ") + name_of(p.out);
  }
  if (e.bias != Bias::kNone && e.bias_dtype != p.out && e.bias_dtype != sum_dtype(p)) {
    return std::string("bias must have the dtype of d or ") + name_of(sum_dtype(p)) + ", got " + name_of(e.bias_dtype);
  }
  if (e.gated && e.bias == Bias::kM) return "bias of a gated product must be n, got m";
  if (e.derivative && e.aux_out) return "aux_out must be false in a derivative, got true";
  return "";
}

// Elements an operand or a result must hold so that no index of `p` falls outside it; the largest int64 where that
// does not fit one. B: with up_offset both matrices of a gated product, else each of them.
int64_t d_elements(const Problem& p) { return multiply_add(multiply_add(p.batch, p.m, 0), p.d_columns(), 0); }

int64_t aux_elements(const Problem& p) { return multiply_add(multiply_add(p.batch, p.m, 0), p.aux_columns(), 0); }

int64_t bias_elements(const Problem& p) {
  if (p.batch == 0 || p.epilogue.bias == Bias::kNone) return 0;
  return multiply_add(p.batch - 1, p.epilogue.bias_batch_stride, p.epilogue.bias == Bias::kN ? p.bias_columns() : p.m);
}

int64_t column_sums_elements(const Problem& p) { return multiply_add(p.batch, p.d_columns(), 0); }

int64_t a_elements(const Problem& p) { return has_elements(p, shape_of_a(p)) ? span(p, p.a, shape_of_a(p)) : 0; }

int64_t b_elements(const Problem& p) {
  if (!has_elements(p, shape_of_b(p))) return 0;
  return multiply_add(1, p.epilogue.up_offset, span(p, p.b, shape_of_b(p)));
}

}  // namespace

std::string check_problem(const Problem& p) {
  if (std::string error = check_extents({{"m", p.m}, {"n", p.n}, {"k", p.k}, {"batch", p.batch}}); !error.empty()) {
    return error;
  }
  if (p.batch > 0 && (p.batch_inner <= 0 || p.batch % p.batch_inner != 0)) {
    return must("batch_inner", "divide batch=" + std::to_string(p.batch), p.batch_inner);
  }
  if (std::string error = check_epilogue(p); !error.empty()) return error;
  if (std::string error = check_operand("a", p, p.a, shape_of_a(p), 0); !error.empty()) return error;
  return check_operand("b", p, p.b, shape_of_b(p), p.epilogue.up_offset);
}

Features features_of(const Epilogue& e) {
  Features needed;
  needed.add(Feature::kActivation, e.activation != Activation::kNone);
  needed.add(Feature::kDerivative, e.derivative);
  needed.add(Feature::kGated, e.gated);
  needed.add(Feature::kBiasN, e.bias == Bias::kN);
  needed.add(Feature::kBiasM, e.bias == Bias::kM);
  needed.add(Feature::kAuxOut, e.aux_out);
  needed.add(Feature::kColumnSums, e.column_sums);
  return needed;
}

Features features_of(const Problem& p) {
  Features needed = features_of(p.epilogue);
  needed.add(Feature::kAlpha, p.alpha != 1.0);
  needed.add(Feature::kBeta, p.beta != 0.0);
  return needed;
}

const BufferTable<Problem, Buffers>& buffer_table(const Problem&) {
  using P = const Problem;
  const auto always = [](P&) -> int64_t { return 1; };
  const auto out = [](P& p) { return p.out; };
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
      {"c", BufferRole::kOptional, [](P& p) -> int64_t { return p.beta != 0.0; }, d_elements, out,
       [](P& p, Buffers& buffers, void* x, int64_t) { buffers.c = p.beta != 0.0 ? x : nullptr; }},
      {"bias", BufferRole::kOperand, [](P& p) -> int64_t { return p.epilogue.bias != Bias::kNone; }, bias_elements,
       [](P& p) { return p.epilogue.bias_dtype; }, put<&Buffers::bias>},
      {"aux_in", BufferRole::kReplaced, [](P& p) -> int64_t { return p.epilogue.derivative; }, aux_elements, out,
       put<&Buffers::aux_in>},
      {"d", BufferRole::kResult, always, d_elements, out, put<&Buffers::d>},
      {"aux_out", BufferRole::kResult, [](P& p) -> int64_t { return p.epilogue.aux_out; }, aux_elements, out,
       put<&Buffers::aux_out>},
      {"column_sums", BufferRole::kResult, [](P& p) -> int64_t { return p.epilogue.column_sums; }, column_sums_elements,
       sum_dtype, put<&Buffers::column_sums>},
  };
  return table;
}

}  // namespace tcgemm
