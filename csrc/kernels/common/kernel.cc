#include "kernels/common/kernel.h"

#include <map>
#include <mutex>

namespace tcgemm {
namespace {

struct Kernels {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, Kernel> by_name_and_target;
};

// Never destroyed: programs may outlive static variables.
Kernels& kernels() {
  static Kernels& all = *new Kernels;
  return all;
}

}  // namespace

Kernel* find_kernel(const std::string& name, const std::string& target) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.by_name_and_target.find({name, ""});
  if (found == all.by_name_and_target.end()) found = all.by_name_and_target.find({name, target});
  return found == all.by_name_and_target.end() ? nullptr : &found->second;
}

bool add_kernel(const std::string& name, const void* function, const std::string& target) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.by_name_and_target.try_emplace({name, target}, function, target).second;
}

}  // namespace tcgemm
