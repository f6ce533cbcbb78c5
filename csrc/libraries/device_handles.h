// One library handle for each device, made at first use.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "core/implementation.h"

namespace tcgemm {

template <typename Handle>
class DeviceHandles {
 public:
  // The handle of device `ordinal`, which must be the calling thread's; `create(handle)` makes it.
  // Never destroyed: at process exit the CUDA context may be gone before the library is.
  template <typename Create>
  Status get(int ordinal, const Create& create, Handle* handle) {
    if (ordinal < 0 || ordinal >= kMaxDevices) {
      return Status::internal("device ordinal " + std::to_string(ordinal) + " is over 63");
    }
    *handle = handles_[ordinal].load(std::memory_order_acquire);
    if (*handle != nullptr) return Status::ok();
    std::lock_guard<std::mutex> lock(mutex_);
    *handle = handles_[ordinal].load(std::memory_order_relaxed);
    if (*handle != nullptr) return Status::ok();
    const Status status = create(handle);
    if (status.is_ok()) handles_[ordinal].store(*handle, std::memory_order_release);
    return status;
  }

 private:
  static constexpr int kMaxDevices = 64;
  std::array<std::atomic<Handle>, kMaxDevices> handles_{};
  std::mutex mutex_;
};

}  // namespace tcgemm
