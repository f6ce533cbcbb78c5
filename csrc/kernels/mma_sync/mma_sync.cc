// The implementation "mma_sync": what runs, and by which launcher.
#include <algorithm>
#include <array>
#include <charconv>

#include "kernels/common/epilogue_launch.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/mma_sync/launch.h"

namespace tcgemm {
namespace {

using namespace tcgemm::mma;

// One config of one element type. Every tile shape is a config of each type whose kernels are built.
struct Kernel {
  std::string config;
  DType in;
  Compute compute;
  int64_t tile_m, tile_n, shared_bytes;
  bool has_epilogue;
  Status (*launch)(const Problem&, const Buffers&, const Device&, int splits, cudaStream_t);
};

template <typename Tile, typename Instruction>
Kernel make_kernel(DType in, Compute compute) {
  const auto text = [](int64_t x) { return std::to_string(x); };
  const std::string config = text(Tile::kTileM) + "x" + text(Tile::kTileN) + "x" +
                             text(Tile::kTileKBytes / dtype_bytes(in)) + "_w" + text(Tile::kWarpM) + "x" +
                             text(Tile::kWarpN) + "_s" + text(Tile::kStages);
  return {config,
          in,
          compute,
          Tile::kTileM,
          Tile::kTileN,
          Tile::kSharedBytes,
          Tile::kHasEpilogue || compute == Compute::kS32,
          &launch<Tile, Instruction>};
}

template <typename Instruction, typename... Tiles>
void add_kernels(std::vector<Kernel>& kernels, DType in, Compute compute) {
  (kernels.push_back(make_kernel<Tiles, Instruction>(in, compute)), ...);
}

// For each type in order of preference. Must agree with the instance_*.cu files, or linking fails.
const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> all = [] {
    std::vector<Kernel> list;
    add_kernels<F16F32, Tile256Stages3, Tile256TallStages3, Tile128Stages4, Tile64Stages4>(list, DType::kF16,
                                                                                           Compute::kF32);
    add_kernels<BF16F32, Tile256Stages3, Tile256TallStages3, Tile128Stages4, Tile64Stages4>(list, DType::kBF16,
                                                                                            Compute::kF32);
    add_kernels<F16F16, Tile256Stages3, Tile128Stages4, Tile64Stages4>(list, DType::kF16, Compute::kF16);
    add_kernels<TF32F32, Tile256Stages3, Tile128Stages4, Tile64Stages4>(list, DType::kF32, Compute::kTF32);
    add_kernels<S8S32, Tile256Stages3, Tile128Stages4, Tile64Stages4>(list, DType::kS8, Compute::kS32);
    add_kernels<U8S32, Tile256Stages3, Tile128Stages4, Tile64Stages4>(list, DType::kU8, Compute::kS32);
    return list;
  }();
  return all;
}

constexpr std::array<int, 4> kSplits{2, 4, 8, 16};

// "<tile>" or "<tile>_k<splits>"
struct ParsedConfig {
  std::string_view tile;
  int splits = 1;
};

ParsedConfig parse_config(std::string_view config) {
  const size_t suffix = config.rfind("_k");
  if (suffix == std::string_view::npos) return {config, 1};
  ParsedConfig parsed{config.substr(0, suffix), 0};
  std::from_chars(config.data() + suffix + 2, config.data() + config.size(), parsed.splits);
  return parsed;
}

const Kernel* find_kernel(const Problem& p, std::string_view tile) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.in == p.a.dtype && kernel.compute == p.compute && kernel.config == tile) return &kernel;
  }
  return nullptr;
}

const std::vector<TypeRule>& type_rules() {
  static const std::vector<TypeRule> rules = [] {
    const std::vector<DType> floats{DType::kF16, DType::kBF16, DType::kF32};
    std::vector<TypeRule> list;
    for (const Kernel& kernel : kernels()) {
      list.push_back({kernel.in, kernel.compute, kernel.compute == Compute::kS32 ? std::vector{DType::kS32} : floats});
    }
    return list;
  }();
  return rules;
}

std::vector<std::string> make_configs() {
  std::vector<std::string> tiles;
  for (const Kernel& kernel : kernels()) {
    if (std::find(tiles.begin(), tiles.end(), kernel.config) == tiles.end()) tiles.push_back(kernel.config);
  }
  std::vector<std::string> configs = tiles;
  for (int splits : kSplits) {
    for (const std::string& tile : tiles) configs.push_back(tile + "_k" + std::to_string(splits));
  }
  return configs;
}

class MmaSync final : public Implementation {
 public:
  const char* name() const override { return "mma_sync"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> all = make_configs();
    return all;
  }

  Features features() const override { return kEpilogueFeatures; }

  std::string reject_rest(const Problem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    if (std::string rule = reject_types(p, type_rules()); !rule.empty()) return rule;
    if (std::string rule = reject_scalars(p); !rule.empty()) return rule;
    if (std::string rule = reject_column_sums(p); !rule.empty()) return rule;
    const ParsedConfig parsed = parse_config(config);
    const Kernel* kernel = find_kernel(p, parsed.tile);
    if (kernel == nullptr) {
      return "config " + std::string(config) + " is not built for " + name_of(p.a.dtype) + " with compute " +
             name_of(p.compute);
    }
    if (kernel->shared_bytes > device.shared_memory_bytes) {
      return "config " + std::string(config) + " needs " + std::to_string(kernel->shared_bytes) +
             " bytes of shared memory in a block, the device has " + std::to_string(device.shared_memory_bytes);
    }
    constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
    const int64_t tiles_m = (p.m + kernel->tile_m - 1) / kernel->tile_m;
    const int64_t tiles_n = (p.n + kernel->tile_n - 1) / kernel->tile_n;
    // Divisions, because the product of three such counts may not fit 64 bits.
    if (!p.is_empty() && tiles_m > kMaxBlocks / tiles_n / parsed.splits / p.batch) {
      return "config " + std::string(config) + " must make fewer than 2^31 blocks, got " + std::to_string(tiles_m) +
             "x" + std::to_string(tiles_n) + " tiles, batch " + std::to_string(p.batch) + " and " +
             std::to_string(parsed.splits) + " splits";
    }
    return "";
  }

  int64_t workspace_bytes(const Problem& p, const Device& device, std::string_view config) const override {
    const ParsedConfig parsed = parse_config(config);
    const Kernel* kernel = find_kernel(p, parsed.tile);
    return kernel == nullptr ? 0
                             : EpilogueLaunch::make(p, parsed.splits, kernel->has_epilogue).workspace_bytes(p, device);
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view config,
                void* stream_handle) const override {
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    const ParsedConfig parsed = parse_config(config);
    const Kernel* kernel = find_kernel(p, parsed.tile);
    if (kernel == nullptr) return Status::invalid("no kernel for config " + std::string(config));
    return EpilogueLaunch::make(p, parsed.splits, kernel->has_epilogue)
        .run(p, buffers, device, stream, [&](const Problem& product, const Buffers& product_buffers) {
          return kernel->launch(product, product_buffers, device, parsed.splits, stream);
        });
  }
};

}  // namespace

const Implementation* mma_sync() {
  static const MmaSync implementation;
  return &implementation;
}

}  // namespace tcgemm
