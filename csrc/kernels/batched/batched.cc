// "simt_batched" behind the common interface.
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/batched/instance.h"
#include "kernels/batched/launch.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"

namespace tcgemm {
namespace batched {
namespace {

// Matrices of a batch; a group's first one, and that of two rounds later, must fit 32 bits.
constexpr int64_t kMostBatch = int64_t{1} << 30;

// Whether matrices of so many elements follow each other without a gap, as do the rows of each.
bool is_packed(const Problem& p, const Operand& x, int64_t row, int64_t elements) {
  const bool inner = p.batch_inner <= 1 || x.batch_inner_stride == elements;
  const bool outer = p.batch_outer() <= 1 || x.batch_outer_stride == p.batch_inner * elements;
  return x.ld == row && inner && outer;
}

class SimtBatched final : public Implementation {
 public:
  const char* name() const override { return "simt_batched"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> names{"default"};
    return names;
  }

  Features features() const override { return {}; }

  std::string reject_rest(const Problem& p, const Device& device, std::string_view) const override {
    static const std::vector<DType> floats{DType::kF32, DType::kF16, DType::kBF16};
    // float32 in full precision also where TF32 would do.
    static const std::vector<TypeRule> rules{
        {DType::kF32, Compute::kF32, floats},         {DType::kF32, Compute::kTF32, floats},
        {DType::kF16, Compute::kF32, floats},         {DType::kBF16, Compute::kF32, floats},
        {DType::kF64, Compute::kF64, {DType::kF64}},  {DType::kC64, Compute::kF32, {DType::kC64}},
        {DType::kC64, Compute::kTF32, {DType::kC64}}, {DType::kC128, Compute::kF64, {DType::kC128}}};
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    if (std::string rule = reject_types(p, rules); !rule.empty()) return rule;
    if (std::min({p.m, p.n, p.k}) < kLeastSize || std::max({p.m, p.n, p.k}) > kMostSize) {
      return "m, n and k must be from 2 to 32, got " + std::to_string(p.m) + ", " + std::to_string(p.n) + " and " +
             std::to_string(p.k);
    }
    if (!is_packed(p, p.a, p.a.transposed ? p.m : p.k, p.m * p.k)) return "the matrices of a must be packed";
    if (!is_packed(p, p.b, p.b.transposed ? p.k : p.n, p.k * p.n)) return "the matrices of b must be packed";
    return p.batch <= kMostBatch ? "" : "batch must be at most 2^30, got " + std::to_string(p.batch);
  }

  std::vector<KernelSource> kernels(const Problem& p, const Device& device, std::string_view) const override {
    return {instance_of(p).reference->source_for(device)};
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    const Instance& instance = instance_of(p);
    Kernel* kernel = nullptr;
    if (Status s = instance.reference->find(device, &kernel); !s.is_ok()) return s;
    return batched::launch(p, buffers, device, instance.tiling, *kernel, static_cast<cudaStream_t>(stream));
  }

 private:
  using Key = std::tuple<int64_t, int64_t, int64_t, bool, bool, DType, DType>;
  struct Instance {
    Tiling tiling;
    const KernelReference* reference;
  };

  // The choice of a tiling takes milliseconds, so that each is made once.
  const Instance& instance_of(const Problem& p) const {
    const Key key{p.m, p.n, p.k, p.a.transposed, p.b.transposed, p.a.dtype, p.out};
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = instances_.find(key);
    if (found != instances_.end()) return found->second;
    const Tiling tiling = choose_tiling(p);
    const KernelReference& reference = references_.get(key, [&] { return kernel_source(p, tiling); });
    return instances_.emplace(key, Instance{tiling, &reference}).first->second;
  }

  mutable std::mutex mutex_;
  mutable std::map<Key, Instance> instances_;
  mutable KernelReferences<Key> references_;
};

}  // namespace
}  // namespace batched

const Implementation* simt_batched() {
  static const batched::SimtBatched implementation;
  return &implementation;
}

}  // namespace tcgemm
