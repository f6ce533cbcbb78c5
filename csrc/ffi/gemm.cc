#include "ffi/gemm.h"

#include <optional>

namespace tcgemm {
namespace {

namespace ffi = xla::ffi;

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("jax_tcgemm: " + message); }

bool from_xla(ffi::DataType type, DType* out) {
  switch (type) {
    case ffi::DataType::F16: *out = DType::kF16; return true;
    case ffi::DataType::BF16: *out = DType::kBF16; return true;
    case ffi::DataType::F32: *out = DType::kF32; return true;
    case ffi::DataType::F64: *out = DType::kF64; return true;
    case ffi::DataType::S8: *out = DType::kS8; return true;
    case ffi::DataType::U8: *out = DType::kU8; return true;
    case ffi::DataType::S32: *out = DType::kS32; return true;
    case ffi::DataType::C64: *out = DType::kC64; return true;
    case ffi::DataType::C128: *out = DType::kC128; return true;
    default: return false;
  }
}

// Checks that `buffer` has a dtype we know and at least `elements` elements.
std::string check_buffer(const char* name, const ffi::AnyBuffer& buffer, int64_t elements, DType* dtype) {
  if (!from_xla(buffer.element_type(), dtype)) {
    return std::string(name) + " must have a supported dtype, got XLA type " +
           std::to_string(static_cast<int>(buffer.element_type()));
  }
  const int64_t got = static_cast<int64_t>(buffer.element_count());
  if (got < elements) {
    return std::string(name) + " must hold at least " + std::to_string(elements) + " elements, got " +
           std::to_string(got);
  }
  return "";
}

ffi::Error run_gemm_checked(const Implementations& implementations, const Device& device, void* stream,
                            const GemmAttributes& attrs, ffi::RemainingArgs& operands, ffi::RemainingRets& results) {
  if (attrs.abi != kAbiVersion) {
    return invalid("the program was lowered for ABI version " + std::to_string(attrs.abi) +
                   ", this library has version " + std::to_string(kAbiVersion) + "; lower it again");
  }
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

  const Implementation* implementation = find_implementation(implementations, attrs.implementation);
  if (implementation == nullptr) {
    return invalid("implementation " + std::string(attrs.implementation) + " is not part of this build");
  }
  const std::string name = implementation->name();
  if (!has_config(*implementation, attrs.config)) {
    return invalid(name + " has no config " + std::string(attrs.config));
  }
  if (std::string reason = implementation->reject(p, device, attrs.config); !reason.empty()) {
    return invalid(name + " cannot run this: " + reason);
  }
  const int64_t workspace_bytes = implementation->workspace_bytes(p, device, attrs.config);
  if (buffers.workspace_bytes < workspace_bytes) {
    return invalid("workspace of " + name + " must hold " + std::to_string(workspace_bytes) + " bytes, got " +
                   std::to_string(buffers.workspace_bytes));
  }
  if (p.is_empty()) return ffi::Error::Success();

  const Status status = implementation->launch(p, buffers, device, attrs.config, stream);
  switch (status.code) {
    case Status::Code::kOk: return ffi::Error::Success();
    case Status::Code::kInvalidArgument: return invalid(name + ": " + status.message);
    case Status::Code::kInternal: return ffi::Error::Internal("jax_tcgemm: " + name + ": " + status.message);
  }
  return ffi::Error::Internal("jax_tcgemm: unknown status");
}

}  // namespace

xla::ffi::Error run_gemm(const Implementations& implementations, const Device& device, void* stream,
                         const GemmAttributes& attributes, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  try {
    return run_gemm_checked(implementations, device, stream, attributes, operands, results);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("jax_tcgemm: ") + error.what());
  }
}

}  // namespace tcgemm
