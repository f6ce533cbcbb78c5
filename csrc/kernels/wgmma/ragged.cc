// The wgmma family's grouped products behind the common interface.
#include <string>

#include "kernels/kernels.h"
#include "kernels/wgmma/ragged_config.h"
#include "kernels/wgmma/ragged_launch.h"
#include "tile/alignment.h"
#include "tile/limits.h"

namespace tcgemm {

namespace wgmma_family {
namespace {

struct RaggedBase {
  const char* name;
  bool is_rows;
  bool is_fused;  // runs any epilogue, of weights with rows of K, and may gather
};

constexpr RaggedBase kRaggedBases[] = {
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, swapped) {name, swapped, false},
    TCGEMM_WGMMA_RAGGED_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
};
constexpr RaggedBase kFusedBases[] = {
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, swapped) {name, swapped, true},
    TCGEMM_WGMMA_RAGGED_FUSED_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
};

struct Found {
  const RaggedBase* base;
  int idx;  // in its table
};

// Only called with names from configs().
Found find_base(std::string_view config) {
  for (const RaggedBase& base : kRaggedBases) {
    if (config == base.name) return {&base, static_cast<int>(&base - kRaggedBases)};
  }
  for (const RaggedBase& base : kFusedBases) {
    if (config == base.name) return {&base, static_cast<int>(&base - kFusedBases)};
  }
  return {};
}

RaggedLaunchFunction launch_function(const RaggedProblem& p, std::string_view config) {
  const Found found = find_base(config);
  const bool is_bf16 = p.in == DType::kBF16;
  if (found.base->is_fused) return (is_bf16 ? ragged_fused_bf16_table() : ragged_fused_f16_table())[found.idx];
  if (p.b_transposed) return (is_bf16 ? ragged_bf16_table_0() : ragged_f16_table_0())[found.idx];
  return (is_bf16 ? ragged_bf16_table_1() : ragged_f16_table_1())[found.idx];
}

class WgmmaRagged final : public RaggedImplementation {
 public:
  WgmmaRagged() {
    for (const RaggedBase& base : kRaggedBases) names_.push_back(base.name);
    for (const RaggedBase& base : kFusedBases) names_.push_back(base.name);
  }

  const char* name() const override { return "wgmma"; }
  const std::vector<std::string>& configs() const override { return names_; }

  std::string reject(const RaggedProblem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_other_devices(device, 90); !rule.empty()) return rule;
    const std::vector<DType> floats{DType::kF16, DType::kBF16, DType::kF32};
    if (std::string rule = reject_types(p.in, p.compute, p.out,
                                        {{DType::kF16, Compute::kF32, floats}, {DType::kBF16, Compute::kF32, floats}});
        !rule.empty()) {
      return rule;
    }
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
    return reject_config(p, *find_base(config).base);
  }

  Status launch(const RaggedProblem& p, const RaggedBuffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    if (!is_aligned(buffers.a, 16) || !is_aligned(buffers.b, 16)) {
      return Status::invalid("a and b must start on a 16-byte boundary");
    }
    const RaggedLaunchFunction product = launch_function(p, config);
    for (int64_t i = 0; i < p.batch; ++i) {
      const RaggedCall call{&p, batch_entry(p, buffers, i), static_cast<cudaStream_t>(stream)};
      if (Status s = product(call); !s.is_ok()) return s;
    }
    return Status::ok();
  }

 private:
  // What one config cannot run and another one can.
  static std::string reject_config(const RaggedProblem& p, const RaggedBase& base) {
    const std::string name = std::string("config ") + base.name;
    if (base.is_rows != p.is_rows()) return name + " is of form " + (base.is_rows ? "rows" : "contraction");
    if (!p.epilogue.is_none() && !base.is_fused) return name + " has no epilogues";
    if (p.gathered && !base.is_fused) return name + " gathers no rows";
    if (p.b_transposed && base.is_fused) return name + " reads b as (groups, k, n) only";
    return "";
  }

  std::vector<std::string> names_;
};

}  // namespace
}  // namespace wgmma_family

const RaggedImplementation* wgmma_ragged() {
  static const wgmma_family::WgmmaRagged instance;
  return &instance;
}

}  // namespace tcgemm
