// Kernels that are launched by name, whoever compiled them. A name is the C++ expression that instantiates the kernel.
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/implementation.h"

namespace tcgemm {

class Kernel {
 public:
  Kernel(const void* function, bool is_built_in) : function_(function), is_built_in_(is_built_in) {}

  // What the runtime launches.
  const void* function() const { return function_; }
  // Whether it is part of this library, and not of a program.
  bool is_built_in() const { return is_built_in_; }

  // Clusters of it that a device runs at once; 0 where that is not known yet. Fewer than fit by number of SMs, for a
  // cluster lies inside a GPC: 132 SMs took 30 of four and 15 of eight.
  std::atomic<int>& resident_clusters(int ordinal) { return resident_clusters_[ordinal % resident_clusters_.size()]; }

 private:
  const void* const function_;
  const bool is_built_in_;
  std::array<std::atomic<int>, 64> resident_clusters_{};
};

// Null where there is none of this name.
Kernel* find_kernel(const std::string& name);

// False where there is one of this name already. For static variables, but for those of programs.
bool add_kernel(const std::string& name, const void* function, bool is_built_in = true);

// Makes a kernel known by what a program carries of it, unless one of this name is: loads the only function of `cubin`,
// which is called `entry`, for all devices, and for the current one at once. For the time before a program's first
// execution: what may not happen while a graph is captured happens here.
Status load_kernel(const std::string& name, const std::string& entry, std::string_view cubin);

// A kernel by what it is compiled from, looked for until it is there.
class KernelReference {
 public:
  explicit KernelReference(KernelSource source) : source_(std::move(source)) {}

  Status find(Kernel** kernel) const {
    *kernel = find();
    return *kernel != nullptr ? Status::ok() : Status::invalid("the program must bring the kernel " + source_.name);
  }

  // What a program has to bring: nothing where this library was built with the kernel.
  std::vector<KernelSource> missing() const {
    const Kernel* kernel = find();
    if (kernel != nullptr && kernel->is_built_in()) return {};
    return {source_};
  }

 private:
  Kernel* find() const {
    Kernel* kernel = found_.load(std::memory_order_acquire);
    if (kernel == nullptr) found_.store(kernel = find_kernel(source_.name), std::memory_order_release);
    return kernel;
  }

  const KernelSource source_;
  mutable std::atomic<Kernel*> found_{nullptr};
};

}  // namespace tcgemm
