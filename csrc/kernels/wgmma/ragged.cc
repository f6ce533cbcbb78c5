// The wgmma family's grouped products behind the common interface.
#include <algorithm>
#include <deque>
#include <string>
#include <type_traits>
#include <utility>

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

// Of the instruction's B, beside an A of that major: the tokens, in rows of K, or what else a contraction multiplies
// them by, which lies as they do. The form is the orientation of the config.
Major major_of_b(const Shape& shape, Major a) { return shape.swapped ? Major::kK : a; }

// Of form rows: of configs whose blocks share the tokens, and of those whose blocks share the weights.
constexpr Features kOfTokens{Feature::kFunction, Feature::kBlockScales};
constexpr Features kOfWeights{Feature::kFunction, Feature::kGated, Feature::kGathered, Feature::kBlockScales};
// Of form contraction.
constexpr Features kOfContraction{Feature::kBlockScales, Feature::kTokensLast};

// Only called with names from configs().
int find_base(std::string_view config) {
  const auto found = std::find_if(std::begin(kRaggedConfigs), std::end(kRaggedConfigs),
                                  [&](const NamedConfig& base) { return base.name == config; });
  return static_cast<int>(found - kRaggedConfigs);
}

// Instructions of operands of one type, both from shared memory. Promotion of bfloat16 is for dense products alone.
const std::vector<const Instruction*>& grouped_instructions() {
  static const std::vector<const Instruction*> all = [] {
    std::vector<const Instruction*> found;
    for (const Instruction& x : instructions()) {
      const bool is_dense = x.compute == Compute::kF32Promoted || x.a.source_mn == tile::Source::kTransposed;
      if (x.a.dtype == x.b.dtype && !is_dense) found.push_back(&x);
    }
    return found;
  }();
  return all;
}

size_t number_of_instruction(const RaggedProblem& p) {
  const auto& all = grouped_instructions();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Instruction* x) { return x->a.dtype == p.in && x->compute == p.compute; });
  return found - all.begin();
}

const std::vector<TypeRule>& type_rules() {
  static const std::vector<TypeRule> rules = [] {
    std::vector<TypeRule> of_all;
    for (const Instruction* x : grouped_instructions()) {
      of_all.emplace_back(
          x->a.dtype, x->b.dtype, x->compute,
          x->compute == Compute::kS32 ? std::vector{DType::kS32} : std::vector{DType::kF16, DType::kBF16, DType::kF32});
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
          const Major b = major_of_b(base.shape, a);
          const std::string operands = x->a.takes(a) && x->b.takes(b) ? operands_text(x->a.text(a), x->b.text(b)) : "";
          kernels_.emplace_back(kernel_source({base.shape, x->mma, operands, kBareText, true}));
        }
      }
    }
  }

  const char* name() const override { return "wgmma"; }
  const std::vector<std::string>& configs() const override { return names_; }

  Features features() const override {
    Features all = kOfWeights;
    all.add(Feature::kTokensLast);
    return all;
  }

  Features config_features(std::string_view config) const override {
    const Shape& shape = kRaggedConfigs[find_base(config)].shape;
    return !shape.swapped ? kOfContraction : shape.cluster_n > 1 ? kOfWeights : kOfTokens;
  }

  std::string reject_rest(const RaggedProblem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_other_devices(device, 90); !rule.empty()) return rule;
    // A function may give anything.
    const DType accumulator = p.compute == Compute::kS32 ? DType::kS32 : DType::kF32;
    const DType out = p.epilogue.function.is_none() ? p.out : accumulator;
    if (std::string rule = reject_types(p.in, p.in, p.compute, out, type_rules()); !rule.empty()) return rule;
    const Instruction& x = *grouped_instructions()[number_of_instruction(p)];
    if (!x.a.takes(Major::kMN) && !p.is_rows() && !p.tokens_last) {
      return "a and b must lie as (m, k) and (n, k) where elements have 8 bits";
    }
    if (!x.a.takes(Major::kMN) && p.is_rows() && !p.b_transposed) {
      return "b must lie as (groups, n, k) where elements have 8 bits";
    }
    // TMA's strides. Tokens are rows of K, or (contraction) of M and N where they are not last; weights of N or K.
    const int64_t step = 16 / dtype_bytes(p.in);
    const auto reject = [&](const char* name, int64_t extent) {
      if (extent % step == 0) return std::string();
      return name + (" must be a multiple of " + std::to_string(step)) + ", got " + std::to_string(extent);
    };
    const bool has_rows_of_k = p.is_rows() || p.tokens_last;
    if (std::string rule = has_rows_of_k ? reject("k", p.k) : reject("m", p.m); !rule.empty()) return rule;
    if (std::string rule = p.b_transposed || p.tokens_last ? "" : reject("n", p.n); !rule.empty()) return rule;
    if (std::string rule = reject_ragged_tiles(p, 64, 64); !rule.empty()) return rule;
    if (p.gathered && !p.is_rows()) return "rows of a contraction cannot be gathered";
    if (p.gathered && p.a_rows * ((p.k + 7) / 8) > INT32_MAX) return "gathered rows must have at most 2^34 elements";
    if (p.gathered && p.b_transposed) return "b must lie as (groups, k, n) where a has gathered rows";
    const bool may_scale = x.promotes || (scales_at_the_end(p) && x.compute != Compute::kS32);
    if (std::string rule = reject_scales(p.scales, p.m, p.n, p.k, may_scale); !rule.empty()) return rule;
    return reject_config(p, kRaggedConfigs[find_base(config)]);
  }

  std::vector<KernelSource> kernels(const RaggedProblem& p, const Device& device,
                                    std::string_view config) const override {
    return with_kernel_of(p, config, [&](const KernelReference& x) { return std::vector{x.source_for(device)}; });
  }

  Status launch(const RaggedProblem& p, const RaggedBuffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    if (!is_aligned(buffers.a, 16) || !is_aligned(buffers.b, 16)) {
      return Status::invalid("a and b must start on a 16-byte boundary");
    }
    const NamedConfig& base = kRaggedConfigs[find_base(config)];
    RaggedCall call{};
    Status found = with_kernel_of(p, config, [&](const KernelReference& x) { return x.find(device, &call.kernel); });
    if (!found.is_ok()) return found;
    call.geometry = geometry_of(p, base.shape);
    if (!p.scales.is_none()) {
      call.a_scales = {buffers.a_scales, p.scales.a(), p.m};
      call.b_scales = {buffers.b_scales, p.scales.b(), p.n};
      if (p.epilogue.gated) {
        // Gate and up in turn.
        int64_t& stride = call.b_scales.blocks.batch_inner_stride;
        call.b_scales.up_data = static_cast<const float*>(buffers.b_scales) + stride;
        stride *= 2;
      }
      if (scales_at_the_end(p)) {
        for (OperandScales* x : {&call.a_scales, &call.b_scales}) {
          if (x->blocks.rows > 1) x->blocks.row_stride = 0;
        }
      }
      if (p.is_rows()) std::swap(call.a_scales, call.b_scales);
    }
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
  static Major major_of_a(const RaggedProblem& p) { return p.b_transposed || p.tokens_last ? Major::kK : Major::kMN; }

  // Whether block scales are for all of K, of one row or of all, so that a contraction multiplies its accumulators by
  // them once.
  static bool scales_at_the_end(const RaggedProblem& p) {
    const auto is_of_all_k = [&](const BlockScales& x, int64_t rows) {
      return x.depth >= p.k && (x.rows == 1 || x.rows >= rows);
    };
    return !p.is_rows() && !p.scales.is_none() && is_of_all_k(p.scales.a(), p.m) && is_of_all_k(p.scales.b(), p.n);
  }

  // How both operands lie in the stages.
  static Geometry geometry_of(const RaggedProblem& p, const Shape& shape) {
    const int bytes = static_cast<int>(dtype_bytes(p.in));
    const Major a = major_of_a(p);
    Geometry geometry{shape, {bytes, a}, {bytes, major_of_b(shape, a)}};
    if (!p.scales.is_none() && !scales_at_the_end(p)) {
      geometry.a.scaled_rows = OperandScales::rows_of_a(p.is_rows() ? p.scales.b() : p.scales.a());
      // Of form rows groups, and so tiles, begin at any token.
      geometry.b.scaled_rows = p.is_rows() ? 1 : OperandScales::rows_of_b(p.scales.b(), shape.tile_n, false);
    }
    return geometry;
  }

  // Calls f with the kernel that multiplies, and runs the problem's function if there is one.
  template <typename Visitor>
  std::invoke_result_t<Visitor, const KernelReference&> with_kernel_of(const RaggedProblem& p, std::string_view config,
                                                                       Visitor&& f) const {
    const int base_idx = find_base(config);
    const size_t number = number_of_instruction(p);
    if (p.epilogue.function.is_none() && (p.scales.is_none() || scales_at_the_end(p))) {
      const size_t row = base_idx * grouped_instructions().size() + number;
      return f(kernels_[row * 2 + (major_of_a(p) == Major::kMN)]);
    }
    const NamedConfig& base = kRaggedConfigs[base_idx];
    const Instruction& x = *grouped_instructions()[number];
    const Geometry geometry = geometry_of(p, base.shape);
    const std::string operands = operands_text(x.a.text(geometry.a.major, geometry.a.scaled_rows),
                                               x.b.text(geometry.b.major, geometry.b.scaled_rows));
    const tcgemm::Function& function = p.epilogue.function;
    const std::string epilogue = function.is_none() ? kBareText : function_text(function.name);
    return f(KernelReference(kernel_source({base.shape, x.mma, operands, epilogue, true})));
  }

  // What one config cannot run and another one can.
  static std::string reject_config(const RaggedProblem& p, const NamedConfig& base) {
    const std::string name = "config " + std::string(base.name);
    if (base.shape.swapped != p.is_rows()) return name + " is of form " + (base.shape.swapped ? "rows" : "contraction");
    if (p.b_transposed && !p.epilogue.gated && base.shape.cluster_n > 1) {
      return name + " reads b as (groups, n, k) only of gated products";
    }
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
