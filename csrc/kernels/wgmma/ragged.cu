// The wgmma family's grouped products behind the common interface.
#include <string>

#include "kernels/kernels.h"
#include "kernels/wgmma/ragged_config.h"
#include "kernels/wgmma/ragged_launch.h"
#include "tile/gemm_args.h"
#include "tile/limits.h"

namespace tcgemm {

namespace wgmma_family {
namespace {

struct RaggedBase {
  const char* name;
  bool is_rows;
};

constexpr RaggedBase kRaggedBases[] = {
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, ping_pong, swapped) {name, swapped},
    TCGEMM_WGMMA_RAGGED_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
};
constexpr int kNumRaggedBases = sizeof(kRaggedBases) / sizeof(kRaggedBases[0]);

int base_index(std::string_view config) {
  for (int i = 0; i < kNumRaggedBases; ++i) {
    if (config == kRaggedBases[i].name) return i;
  }
  return -1;
}

const std::vector<RaggedLaunchFunction>& table(const RaggedProblem& p) {
  const bool rows_of_k = !p.b_transposed;
  if (p.in == DType::kBF16) return rows_of_k ? ragged_bf16_table_1() : ragged_bf16_table_0();
  return rows_of_k ? ragged_f16_table_1() : ragged_f16_table_0();
}

class WgmmaRagged final : public RaggedImplementation {
 public:
  WgmmaRagged() {
    for (const RaggedBase& base : kRaggedBases) names_.push_back(base.name);
  }

  const char* name() const override { return "wgmma"; }
  const std::vector<std::string>& configs() const override { return names_; }

  std::string reject(const RaggedProblem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_other_devices(device, 90); !rule.empty()) return rule;
    if (!p.epilogue.is_none()) return "it has no epilogues";
    if (p.gathered) return "it gathers no rows";
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
    if (const int index = base_index(config); kRaggedBases[index].is_rows != p.is_rows()) {
      return "config " + std::string(config) + " is of form " + (kRaggedBases[index].is_rows ? "rows" : "contraction");
    }
    return "";
  }

  Status launch(const RaggedProblem& p, const RaggedBuffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    if (!is_aligned(buffers.a, 16) || !is_aligned(buffers.b, 16)) {
      return Status::invalid("a and b must start on a 16-byte boundary");
    }
    const RaggedLaunchFunction product = table(p)[base_index(config)];
    for (int64_t i = 0; i < p.batch; ++i) {
      const RaggedCall call{&p, batch_entry(p, buffers, i), static_cast<cudaStream_t>(stream)};
      if (Status s = product(call); !s.is_ok()) return s;
    }
    return Status::ok();
  }

 private:
  std::vector<std::string> names_;
};

}  // namespace
}  // namespace wgmma_family

const RaggedImplementation* wgmma_ragged() {
  static const wgmma_family::WgmmaRagged instance;
  return &instance;
}

}  // namespace tcgemm
