// The XLA FFI handler "tcgemm_tensor": one tensor operation by cuTENSOR.
//
//   operands  a [, b] [, c]     as the operation has them (libraries/cutensor/operation.h)
//   results   d [, workspace]   workspace: uint8, workspace_bytes + 256, when workspace_bytes > 0
//   attributes                  TensorAttributes
//
// The plan is made when the executable is instantiated, for the device that is current then, and kept
// as the call's state; for any other device at its first call there.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "libraries/cutensor/operation.h"
#include "libraries/cutensor/plan.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm::cutensor {

struct TensorAttributes {
  int64_t abi;
  std::string_view operation, dtype, compute, algorithm;
  xla::ffi::Span<const int64_t> extents, a_modes, b_modes, c_modes, d_modes;
  std::string_view a_op, b_op, c_op, combine_ab, combine;
  bool has_c;
  xla::ffi::Span<const double> scalars;  // real and imaginary parts of alpha, beta, gamma
  int64_t workspace_bytes;
};

// An operation with its plan for each device that has run it.
class PlannedCall {
 public:
  static xla::ffi::TypeId id;

  explicit PlannedCall(Operation operation) : operation_(std::move(operation)) {}

  const Operation& operation() const { return operation_; }

  // The plan for device `ordinal`, which must be the calling thread's.
  Status plan(int ordinal, const Plan** plan);

 private:
  static constexpr int kMaxDevices = 64;

  Operation operation_;
  std::array<std::atomic<const Plan*>, kMaxDevices> plans_{};
  std::mutex mutex_;
  std::vector<std::shared_ptr<const Plan>> kept_;
};

xla::ffi::ErrorOr<std::unique_ptr<PlannedCall>> instantiate(TensorAttributes attributes);

xla::ffi::Error execute(cudaStream_t stream, PlannedCall* call, TensorAttributes attributes,
                        xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results);

}  // namespace tcgemm::cutensor

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::tcgemm::cutensor::TensorAttributes, StructMember<int64_t>("abi"), StructMember<std::string_view>("operation"),
    StructMember<std::string_view>("dtype"), StructMember<std::string_view>("compute"),
    StructMember<std::string_view>("algorithm"), StructMember<Span<const int64_t>>("extents"),
    StructMember<Span<const int64_t>>("a_modes"), StructMember<Span<const int64_t>>("b_modes"),
    StructMember<Span<const int64_t>>("c_modes"), StructMember<Span<const int64_t>>("d_modes"),
    StructMember<std::string_view>("a_op"), StructMember<std::string_view>("b_op"),
    StructMember<std::string_view>("c_op"), StructMember<std::string_view>("combine_ab"),
    StructMember<std::string_view>("combine"), StructMember<bool>("has_c"), StructMember<Span<const double>>("scalars"),
    StructMember<int64_t>("workspace_bytes"));
