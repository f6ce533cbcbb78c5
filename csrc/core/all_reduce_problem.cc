#include "core/all_reduce_problem.h"

#include "core/extent.h"

namespace tcgemm {

const BufferTable<AllReduceProblem, AllReduceBuffers>& buffer_table(const AllReduceProblem&) {
  using P = const AllReduceProblem;
  const auto always = [](P&) -> int64_t { return 1; };
  const auto elements = [](P& p) { return p.elements; };
  const auto in = [](P& p) { return p.in; };
  static const BufferTable<AllReduceProblem, AllReduceBuffers> table{
      {"a", BufferRole::kOperand, always, elements, in, put<&AllReduceBuffers::a>},
      {"d", BufferRole::kResult, always, elements, in, put<&AllReduceBuffers::d>},
  };
  return table;
}

std::string check_problem(const AllReduceProblem& p) {
  if (std::string error = check_extents({{"elements", p.elements}, {"devices", p.devices}}); !error.empty()) {
    return error;
  }
  if (p.in != DType::kF16 && p.in != DType::kBF16 && p.in != DType::kF32) {
    return std::string("a must be f16, bf16 or f32, got ") + name_of(p.in);
  }
  return "";
}

}  // namespace tcgemm
