#include "core/rows_problem.h"

#include <array>

#include "core/extent.h"
#include "core/names.h"

namespace tcgemm {

namespace {

constexpr std::array<const char*, 2> kForms{"sums", "dots"};

}  // namespace

bool parse_rows_form(std::string_view name, RowsForm* out) { return parse_name(kForms, name, out); }

std::string check_problem(const RowsProblem& p) {
  if (std::string error = check_extents(
          {{"a_rows", p.a_rows}, {"b_rows", p.b_rows}, {"targets", p.targets}, {"pairs", p.pairs}, {"n", p.n}});
      !error.empty()) {
    return error;
  }
  if (p.weighted && !p.is_sums()) return "weighted must be false when form is dots, got true";
  if (p.in != DType::kF16 && p.in != DType::kBF16 && p.in != DType::kF32 && p.in != DType::kF64) {
    return std::string("a must be f16, bf16, f32 or f64, got ") + dtype_name(p.in);
  }
  return "";
}

}  // namespace tcgemm
