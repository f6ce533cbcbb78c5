// Kernels that are launched by name, whoever compiled them. A name is the C++ expression that instantiates the kernel.
#pragma once

#include <array>
#include <atomic>
#include <string>

namespace tcgemm {

class Kernel {
 public:
  explicit Kernel(const void* function) : function_(function) {}

  // What the runtime launches.
  const void* function() const { return function_; }

  // Clusters of it that a device runs at once; 0 where that is not known yet. Fewer than fit by number of SMs, for a
  // cluster lies inside a GPC: 132 SMs took 30 of four and 15 of eight.
  std::atomic<int>& resident_clusters(int ordinal) { return resident_clusters_[ordinal % resident_clusters_.size()]; }

 private:
  const void* const function_;
  std::array<std::atomic<int>, 64> resident_clusters_{};
};

// Null where there is none of this name.
Kernel* find_kernel(const std::string& name);

// False where there is one of this name already. For static variables.
bool add_kernel(const std::string& name, const void* function);

// A kernel by name, looked for until it is there.
class KernelReference {
 public:
  explicit KernelReference(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  Kernel* find() const {
    Kernel* kernel = found_.load(std::memory_order_acquire);
    if (kernel == nullptr) found_.store(kernel = find_kernel(name_), std::memory_order_release);
    return kernel;
  }

 private:
  const std::string name_;
  mutable std::atomic<Kernel*> found_{nullptr};
};

}  // namespace tcgemm
