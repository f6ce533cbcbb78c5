// Kernels that programs bring, launched by name: the C++ expression that instantiates one.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/implementation.h"

namespace tcgemm {

class Kernel {
 public:
  Kernel(const void* function, std::string target) : function_(function), target_(std::move(target)) {}

  // What the runtime launches.
  const void* function() const { return function_; }
  // Whether it is code for `target`; one without a target is for all.
  bool serves(const std::string& target) const { return target_.empty() || target_ == target; }

  // Clusters of it that a device runs at once; 0 where that is not known yet. Fewer than fit by number of SMs, for a
  // cluster lies inside a GPC: 132 SMs took 30 of four and 15 of eight.
  std::atomic<int>& resident_clusters(int ordinal) { return resident_clusters_[ordinal % resident_clusters_.size()]; }

 private:
  const void* const function_;
  const std::string target_;
  std::array<std::atomic<int>, 64> resident_clusters_{};
};

// The architecture of a device, of which it runs any code.
inline std::string target_of(const Device& device) { return "sm_" + std::to_string(device.compute_capability); }

// Null where there is none of this name that serves `target`.
Kernel* find_kernel(const std::string& name, const std::string& target);

// False where there is one of this name and target already.
bool add_kernel(const std::string& name, const void* function, const std::string& target = "");

// Loads a kernel that is known for the current device; nothing where none of this name that serves `target` is.
std::optional<Status> load_known_kernel(const std::string& name, const std::string& target);

// Makes a kernel known by what a program carries of it, unless one that serves `target` is: loads the only function of
// `cubin`, which is called `entry`, for all devices, and for the current one at once. For the time before a program's
// execution: what may not happen while a graph is captured happens here.
Status load_kernel(const std::string& name, const std::string& target, const std::string& entry,
                   std::string_view cubin);

// A kernel by what it is compiled from, looked for until it is there. Where the source names no target it is the
// device's.
class KernelReference {
 public:
  explicit KernelReference(KernelSource source) : source_(std::move(source)) {}

  Status find(const Device& device, Kernel** kernel) const {
    const std::string target = target_for(device);
    *kernel = find(target);
    if (*kernel != nullptr) return Status::ok();
    return Status::invalid("the program must bring the kernel " + source_.name + " for " + target);
  }

  // What a program has to bring.
  KernelSource source_for(const Device& device) const { return {source_.header, source_.name, target_for(device)}; }

 private:
  std::string target_for(const Device& device) const {
    return source_.target.empty() ? target_of(device) : source_.target;
  }

  Kernel* find(const std::string& target) const {
    Kernel* kernel = found_.load(std::memory_order_acquire);
    if (kernel == nullptr || !kernel->serves(target)) {
      found_.store(kernel = find_kernel(source_.name, target), std::memory_order_release);
    }
    return kernel;
  }

  const KernelSource source_;
  // The last one, which another device's call may have found.
  mutable std::atomic<Kernel*> found_{nullptr};
};

// References that are made as they are asked for, by what tells them apart.
template <typename Key>
class KernelReferences {
 public:
  // make() gives the KernelSource of a key.
  template <typename Make>
  const KernelReference& get(const Key& key, const Make& make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = references_.find(key);
    if (found != references_.end()) return *found->second;
    kept_.emplace_back(make());
    return *references_.emplace(key, &kept_.back()).first->second;
  }

 private:
  std::mutex mutex_;
  std::deque<KernelReference> kept_;
  std::map<Key, const KernelReference*> references_;
};

}  // namespace tcgemm
