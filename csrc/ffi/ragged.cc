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
  return check_problem(*p);
}

ffi::Error run_ragged_checked(const RaggedImplementations& implementations, const Device& device, void* stream,
                              const RaggedAttributes& attrs, ffi::RemainingArgs& operands,
                              ffi::RemainingRets& results) {
  if (std::string error = check_abi(attrs.abi); !error.empty()) return invalid(error);
  if (operands.size() != 4) {
    return invalid("operands must be a, b, group_sizes and group_offset, got " + std::to_string(operands.size()));
  }
  if (results.size() != 1 && results.size() != 2) {
    return invalid("results must be d and an optional workspace, got " + std::to_string(results.size()));
  }
  auto a = operands.get<ffi::AnyBuffer>(0), b = operands.get<ffi::AnyBuffer>(1);
  auto sizes = operands.get<ffi::AnyBuffer>(2), offset = operands.get<ffi::AnyBuffer>(3);
  auto d = results.get<ffi::AnyBuffer>(0);
  if (a.has_error() || b.has_error() || sizes.has_error() || offset.has_error() || d.has_error()) {
    return invalid("operands and results must be buffers");
  }

  RaggedProblem p;
  if (std::string error = decode(attrs, &p); !error.empty()) return invalid(error);
  const auto entries = [&](bool batched) { return batched ? p.batch : 1; };
  DType b_dtype, sizes_dtype, offset_dtype;
  for (const std::string& error :
       {check_buffer("a", *a, entries(p.a_batched) * p.a_elements(), &p.in),
        check_buffer("b", *b, entries(p.b_batched) * p.b_elements(), &b_dtype),
        check_buffer("group_sizes", *sizes, entries(p.sizes_batched) * p.num_sizes, &sizes_dtype),
        check_buffer("group_offset", *offset, entries(p.sizes_batched), &offset_dtype),
        check_buffer("d", **d, p.batch * p.d_elements(), &p.out)}) {
    if (!error.empty()) return invalid(error);
  }
  if (b_dtype != p.in) {
    return invalid(std::string("b must have the dtype of a, ") + dtype_name(p.in) + ", got " + dtype_name(b_dtype));
  }
  for (const auto& [name, dtype] : {std::pair{"group_sizes", sizes_dtype}, {"group_offset", offset_dtype}}) {
    if (dtype != DType::kS32) return invalid(std::string(name) + " must be s32, got " + dtype_name(dtype));
  }

  RaggedBuffers buffers{a->untyped_data(),
                        b->untyped_data(),
                        static_cast<const int32_t*>(sizes->untyped_data()),
                        static_cast<const int32_t*>(offset->untyped_data()),
                        (*d)->untyped_data(),
                        nullptr,
                        0};
  if (results.size() == 2) {
    auto workspace = results.get<ffi::AnyBuffer>(1);
    if (workspace.has_error()) return invalid("workspace must be a buffer");
    buffers.workspace = (*workspace)->untyped_data();
    buffers.workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
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
