#include "core/split_problem.h"

namespace tcgemm {

const BufferTable<SplitProblem, SplitBuffers>& buffer_table(const SplitProblem&) {
  using P = const SplitProblem;
  const auto always = [](P&) -> int64_t { return 1; };
  static const BufferTable<SplitProblem, SplitBuffers> table{
      {"x", BufferRole::kOperand, always, [](P& p) { return p.elements(); }, [](P& p) { return p.in; },
       put<&SplitBuffers::x>},
      {"d", BufferRole::kResult, always, [](P& p) { return p.stored_elements(); }, [](P& p) { return p.out; },
       put<&SplitBuffers::d>},
  };
  return table;
}

std::string check_problem(const SplitProblem& p) {
  if (std::string error = check_extents({{"outer", p.outer},
                                         {"middle", p.middle},
                                         {"inner", p.inner},
                                         {"columns", p.columns},
                                         {"depth", p.depth},
                                         {"pitch", p.pitch}});
      !error.empty()) {
    return error;
  }
  if (p.in != (p.is_complex() ? DType::kC64 : DType::kF32)) {
    return std::string("x must be f32 in form real and c64 in others, got ") + name_of(p.in);
  }
  if (p.out != DType::kBF16 && p.out != DType::kF32) {
    return std::string("d must be bf16 or f32, got ") + name_of(p.out);
  }
  if (!p.has_component() && p.inner != 1) return "inner must be 1 in forms real and left";
  if (p.depth < p.filled()) return must("depth", "be at least the extent that it fills up", p.depth);
  if (p.pitch < p.columns) return must("pitch", "be at least columns", p.pitch);
  if (p.pitch * dtype_bytes(p.out) % SplitProblem::kAlignment != 0) {
    return must("pitch", "be a multiple of 16 bytes", p.pitch);
  }
  if (p.terms.empty() || p.terms.size() > SplitProblem::kMaxTerms || p.terms.back() != 0) {
    return "terms must be one to nine numbers, the last one 0";
  }
  for (const int64_t term : p.terms) {
    if (term < 0 || term > 2) return must("terms", "be 0, 1 or 2 each", term);
  }
  return "";
}

}  // namespace tcgemm
