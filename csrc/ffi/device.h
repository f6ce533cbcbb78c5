// The device of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <string>
#include <utility>

#include "core/cuda_status.h"
#include "core/implementation.h"

namespace tcgemm {

inline Status query_device(int ordinal, Device* device) {
  int major = 0, minor = 0, num_sms = 0, shared_memory_bytes = 0;
  for (const auto& [attribute, value] : {std::pair{cudaDevAttrComputeCapabilityMajor, &major},
                                         {cudaDevAttrComputeCapabilityMinor, &minor},
                                         {cudaDevAttrMultiProcessorCount, &num_sms},
                                         {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_memory_bytes}}) {
    if (Status s = cuda_status(cudaDeviceGetAttribute(value, attribute, ordinal), "cudaDeviceGetAttribute"); !s.is_ok())
      return s;
  }
  *device = {10 * major + minor, num_sms, shared_memory_bytes};
  return Status::ok();
}

// The device of the calling thread, which XLA sets to the stream's device before each call.
// Its properties never change, so they are read once for each device.
inline Status current_device(Device* device) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> once;
  static std::array<Device, kMaxDevices> known;
  static std::array<Status, kMaxDevices> status;
  int ordinal = 0;
  if (Status s = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice"); !s.is_ok()) return s;
  if (ordinal >= kMaxDevices) return Status::internal("device ordinal " + std::to_string(ordinal) + " is over 63");
  std::call_once(once[ordinal], [&] { status[ordinal] = query_device(ordinal, &known[ordinal]); });
  *device = known[ordinal];
  return status[ordinal];
}

}  // namespace tcgemm
