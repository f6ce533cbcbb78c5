#include "ffi/gemm.h"

namespace tcgemm {
namespace {

namespace ffi = xla::ffi;

ffi::Error run_gemm_checked(const Implementations& implementations, const Device& device, void* stream,
                            const GemmAttributes& attrs, ffi::RemainingArgs& operands, ffi::RemainingRets& results) {
  if (std::string error = check_abi(attrs.abi); !error.empty()) return invalid(error);
  const bool reads_c = attrs.beta != 0.0;
  if (operands.size() != 3 && (reads_c || operands.size() != 2)) {
    return invalid("operands must be a, b and, when beta != 0, c; got " + std::to_string(operands.size()));
  }
  if (results.size() != 1 && results.size() != 2) {
    return invalid("results must be d and an optional workspace, got " + std::to_string(results.size()));
  }
  auto a = operands.get<ffi::AnyBuffer>(0);
  auto b = operands.get<ffi::AnyBuffer>(1);
  auto d = results.get<ffi::AnyBuffer>(0);
  if (a.has_error() || b.has_error() || d.has_error()) return invalid("a, b and d must be buffers");

  Problem p;
  p.batch = attrs.batch;
  p.batch_inner = attrs.batch_inner;
  p.m = attrs.m;
  p.n = attrs.n;
  p.k = attrs.k;
  p.a = {DType::kF32, attrs.a_transposed, attrs.a_ld, attrs.a_outer_stride, attrs.a_inner_stride};
  p.b = {DType::kF32, attrs.b_transposed, attrs.b_ld, attrs.b_outer_stride, attrs.b_inner_stride};
  p.alpha = attrs.alpha;
  p.beta = attrs.beta;
  if (!parse_compute(attrs.compute, &p.compute)) {
    return invalid("compute must be f16, f32, tf32, f64 or s32, got " + std::string(attrs.compute));
  }
  if (std::string error = check_problem(p); !error.empty()) return invalid(error);
  const int64_t d_elements = required_elements_d(p);
  for (const std::string& error :
       {check_buffer("a", *a, required_elements_a(p), &p.a.dtype),
        check_buffer("b", *b, required_elements_b(p), &p.b.dtype), check_buffer("d", **d, d_elements, &p.out)}) {
    if (!error.empty()) return invalid(error);
  }

  Buffers buffers{a->untyped_data(), b->untyped_data(), nullptr, (*d)->untyped_data(), nullptr, 0};
  if (reads_c) {
    auto c = operands.get<ffi::AnyBuffer>(2);
    DType c_dtype;
    if (c.has_error()) return invalid("c must be a buffer");
    if (std::string error = check_buffer("c", *c, d_elements, &c_dtype); !error.empty()) return invalid(error);
    if (c_dtype != p.out) {
      return invalid(std::string("c must have the dtype of d, ") + dtype_name(p.out) + ", got " + dtype_name(c_dtype));
    }
    buffers.c = c->untyped_data();
  }
  if (results.size() == 2) {
    auto workspace = results.get<ffi::AnyBuffer>(1);
    if (workspace.has_error()) return invalid("workspace must be a buffer");
    buffers.workspace = (*workspace)->untyped_data();
    buffers.workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
  }

  return launch_checked(implementations, p, buffers, device, attrs.implementation, attrs.config, stream);
}

}  // namespace

xla::ffi::Error run_gemm(const Implementations& implementations, const Device& device, void* stream,
                         const GemmAttributes& attributes, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return without_exceptions(
      [&] { return run_gemm_checked(implementations, device, stream, attributes, operands, results); });
}

}  // namespace tcgemm
