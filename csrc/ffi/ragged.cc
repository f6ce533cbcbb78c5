#include "ffi/ragged.h"

namespace tcgemm {
namespace {

namespace ffi = xla::ffi;

// The problem but for its dtypes, which the buffers tell; or why there is none.
std::string decode(const RaggedAttributes& attrs, RaggedProblem* p) {
  if (!parse_ragged_form(attrs.form, &p->form)) {
    return "form must be rows or contraction, got " + std::string(attrs.form);
  }
  if (!parse_compute(attrs.compute, &p->compute)) {
    return "compute must be f16, f32, tf32, f64 or s32, got " + std::string(attrs.compute);
  }
  p->batch = attrs.batch;
  p->m = attrs.m;
  p->n = attrs.n;
  p->k = attrs.k;
  p->groups = attrs.groups;
  p->num_sizes = attrs.num_sizes;
  p->b_transposed = attrs.b_transposed;
  p->a_batched = attrs.a_batched;
  p->b_batched = attrs.b_batched;
  p->sizes_batched = attrs.sizes_batched;
  p->gathered = attrs.gathered;
  p->a_rows = attrs.a_rows;
  p->epilogue.gated = attrs.gated;
  p->epilogue.bias = attrs.biased ? Bias::kN : Bias::kNone;
  if (!parse_activation(attrs.activation, &p->epilogue.activation)) {
    return "activation is unknown: " + std::string(attrs.activation);
  }
  return "";
}

ffi::Error run_ragged_checked(const RaggedImplementations& implementations, const Device& device, void* stream,
                              const RaggedAttributes& attrs, ffi::RemainingArgs& operands,
                              ffi::RemainingRets& results) {
  if (std::string error = check_abi(attrs.abi); !error.empty()) return invalid(error);
  if (operands.size() != size_t{4} + attrs.biased + attrs.gathered) {
    return invalid("operands must be a, b, group_sizes, group_offset, bias and gather where there are any, got " +
                   std::to_string(operands.size()));
  }
  if (results.size() != 1 && results.size() != 2) {
    return invalid("results must be d and an optional workspace, got " + std::to_string(results.size()));
  }
  auto a = operands.get<ffi::AnyBuffer>(0), b = operands.get<ffi::AnyBuffer>(1);
  auto sizes = operands.get<ffi::AnyBuffer>(2), offset = operands.get<ffi::AnyBuffer>(3);
  auto d = results.get<ffi::AnyBuffer>(0);
  // Where there is none, another operand stands in for it and is not looked at.
  auto bias = operands.get<ffi::AnyBuffer>(attrs.biased ? 4 : 0);
  auto gather = operands.get<ffi::AnyBuffer>(attrs.gathered ? 4 + attrs.biased : 2);
  if (bias.has_error() || gather.has_error() || a.has_error() || b.has_error() || sizes.has_error() ||
      offset.has_error() || d.has_error()) {
    return invalid("operands and results must be buffers");
  }

  RaggedProblem p;
  if (std::string error = decode(attrs, &p); !error.empty()) return invalid(error);
  const auto entries = [&](bool batched) { return batched ? p.batch : 1; };
  DType b_dtype, sizes_dtype, offset_dtype, gather_dtype;
  // What buffers tell of the problem comes first: extents are of use once they are checked.
  if (std::string error = check_buffer("a", *a, 0, &p.in); !error.empty()) return invalid(error);
  if (std::string error = check_buffer("d", **d, 0, &p.out); !error.empty()) return invalid(error);
  if (std::string error = check_buffer("bias", *bias, 0, &p.epilogue.bias_dtype); !error.empty()) return invalid(error);
  if (std::string error = check_problem(p); !error.empty()) return invalid(error);
  for (const std::string& error :
       {check_buffer("a", *a, entries(p.a_batched) * p.a_elements(), &p.in),
        check_buffer("b", *b, entries(p.b_batched) * p.b_elements(), &b_dtype),
        check_buffer("group_sizes", *sizes, entries(p.sizes_batched) * p.num_sizes, &sizes_dtype),
        check_buffer("group_offset", *offset, entries(p.sizes_batched), &offset_dtype),
        check_buffer("bias", *bias, attrs.biased ? entries(p.b_batched) * p.bias_elements() : 0,
                     &p.epilogue.bias_dtype),
        check_buffer("gather", *gather, attrs.gathered ? entries(p.sizes_batched) * p.tokens() : 0, &gather_dtype),
        check_result("d", **d, p.batch * p.d_elements(), &p.out)}) {
    if (!error.empty()) return invalid(error);
  }
  if (b_dtype != p.in) {
    return invalid(std::string("b must have the dtype of a, ") + dtype_name(p.in) + ", got " + dtype_name(b_dtype));
  }
  for (const auto& [name, dtype] :
       {std::pair{"group_sizes", sizes_dtype}, {"group_offset", offset_dtype}, {"gather", gather_dtype}}) {
    if (dtype != DType::kS32) return invalid(std::string(name) + " must be s32, got " + dtype_name(dtype));
  }

  if (std::string error = check_overlaps(operands, results, replaces_none); !error.empty()) return invalid(error);

  RaggedBuffers buffers{a->untyped_data(),
                        b->untyped_data(),
                        static_cast<const int32_t*>(sizes->untyped_data()),
                        static_cast<const int32_t*>(offset->untyped_data()),
                        (*d)->untyped_data(),
                        nullptr,
                        0};
  if (attrs.biased) buffers.bias = bias->untyped_data();
  if (attrs.gathered) buffers.gather = static_cast<const int32_t*>(gather->untyped_data());
  if (results.size() == 2) {
    if (std::string error = take_workspace(results, 1, &buffers); !error.empty()) return invalid(error);
  }
  return launch_checked(implementations, p, buffers, device, attrs.implementation, attrs.config, stream);
}

}  // namespace

xla::ffi::Error run_ragged(const RaggedImplementations& implementations, const Device& device, void* stream,
                           const RaggedAttributes& attributes, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  return without_exceptions(
      [&] { return run_ragged_checked(implementations, device, stream, attributes, operands, results); });
}

}  // namespace tcgemm
