// The grouped products of "mma_sync" behind the common interface.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <string>

#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/mma_sync/config.h"
#include "kernels/mma_sync/instance.h"
#include "kernels/mma_sync/instructions.h"
#include "kernels/mma_sync/ragged_launch.h"

namespace tcgemm {
namespace mma {
namespace {

using tile::Major;

// Instructions with f32 accumulators, one for each pair of dtypes of tokens and weights.
const std::vector<const Instruction*>& grouped_instructions() {
  static const std::vector<const Instruction*> all = [] {
    std::vector<const Instruction*> found;
    for (const Instruction& x : instructions()) {
      if (x.compute == Compute::kF32 || x.compute == Compute::kTF32) found.push_back(&x);
    }
    return found;
  }();
  return all;
}

const std::vector<TypeRule>& ragged_type_rules() {
  static const std::vector<TypeRule> rules = [] {
    std::vector<TypeRule> of_all;
    for (const Instruction* x : grouped_instructions()) {
      of_all.emplace_back(x->a.dtype, x->b.dtype, x->compute, std::vector{DType::kF16, DType::kBF16, DType::kF32});
    }
    return of_all;
  }();
  return rules;
}

// The operands' majors for each form: rows, rows by transposed weights, contraction.
struct Majors {
  Major a, b;
};
constexpr Majors kForms[] = {{Major::kK, Major::kMN}, {Major::kK, Major::kK}, {Major::kMN, Major::kMN}};

int form_of(const RaggedProblem& p) { return !p.is_rows() ? 2 : p.b_transposed ? 1 : 0; }

class MmaSyncRagged final : public RaggedImplementation {
 public:
  MmaSyncRagged() {
    for (const Instruction* x : grouped_instructions()) {
      for (const Majors& form : kForms) {
        const std::string operands = operands_text(x->a.text(form.a), x->b.text(form.b));
        kernels_.emplace_back(ragged_kernel_source({kRaggedTile, x->mma, operands}));
      }
    }
  }

  const char* name() const override { return "mma_sync"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> all{std::to_string(kRaggedTile.m) + "x" + std::to_string(kRaggedTile.n)};
    return all;
  }

  Features features() const override { return {}; }

  std::string reject_rest(const RaggedProblem& p, const Device& device, std::string_view) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    if (std::string rule = reject_types(p.in, p.in, p.compute, p.out, ragged_type_rules()); !rule.empty()) return rule;
    return reject_ragged_tiles(p, kRaggedTile.m, kRaggedTile.n);
  }

  std::vector<KernelSource> kernels(const RaggedProblem& p, const Device& device, std::string_view) const override {
    return {kernels_[index_of(p)].source_for(device)};
  }

  Status launch(const RaggedProblem& p, const RaggedBuffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    RaggedCall call{};
    if (Status s = kernels_[index_of(p)].find(device, &call.kernel); !s.is_ok()) return s;
    const int bytes = static_cast<int>(dtype_bytes(p.in));
    const Majors& form = kForms[form_of(p)];
    call.geometry = {kRaggedTile, bytes, {Role::kA, bytes, form.a}, {Role::kB, bytes, form.b}};
    call.problem = &p;
    call.stream = static_cast<cudaStream_t>(stream);
    for (int64_t i = 0; i < p.batch; ++i) {
      call.buffers = batch_entry(p, buffers, i);
      if (Status s = launch_ragged(call); !s.is_ok()) return s;
    }
    return Status::ok();
  }

 private:
  static size_t index_of(const RaggedProblem& p) {
    const auto& all = grouped_instructions();
    const auto found = std::find_if(all.begin(), all.end(), [&](const Instruction* x) { return x->a.dtype == p.in; });
    return (found - all.begin()) * std::size(kForms) + form_of(p);
  }

  std::deque<KernelReference> kernels_;  // [instruction][form]
};

}  // namespace
}  // namespace mma

const RaggedImplementation* mma_sync_ragged() {
  static const mma::MmaSyncRagged implementation;
  return &implementation;
}

}  // namespace tcgemm
