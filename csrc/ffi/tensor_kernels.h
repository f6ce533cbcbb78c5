// XLA FFI handlers of the kernels for tensors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <tuple>
#include <utility>

#include "ffi/attributes.h"
#include "ffi/checks.h"
#include "ffi/device.h"
#include "kernels/common/reduction.h"
#include "kernels/tensor/transposition.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

// "tcgemm_transpose": operand a, then the kernels that the program carries (kernel.h); result of the same dtype and
// number of elements.
inline xla::ffi::Error transpose(cudaStream_t stream, xla::ffi::Dictionary attributes, xla::ffi::AnyBuffer in,
                                 xla::ffi::Result<xla::ffi::AnyBuffer> out) {
  Transposition t{};
  const std::string error = read_attributes(attributes, [&](auto&& visit) { visit_fields(t, visit); });
  if (!error.empty()) return invalid("transpose: " + error);
  if (!has_whole_bytes(in.element_type())) return invalid("transpose: elements must be whole bytes");
  t.element_bytes = static_cast<int64_t>(xla::ffi::ByteWidth(in.element_type()));
  if (std::string reason = reject_transposition(t); !reason.empty()) return invalid("transpose: " + reason);
  const auto count = static_cast<size_t>(t.num_elements());
  if (out->element_type() != in.element_type() || in.element_count() != count || out->element_count() != count) {
    return invalid("transpose: operand and result must have one dtype and " + std::to_string(count) + " elements");
  }
  if (overlap(in, *out)) return invalid("transpose: the result must not overlap the operand");
  Device device;
  if (Status s = current_device(&device); !s.is_ok()) return to_ffi_error("transpose", std::move(s));
  return to_ffi_error("transpose", launch_transposition(t, device, in.untyped_data(), out->untyped_data(), stream));
}

// "tcgemm_reduce": operand a, then kernels; results out [, workspace].
inline xla::ffi::Error reduce(cudaStream_t stream, xla::ffi::Dictionary attributes, xla::ffi::AnyBuffer in,
                              xla::ffi::RemainingRets results) {
  Reduction r{};
  const std::string error = read_attributes(attributes, [&](auto&& visit) { visit_fields(r, visit); });
  if (!error.empty()) return invalid("reduce: " + error);
  if (results.size() != 1 && results.size() != 2) return invalid("reduce: results must be out and a workspace");
  auto out = results.get<xla::ffi::AnyBuffer>(0);
  if (out.has_error()) return invalid("reduce: out must be a buffer");
  for (const auto& [name, buffer, dtype] : {std::tuple{"a", &in, &r.in}, std::tuple{"out", &**out, &r.out}}) {
    if (std::string error = check_buffer(name, *buffer, 0, dtype); !error.empty()) return invalid("reduce: " + error);
  }
  if (std::string reason = reject_reduction(r); !reason.empty()) return invalid("reduce: " + reason);
  if (in.element_count() != static_cast<size_t>(r.outer * r.reduced * r.inner) ||
      (*out)->element_count() != static_cast<size_t>(r.outer * r.inner)) {
    return invalid("reduce: the extents must be those of the operand and the result");
  }
  struct {
    void* workspace = nullptr;
    int64_t workspace_bytes = 0;
  } buffers;
  if (results.size() == 2) {
    if (std::string error = take_workspace(results, 1, &buffers); !error.empty()) return invalid("reduce: " + error);
    auto workspace = results.get<xla::ffi::AnyBuffer>(1);
    if (overlap(in, **workspace) || overlap(**out, **workspace)) return invalid("reduce: buffers must not overlap");
  }
  if (overlap(in, **out)) return invalid("reduce: buffers must not overlap");
  Device device;
  if (Status s = current_device(&device); !s.is_ok()) return to_ffi_error("reduce", std::move(s));
  const int64_t needed = reduction_workspace_bytes(r, device.num_sms);
  if (buffers.workspace_bytes < needed) {
    return invalid("reduce: the workspace must hold " + std::to_string(needed) + " bytes");
  }
  return to_ffi_error(
      "reduce", launch_reduction(r, device, in.untyped_data(), (*out)->untyped_data(), buffers.workspace, stream));
}

}  // namespace tcgemm
