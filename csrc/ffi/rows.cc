#include "ffi/rows.h"

namespace tcgemm {
namespace {

namespace ffi = xla::ffi;

ffi::Error run_rows_checked(const RowsImplementations& implementations, const Device& device, void* stream,
                            const RowsAttributes& attrs, ffi::RemainingArgs& operands, ffi::RemainingRets& results) {
  if (std::string error = check_abi(attrs.abi); !error.empty()) return invalid(error);
  RowsProblem p{RowsForm::kSums, attrs.a_rows, attrs.b_rows,   attrs.targets,
                attrs.pairs,     attrs.n,      attrs.weighted, DType::kF32};
  if (!parse_rows_form(attrs.form, &p.form))
    return invalid("form must be sums or dots, got " + std::string(attrs.form));
  const size_t num_operands = p.is_sums() ? 3 + attrs.weighted : 4;
  if (operands.size() != num_operands || results.size() != 1) {
    return invalid("rows: there must be " + std::to_string(num_operands) + " operands and one result, got " +
                   std::to_string(operands.size()) + " and " + std::to_string(results.size()));
  }
  // A form's operands by position; one that it lacks is another one that is not looked at.
  const bool is_sums = p.is_sums();
  auto a = operands.get<ffi::AnyBuffer>(0), b = operands.get<ffi::AnyBuffer>(is_sums ? 0 : 1);
  auto indices = operands.get<ffi::AnyBuffer>(is_sums ? 1 : 2);
  auto second = operands.get<ffi::AnyBuffer>(is_sums ? 2 : 3);
  auto weights = operands.get<ffi::AnyBuffer>(attrs.weighted ? 3 : 0);
  auto d = results.get<ffi::AnyBuffer>(0);
  if (a.has_error() || b.has_error() || indices.has_error() || second.has_error() || weights.has_error() ||
      d.has_error()) {
    return invalid("operands and results must be buffers");
  }
  if (std::string error = check_buffer("a", *a, 0, &p.in); !error.empty()) return invalid(error);
  if (std::string error = check_problem(p); !error.empty()) return invalid(error);
  DType b_dtype, indices_dtype, second_dtype, weights_dtype, d_dtype;
  const std::string second_name = is_sums ? "starts" : "b_indices";
  for (const std::string& error :
       {check_buffer("a", *a, p.a_rows * p.n, &p.in), check_buffer("b", *b, is_sums ? 0 : p.b_rows * p.n, &b_dtype),
        check_buffer("indices", *indices, p.pairs, &indices_dtype),
        check_buffer(second_name, *second, is_sums ? p.targets + 1 : p.pairs, &second_dtype),
        check_buffer("weights", *weights, p.weighted ? p.pairs : 0, &weights_dtype),
        check_result("d", **d, p.d_elements(), &d_dtype)}) {
    if (!error.empty()) return invalid(error);
  }
  struct Expected {
    std::string name;
    DType dtype, expected;
  };
  for (const auto& [name, dtype, expected] :
       {Expected{"b", b_dtype, p.in},
        {"indices", indices_dtype, DType::kS32},
        {second_name, second_dtype, DType::kS32},
        {"weights", p.weighted ? weights_dtype : p.accumulator(), p.accumulator()},
        {"d", d_dtype, is_sums ? p.in : p.accumulator()}}) {
    if (dtype != expected) return invalid(name + " must be " + dtype_name(expected) + ", got " + dtype_name(dtype));
  }
  if (std::string error = check_overlaps(operands, results, replaces_none); !error.empty()) return invalid(error);
  RowsBuffers buffers{};
  buffers.a = a->untyped_data();
  buffers.indices = static_cast<const int32_t*>(indices->untyped_data());
  const auto* integers = static_cast<const int32_t*>(second->untyped_data());
  if (is_sums) {
    buffers.starts = integers;
    if (p.weighted) buffers.weights = weights->untyped_data();
  } else {
    buffers.b = b->untyped_data();
    buffers.b_indices = integers;
  }
  buffers.d = (*d)->untyped_data();
  return launch_checked(implementations, p, buffers, device, attrs.implementation, attrs.config, stream);
}

}  // namespace

ffi::Error run_rows(const RowsImplementations& implementations, const Device& device, void* stream,
                    const RowsAttributes& attributes, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return without_exceptions(
      [&] { return run_rows_checked(implementations, device, stream, attributes, operands, results); });
}

}  // namespace tcgemm
