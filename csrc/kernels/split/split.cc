// "split" behind the common interface.
#include <deque>
#include <map>
#include <mutex>
#include <string>

#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/split/instance.h"
#include "kernels/split/launch.h"

namespace tcgemm {
namespace split {
namespace {

class Split final : public SplitImplementation {
 public:
  const char* name() const override { return "split"; }
  const std::vector<std::string>& configs() const override { return configs_; }

  Features features() const override { return {}; }

  std::string reject_rest(const SplitProblem& p, const Device& device, std::string_view) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    return num_vectors(p) <= INT32_MAX ? "" : "a part must have less than 2^31 pieces of 16 bytes";
  }

  std::vector<KernelSource> kernels(const SplitProblem& p, const Device& device, std::string_view) const override {
    return reference_to(p).missing(device);
  }

  Status launch(const SplitProblem& p, const SplitBuffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    Kernel* kernel = nullptr;
    if (Status s = reference_to(p).find(device, &kernel); !s.is_ok()) return s;
    return split::launch(p, buffers, *kernel, static_cast<cudaStream_t>(stream));
  }

 private:
  // Made as they are asked for.
  const KernelReference& reference_to(const SplitProblem& p) const {
    KernelSource source = kernel_source(p);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = references_.find(source.name);
    if (found != references_.end()) return *found->second;
    const std::string name = source.name;
    kept_.emplace_back(std::move(source));
    return *references_.emplace(name, &kept_.back()).first->second;
  }

  const std::vector<std::string> configs_{"default"};
  mutable std::mutex mutex_;
  mutable std::deque<KernelReference> kept_;
  mutable std::map<std::string, const KernelReference*> references_;
};

}  // namespace
}  // namespace split

const SplitImplementation* splitter() {
  static const split::Split implementation;
  return &implementation;
}

}  // namespace tcgemm
