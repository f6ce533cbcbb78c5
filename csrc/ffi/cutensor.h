// The XLA FFI handler "tcgemm_tensor": one tensor operation by cuTENSOR.
//
//   operands  a [, b] [, c]     as the operation has them (libraries/cutensor/operation.h)
//   results   d [, workspace]   workspace: uint8, workspace_bytes + 256, when workspace_bytes > 0
//   attributes                  abi, and those of the operation
//
// The plan is made when the executable is instantiated, for the device that is current then, and kept
// as the call's state; for any other device at its first call there.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "libraries/cutensor/operation.h"
#include "libraries/cutensor/plan.h"
#include "xla/ffi/api/ffi.h"

namespace tcgemm::cutensor {

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

xla::ffi::ErrorOr<std::unique_ptr<PlannedCall>> instantiate(xla::ffi::Dictionary attributes);

xla::ffi::Error execute(cudaStream_t stream, PlannedCall* call, xla::ffi::Dictionary attributes,
                        xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results);

}  // namespace tcgemm::cutensor
