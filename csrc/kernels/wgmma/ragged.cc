// The wgmma family's grouped products behind the common interface.
#include <algorithm>
#include <deque>
#include <string>

#include "kernels/common/alignment.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/instructions.h"
#include "kernels/wgmma/ragged_launch.h"

namespace tcgemm {

namespace wgmma_family {
namespace {

using tile::Major;

// Of the instruction's B: the tokens, in rows of K, or what else a contraction multiplies them by. The form is the
// orientation of the config.
Major tokens_major(const Shape& shape) { return shape.swapped ? Major::kK : Major::kMN; }

constexpr Features kFused{Feature::kActivation, Feature::kGated, Feature::kBiasN, Feature::kGathered,
                          Feature::kFunction};

// Only called with names from configs().
int find_base(std::string_view config) {
  const auto found = std::find_if(std::begin(kRaggedConfigs), std::end(kRaggedConfigs),
                                  [&](const NamedConfig& base) { return base.name == config; });
  return static_cast<int>(found - kRaggedConfigs);
}

// Those of which a kernel takes operands of any major from shared memory.
const std::vector<const Instruction*>& grouped_instructions() {
  static const std::vector<const Instruction*> all = [] {
    std::vector<const Instruction*> found;
    for (const Instruction& x : instructions()) {
      if (x.a.source_mn == tile::Source::kShared && x.b.source_mn == tile::Source::kShared) found.push_back(&x);
    }
    return found;
  }();
  return all;
}

const std::vector<TypeRule>& type_rules() {
  static const std::vector<TypeRule> rules = [] {
    std::vector<TypeRule> of_all;
    for (const Instruction* x : grouped_instructions()) {
      of_all.emplace_back(x->a.dtype, x->b.dtype, x->compute, std::vector{DType::kF16, DType::kBF16, DType::kF32});
    }
    return of_all;
  }();
  return rules;
}

class WgmmaRagged final : public RaggedImplementation {
 public:
  WgmmaRagged() {
    for (const NamedConfig& base : kRaggedConfigs) {
      names_.emplace_back(base.name);
      for (const Instruction* x : grouped_instructions()) {
        for (Major a : {Major::kK, Major::kMN}) {
          const std::string operands = operands_text(x->a.text(a), x->b.text(tokens_major(base.shape)));
          kernels_.emplace_back(kernel_source({base.shape, x->mma, operands, epilogue_text(base.any_epilogue), true}));
        }
      }
    }
  }

  const char* name() const override { return "wgmma"; }
  const std::vector<std::string>& configs() const override { return names_; }

  Features features() const override { return kFused; }

  Features config_features(std::string_view config) const override {
    const NamedConfig& base = kRaggedConfigs[find_base(config)];
    if (base.any_epilogue) return kFused;
    return base.shape.swapped ? Features{Feature::kFunction} : Features{};
  }

  std::string reject_rest(const RaggedProblem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_other_devices(device, 90); !rule.empty()) return rule;
    // A function may give anything.
    const DType out = p.epilogue.function.is_none() ? p.out : DType::kF32;
    if (std::string rule = reject_types(p.in, p.in, p.compute, out, type_rules()); !rule.empty()) return rule;
    // TMA's strides. Tokens are rows of K (rows) or of M and N (contraction); weights of N or K.
    const auto is_multiple = [](int64_t extent) { return extent % 8 == 0; };
    if (p.is_rows() && !is_multiple(p.k)) return "k must be a multiple of 8, got " + std::to_string(p.k);
    if (!p.is_rows() && !is_multiple(p.m)) return "m must be a multiple of 8, got " + std::to_string(p.m);
    if (!p.b_transposed && !is_multiple(p.n)) return "n must be a multiple of 8, got " + std::to_string(p.n);
    if (std::string rule = reject_ragged_tiles(p, 64, 64); !rule.empty()) return rule;
    if (p.gathered && !p.is_rows()) return "rows of a contraction cannot be gathered";
    if (p.gathered && p.a_rows * ((p.k + 7) / 8) > INT32_MAX) return "gathered rows must have at most 2^34 elements";
    if (p.epilogue.bias != Bias::kNone && p.epilogue.bias_dtype == DType::kF64) return "the bias must not be f64";
    const bool is_bare = p.epilogue.is_none() && !p.gathered;
    if (!is_bare && p.b_transposed) return "b must lie as (groups, k, n) where a has gathered rows or d an epilogue";
    return reject_config(p, kRaggedConfigs[find_base(config)]);
  }

  std::vector<KernelSource> kernels(const RaggedProblem& p, const Device& device,
                                    std::string_view config) const override {
    if (!p.epilogue.function.is_none()) return kernel_of_function(p, config).missing(device);
    return kernel_of(p, config).missing(device);
  }

  Status launch(const RaggedProblem& p, const RaggedBuffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    if (!is_aligned(buffers.a, 16) || !is_aligned(buffers.b, 16)) {
      return Status::invalid("a and b must start on a 16-byte boundary");
    }
    const NamedConfig& base = kRaggedConfigs[find_base(config)];
    RaggedCall call{};
    Status found = p.epilogue.function.is_none() ? kernel_of(p, config).find(device, &call.kernel)
                                                 : kernel_of_function(p, config).find(device, &call.kernel);
    if (!found.is_ok()) return found;
    const int bytes = static_cast<int>(dtype_bytes(p.in));
    call.geometry = {base.shape, {bytes, weights_major(p)}, {bytes, tokens_major(base.shape)}};
    call.has_epilogue = base.any_epilogue;
    call.problem = &p;
    call.all_buffers = &buffers;
    call.stream = static_cast<cudaStream_t>(stream);
    for (int64_t i = 0; i < p.batch; ++i) {
      call.entry = i;
      call.buffers = batch_entry(p, buffers, i);
      if (Status s = launch_ragged(call); !s.is_ok()) return s;
    }
    return Status::ok();
  }

 private:
  // Of the instruction's A: weights with rows of N, or the tokens of a contraction.
  static Major weights_major(const RaggedProblem& p) { return p.b_transposed ? Major::kK : Major::kMN; }

  // That which runs the problem's function.
  static KernelReference kernel_of_function(const RaggedProblem& p, std::string_view config) {
    const NamedConfig& base = kRaggedConfigs[find_base(config)];
    const auto& all = grouped_instructions();
    const auto found = std::find_if(all.begin(), all.end(), [&](const Instruction* x) { return x->a.dtype == p.in; });
    const Instruction& x = **found;
    const std::string operands = operands_text(x.a.text(weights_major(p)), x.b.text(tokens_major(base.shape)));
    return KernelReference(kernel_source({base.shape, x.mma, operands, function_text(p.epilogue.function.name), true}));
  }

  const KernelReference& kernel_of(const RaggedProblem& p, std::string_view config) const {
    const auto& all = grouped_instructions();
    const auto found = std::find_if(all.begin(), all.end(), [&](const Instruction* x) { return x->a.dtype == p.in; });
    const size_t row = find_base(config) * all.size() + (found - all.begin());
    return kernels_[row * 2 + (weights_major(p) == Major::kMN)];
  }

  // What one config cannot run and another one can.
  static std::string reject_config(const RaggedProblem& p, const NamedConfig& base) {
    const std::string name = "config " + std::string(base.name);
    if (base.shape.swapped != p.is_rows()) return name + " is of form " + (base.shape.swapped ? "rows" : "contraction");
    if (p.b_transposed && base.any_epilogue) return name + " reads b as (groups, k, n) only";
    return "";
  }

  std::vector<std::string> names_;
  std::deque<KernelReference> kernels_;  // [config][instruction][major of A]
};

}  // namespace
}  // namespace wgmma_family

const RaggedImplementation* wgmma_ragged() {
  static const wgmma_family::WgmmaRagged instance;
  return &instance;
}

}  // namespace tcgemm
