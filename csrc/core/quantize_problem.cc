#include "core/quantize_problem.h"

namespace tcgemm {

const BufferTable<QuantizeProblem, QuantizeBuffers>& buffer_table(const QuantizeProblem&) {
  using P = const QuantizeProblem;
  const auto always = [](P&) -> int64_t { return 1; };
  const auto f32 = [](P&) { return DType::kF32; };
  const auto elements = [](P& p) { return p.elements(); };
  const auto out = [](P& p) { return p.out; };
  static const BufferTable<QuantizeProblem, QuantizeBuffers> table{
      {"x", BufferRole::kOperand, always, elements, [](P& p) { return p.in; }, put<&QuantizeBuffers::x>},
      {"given", BufferRole::kOperand, [](P& p) -> int64_t { return p.is_scaled(); }, [](P& p) { return p.batch; }, f32,
       put<&QuantizeBuffers::given>},
      {"values", BufferRole::kResult, always, elements, out, put<&QuantizeBuffers::values>},
      {"scales", BufferRole::kResult, [](P& p) -> int64_t { return !p.is_scaled(); },
       [](P& p) { return p.scales(p.rows, p.columns); }, f32, put<&QuantizeBuffers::scales>},
      {"transposed_values", BufferRole::kResult, [](P& p) -> int64_t { return p.transposed; }, elements, out,
       put<&QuantizeBuffers::transposed_values>},
      {"transposed_scales", BufferRole::kResult, [](P& p) -> int64_t { return p.transposed && !p.is_scaled(); },
       [](P& p) { return p.scales(p.columns, p.rows); }, f32, put<&QuantizeBuffers::transposed_scales>},
  };
  return table;
}

std::string check_problem(const QuantizeProblem& p) {
  if (std::string error = check_extents({{"batch", p.batch}, {"rows", p.rows}, {"columns", p.columns}});
      !error.empty()) {
    return error;
  }
  if (p.form == QuantizeForm::kRows && p.transposed) return "transposed must be false when form is rows, got true";
  if (p.in != DType::kF16 && p.in != DType::kBF16 && p.in != DType::kF32) {
    return std::string("x must be f16, bf16 or f32, got ") + name_of(p.in);
  }
  if (p.out != DType::kF8E4M3FN && p.out != DType::kF8E5M2 && p.out != DType::kS8) {
    return std::string("values must be f8e4m3fn, f8e5m2 or s8, got ") + name_of(p.out);
  }
  return "";
}

}  // namespace tcgemm
