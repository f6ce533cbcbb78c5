#include "core/rows_problem.h"

#include <utility>

namespace tcgemm {

const char* rows_form_name(RowsForm form) { return form == RowsForm::kSums ? "sums" : "dots"; }

bool parse_rows_form(std::string_view name, RowsForm* out) {
  for (RowsForm form : {RowsForm::kSums, RowsForm::kDots}) {
    if (name == rows_form_name(form)) {
      *out = form;
      return true;
    }
  }
  return false;
}

std::string check_problem(const RowsProblem& p) {
  constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;
  for (const auto& [name, extent] :
       {std::pair{"a_rows", p.a_rows}, {"b_rows", p.b_rows}, {"targets", p.targets}, {"pairs", p.pairs}, {"n", p.n}}) {
    if (extent < 0 || extent > kMaxExtent) {
      return std::string(name) + " must be in [0, 2147483647], got " + std::to_string(extent);
    }
  }
  if (p.weighted && !p.is_sums()) return "weighted must be false when form is dots, got true";
  if (p.in != DType::kF16 && p.in != DType::kBF16 && p.in != DType::kF32 && p.in != DType::kF64) {
    return std::string("a must be f16, bf16, f32 or f64, got ") + dtype_name(p.in);
  }
  return "";
}

}  // namespace tcgemm
