#include "core/rows_problem.h"

#include "core/extent.h"

namespace tcgemm {

const BufferTable<RowsProblem, RowsBuffers>& buffer_table(const RowsProblem&) {
  using P = const RowsProblem;
  const auto always = [](P&) -> int64_t { return 1; };
  const auto is_sums = [](P& p) -> int64_t { return p.is_sums(); };
  const auto is_dots = [](P& p) -> int64_t { return !p.is_sums(); };
  const auto pairs = [](P& p) { return p.pairs; };
  const auto in = [](P& p) { return p.in; };
  const auto integer = [](P&) { return DType::kS32; };
  const auto accumulator = [](P& p) { return p.accumulator(); };
  static const BufferTable<RowsProblem, RowsBuffers> table{
      {"a", BufferRole::kOperand, always, [](P& p) { return p.a_rows * p.n; }, in, put<&RowsBuffers::a>},
      {"b", BufferRole::kOperand, is_dots, [](P& p) { return p.b_rows * p.n; }, in, put<&RowsBuffers::b>},
      {"indices", BufferRole::kOperand, always, pairs, integer, put<&RowsBuffers::indices>},
      {"b_indices", BufferRole::kOperand, is_dots, pairs, integer, put<&RowsBuffers::b_indices>},
      {"starts", BufferRole::kOperand, is_sums, [](P& p) { return p.targets + 1; }, integer, put<&RowsBuffers::starts>},
      {"weights", BufferRole::kOperand, [](P& p) -> int64_t { return p.weighted; }, pairs, accumulator,
       put<&RowsBuffers::weights>},
      {"d", BufferRole::kResult, always, [](P& p) { return p.d_elements(); },
       [](P& p) { return p.is_sums() ? p.in : p.accumulator(); }, put<&RowsBuffers::d>},
  };
  return table;
}

std::string check_problem(const RowsProblem& p) {
  if (std::string error = check_extents(
          {{"a_rows", p.a_rows}, {"b_rows", p.b_rows}, {"targets", p.targets}, {"pairs", p.pairs}, {"n", p.n}});
      !error.empty()) {
    return error;
  }
  if (p.weighted && !p.is_sums()) return "weighted must be false when form is dots, got true";
  if (p.in != DType::kF16 && p.in != DType::kBF16 && p.in != DType::kF32 && p.in != DType::kF64) {
    return std::string("a must be f16, bf16, f32 or f64, got ") + name_of(p.in);
  }
  return "";
}

}  // namespace tcgemm
