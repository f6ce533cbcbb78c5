// "peer_memory" behind the common interface.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_status.h"
#include "kernels/all_reduce/group.h"
#include "kernels/all_reduce/instance.h"
#include "kernels/common/alignment.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"

namespace tcgemm {
namespace all_reduce {
namespace {

class PeerMemory final : public AllReduceImplementation {
 public:
  const char* name() const override { return "peer_memory"; }
  const std::vector<std::string>& configs() const override { return configs_; }

  Features features() const override { return {}; }

  std::string reject_rest(const AllReduceProblem& p, const Device& device, std::string_view) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    if (p.devices < 2 || p.devices > kMaxDevices) {
      return "it sums arrays of 2 to " + std::to_string(kMaxDevices) + " devices, got " + std::to_string(p.devices);
    }
    const int64_t bytes = p.elements * dtype_bytes(p.in);
    const int64_t most = slot_bytes(p.devices);
    if (bytes <= most) return "";
    return "the array must have at most " + std::to_string(most) + " bytes, got " + std::to_string(bytes);
  }

  std::vector<KernelSource> kernels(const AllReduceProblem& p, const Device& device, std::string_view) const override {
    return {reference_to(p).source_for(device)};
  }

  Status launch(const AllReduceProblem& p, const AllReduceBuffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    const Group* group = buffers.state == nullptr ? nullptr : buffers.state->group();
    if (group == nullptr) return Status::invalid("the program must be initialized before it is executed");
    if (Status s = group->status(); !s.is_ok()) return s;
    int ordinal = 0;
    if (Status s = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice"); !s.is_ok()) return s;
    const int rank = group->rank_of(ordinal);
    if (rank < 0 || group->ordinals().size() != static_cast<size_t>(p.devices)) {
      return Status::invalid("the program was initialized for other devices");
    }
    Kernel* kernel = nullptr;
    if (Status s = reference_to(p).find(device, &kernel); !s.is_ok()) return s;
    Params params{};
    params.in = buffers.a;
    params.out = buffers.d;
    std::copy(group->workspaces().begin(), group->workspaces().end(), params.workspaces);
    params.failure = group->failure();
    params.elements = p.elements;
    params.timeout_ns = kTimeoutNs;
    params.looks_per_check = kLooksPerCheck;
    params.call_id = buffers.state->call_id();
    params.rank = rank;
    params.is_aligned = is_aligned(buffers.a, kVectorBytes) && is_aligned(buffers.d, kVectorBytes);
    return launch_early("all-reduce kernel", *kernel, kChannels, kThreads, device.compute_capability >= 90,
                        static_cast<cudaStream_t>(stream), params);
  }

 private:
  const KernelReference& reference_to(const AllReduceProblem& p) const {
    return references_.get({static_cast<int>(p.in), p.devices}, [&] { return kernel_source(p); });
  }

  const std::vector<std::string> configs_{"one_shot"};
  mutable KernelReferences<std::pair<int, int64_t>> references_;
};

}  // namespace
}  // namespace all_reduce

const AllReduceImplementation* peer_memory_all_reduce() {
  static const all_reduce::PeerMemory implementation;
  return &implementation;
}

}  // namespace tcgemm
