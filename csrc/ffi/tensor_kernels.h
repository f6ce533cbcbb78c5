// XLA FFI handlers of the kernels for tensors.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "ffi/checks.h"
#include "kernels/common/reduction.h"
#include "kernels/tensor/transposition.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm {

struct TransposeAttributes {
  int64_t abi, rows, cols, in_row_stride, out_col_stride;
  xla::ffi::Span<const int64_t> batch_extents, batch_in_strides, batch_out_strides;
};

struct ReduceAttributes {
  int64_t abi;
  std::string_view op;
  int64_t outer, reduced, inner;
};

}  // namespace tcgemm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::tcgemm::TransposeAttributes, StructMember<int64_t>("abi"),
                                      StructMember<int64_t>("rows"), StructMember<int64_t>("cols"),
                                      StructMember<int64_t>("in_row_stride"), StructMember<int64_t>("out_col_stride"),
                                      StructMember<Span<const int64_t>>("batch_extents"),
                                      StructMember<Span<const int64_t>>("batch_in_strides"),
                                      StructMember<Span<const int64_t>>("batch_out_strides"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::tcgemm::ReduceAttributes, StructMember<int64_t>("abi"),
                                      StructMember<std::string_view>("op"), StructMember<int64_t>("outer"),
                                      StructMember<int64_t>("reduced"), StructMember<int64_t>("inner"));

namespace tcgemm {

// "tcgemm_transpose": operand a, result of the same dtype and number of elements.
inline xla::ffi::Error transpose(cudaStream_t stream, const TransposeAttributes& attributes, xla::ffi::AnyBuffer in,
                                 xla::ffi::Result<xla::ffi::AnyBuffer> out) {
  if (std::string error = check_abi(attributes.abi); !error.empty()) return invalid(error);
  if (!has_whole_bytes(in.element_type())) return invalid("transpose: elements must be whole bytes");
  const auto num_batch = attributes.batch_extents.size();
  if (num_batch > Transposition::kMaxBatchModes || attributes.batch_in_strides.size() != num_batch ||
      attributes.batch_out_strides.size() != num_batch) {
    return invalid("transpose: batch modes must be at most 4, each with an extent and two strides");
  }
  Transposition t{static_cast<int64_t>(xla::ffi::ByteWidth(in.element_type())),
                  attributes.rows,
                  attributes.cols,
                  attributes.in_row_stride,
                  attributes.out_col_stride,
                  static_cast<int>(num_batch),
                  {}};
  for (size_t i = 0; i < num_batch; ++i) {
    t.batch[i] = {attributes.batch_extents[i], attributes.batch_in_strides[i], attributes.batch_out_strides[i]};
  }
  if (std::string reason = reject_transposition(t); !reason.empty()) return invalid("transpose: " + reason);
  const auto count = static_cast<size_t>(t.num_elements());
  if (out->element_type() != in.element_type() || in.element_count() != count || out->element_count() != count) {
    return invalid("transpose: operand and result must have one dtype and " + std::to_string(count) + " elements");
  }
  if (overlap(in, *out)) return invalid("transpose: the result must not overlap the operand");
  return to_ffi_error("transpose", launch_transposition(t, in.untyped_data(), out->untyped_data(), stream));
}

// "tcgemm_reduce": operand a; results out [, workspace].
inline xla::ffi::Error reduce(const Device& device, cudaStream_t stream, const ReduceAttributes& attributes,
                              xla::ffi::AnyBuffer in, xla::ffi::RemainingRets results) {
  if (std::string error = check_abi(attributes.abi); !error.empty()) return invalid(error);
  if (results.size() != 1 && results.size() != 2) return invalid("reduce: results must be out and a workspace");
  auto out = results.get<xla::ffi::AnyBuffer>(0);
  if (out.has_error()) return invalid("reduce: out must be a buffer");
  Reduction r{DType::kF32, DType::kF32, attributes.op, attributes.outer, attributes.reduced, attributes.inner};
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
  const int64_t needed = reduction_workspace_bytes(r, device.num_sms);
  if (buffers.workspace_bytes < needed) {
    return invalid("reduce: the workspace must hold " + std::to_string(needed) + " bytes");
  }
  return to_ffi_error("reduce", launch_reduction(r, device.num_sms, in.untyped_data(), (*out)->untyped_data(),
                                                 buffers.workspace, stream));
}

}  // namespace tcgemm
