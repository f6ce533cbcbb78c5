// "split" behind the common interface.
#include <string>
#include <tuple>
#include <vector>

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
    return num_vectors(p) <= INT32_MAX ? "" : "a term must have less than 2^31 vectors of 16 bytes";
  }

  std::vector<KernelSource> kernels(const SplitProblem& p, const Device& device, std::string_view) const override {
    return {reference_to(p).source_for(device)};
  }

  Status launch(const SplitProblem& p, const SplitBuffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    Kernel* kernel = nullptr;
    if (Status s = reference_to(p).find(device, &kernel); !s.is_ok()) return s;
    return split::launch(p, buffers, *kernel, static_cast<cudaStream_t>(stream));
  }

 private:
  const KernelReference& reference_to(const SplitProblem& p) const {
    const Key key{static_cast<int>(p.form), static_cast<int>(p.out), has_vectors(p), p.terms};
    return references_.get(key, [&] { return kernel_source(p); });
  }

  using Key = std::tuple<int, int, bool, std::vector<int64_t>>;
  const std::vector<std::string> configs_{"default"};
  mutable KernelReferences<Key> references_;
};

}  // namespace
}  // namespace split

const SplitImplementation* splitter() {
  static const split::Split implementation;
  return &implementation;
}

}  // namespace tcgemm
