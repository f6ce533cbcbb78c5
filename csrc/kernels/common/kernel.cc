#include "kernels/common/kernel.h"

#include <mutex>
#include <unordered_map>

namespace tcgemm {
namespace {

struct Kernels {
  std::mutex mutex;
  std::unordered_map<std::string, Kernel> by_name;
};

// Never destroyed: programs may outlive static variables.
Kernels& kernels() {
  static Kernels& all = *new Kernels;
  return all;
}

}  // namespace

Kernel* find_kernel(const std::string& name) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_name.find(name);
  return found == all.by_name.end() ? nullptr : &found->second;
}

bool add_kernel(const std::string& name, const void* function, bool is_built_in) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.by_name.try_emplace(name, function, is_built_in).second;
}

}  // namespace tcgemm
