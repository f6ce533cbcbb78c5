// The implementation "mma_sync": what runs, and by which kernel.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <deque>
#include <string>
#include <type_traits>

#include "core/extent.h"
#include "kernels/common/epilogue_launch.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/mma_sync/config.h"
#include "kernels/mma_sync/instance.h"
#include "kernels/mma_sync/instructions.h"
#include "kernels/mma_sync/launch.h"

namespace tcgemm {
namespace mma {
namespace {

using tile::Major;

struct TileRow {
  Tile tile;
  bool of_every_type;
};

constexpr TileRow kTiles[] = {
#define TCGEMM_ENTRY(m, n, k_bytes, warp_m, warp_n, stages, min_blocks_per_sm, of_every_type) \
  {{m, n, k_bytes, warp_m, warp_n, stages, min_blocks_per_sm}, of_every_type},
    TCGEMM_MMA_SYNC_TILES(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
};

// One config of one instruction.
struct Entry {
  std::string config;
  const Instruction* instruction;
  Tile tile;

  static Entry make(const Instruction& x, const TileRow& row) {
    const Tile& tile = row.tile;
    const auto text = [](int number) { return std::to_string(number); };
    return {text(tile.m) + "x" + text(tile.n) + "x" + text(tile.k_bytes / x.mma_bytes) + "_w" + text(tile.warp_m) +
                "x" + text(tile.warp_n) + "_s" + text(tile.stages),
            &x, tile};
  }

  Geometry geometry(Major a, Major b) const {
    const auto bytes = [](const Instruction::Input& x) { return static_cast<int>(dtype_bytes(x.dtype)); };
    return {tile, instruction->mma_bytes, {Role::kA, bytes(instruction->a), a}, {Role::kB, bytes(instruction->b), b}};
  }
};

// For each instruction in order of preference.
const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = [] {
    std::vector<Entry> list;
    for (const Instruction& x : instructions()) {
      for (const TileRow& row : kTiles) {
        if (x.has_every_tile || row.of_every_type) list.push_back(Entry::make(x, row));
      }
    }
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

const Entry* find_entry(const Problem& p, std::string_view tile) {
  for (const Entry& entry : entries()) {
    const Instruction& x = *entry.instruction;
    if (x.a.dtype == p.a.dtype && x.b.dtype == p.b.dtype && x.compute == p.compute && entry.config == tile) {
      return &entry;
    }
  }
  return nullptr;
}

const std::vector<TypeRule>& type_rules() {
  static const std::vector<TypeRule> rules = [] {
    const std::vector<DType> floats{DType::kF16, DType::kBF16, DType::kF32};
    std::vector<TypeRule> list;
    for (const Instruction& x : instructions()) {
      list.emplace_back(x.a.dtype, x.b.dtype, x.compute,
                        x.compute == Compute::kS32 ? std::vector{DType::kS32} : floats);
    }
    return list;
  }();
  return rules;
}

std::vector<std::string> make_configs() {
  std::vector<std::string> tiles;
  for (const Entry& entry : entries()) {
    if (std::find(tiles.begin(), tiles.end(), entry.config) == tiles.end()) tiles.push_back(entry.config);
  }
  std::vector<std::string> configs = tiles;
  for (int splits : kSplits) {
    for (const std::string& tile : tiles) configs.push_back(tile + "_k" + std::to_string(splits));
  }
  return configs;
}

Major major_of_a(const Problem& p) { return p.a.transposed ? Major::kMN : Major::kK; }
Major major_of_b(const Problem& p) { return p.b.transposed ? Major::kK : Major::kMN; }

class MmaSync final : public Implementation {
 public:
  MmaSync() {
    for (const Entry& entry : entries()) {
      for (Major a : {Major::kK, Major::kMN}) {
        for (Major b : {Major::kK, Major::kMN}) {
          for (bool symmetric : {false, true}) {
            const EpilogueKind kind = kind_without_function(entry, symmetric);
            kernels_.emplace_back(kernel_source(instance_of(entry, a, b), kind));
          }
        }
      }
    }
  }

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
    const ParsedConfig parsed = parse_config(config);
    const Entry* entry = find_entry(p, parsed.tile);
    if (entry == nullptr) {
      return "config " + std::string(config) + " is not built for " + name_of(p.a.dtype) + " with compute " +
             name_of(p.compute);
    }
    const int shared_bytes = entry->geometry(major_of_a(p), major_of_b(p)).shared_bytes();
    if (shared_bytes > device.shared_memory_bytes) {
      return "config " + std::string(config) + " needs " + std::to_string(shared_bytes) +
             " bytes of shared memory in a block, the device has " + std::to_string(device.shared_memory_bytes);
    }
    constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
    const int64_t tiles_m = ceil_div(p.m, entry->tile.m);
    const int64_t tiles_n = ceil_div(p.n, entry->tile.n);
    // Divisions, because the product of three such counts may not fit 64 bits.
    if (!p.is_empty() && tiles_m > kMaxBlocks / tiles_n / parsed.splits / p.batch) {
      return "config " + std::string(config) + " must make fewer than 2^31 blocks, got " + std::to_string(tiles_m) +
             "x" + std::to_string(tiles_n) + " tiles, batch " + std::to_string(p.batch) + " and " +
             std::to_string(parsed.splits) + " splits";
    }
    return "";
  }

  int64_t workspace_bytes(const Problem& p, const Device&, std::string_view config) const override {
    const ParsedConfig parsed = parse_config(config);
    const Entry* entry = find_entry(p, parsed.tile);
    return entry == nullptr ? 0 : launch_of(p, parsed).workspace_bytes(p);
  }

  std::vector<KernelSource> kernels(const Problem& p, const Device& device, std::string_view config) const override {
    const ParsedConfig parsed = parse_config(config);
    const Entry* entry = find_entry(p, parsed.tile);
    if (entry == nullptr) return {};
    const EpilogueLaunch launch = launch_of(p, parsed);
    std::vector<KernelSource> needed = launch.kernels(p, device);
    const EpilogueKind kind = kind_of(p, *entry, launch);
    needed.push_back(with_kernel_of(p, *entry, kind, [&](const auto& x) { return x.source_for(device); }));
    return needed;
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    const ParsedConfig parsed = parse_config(config);
    const Entry* entry = find_entry(p, parsed.tile);
    if (entry == nullptr) return Status::invalid("no kernel for config " + std::string(config));
    Call call{};
    call.geometry = entry->geometry(major_of_a(p), major_of_b(p));
    call.has_tma = device.compute_capability >= 90;
    call.num_splits = parsed.splits;
    call.stream = static_cast<cudaStream_t>(stream);
    const EpilogueLaunch by = launch_of(p, parsed);
    call.epilogue = kind_of(p, *entry, by);
    const auto product = [&](const Problem& partial, const Buffers& partial_buffers) {
      const auto find = [&](const KernelReference& x) { return x.find(device, &call.kernel); };
      if (Status s = with_kernel_of(partial, *entry, call.epilogue, find); !s.is_ok()) return s;
      call.problem = &partial;
      call.buffers = &partial_buffers;
      return launch_product(call);
    };
    return by.run(p, buffers, device, call.stream, product);
  }

 private:
  static EpilogueLaunch launch_of(const Problem& p, const ParsedConfig& parsed) {
    const bool is_scaled = p.compute == Compute::kS32 && p.epilogue.is_none();
    return EpilogueLaunch::make(p, parsed.splits, is_function_of_sums(p) || is_scaled);
  }

  static EpilogueKind kind_without_function(const Entry& entry, bool symmetric) {
    if (entry.instruction->compute == Compute::kS32) {
      return symmetric ? EpilogueKind::kSymmetricScaled : EpilogueKind::kScaled;
    }
    return symmetric ? EpilogueKind::kSymmetricBare : EpilogueKind::kBare;
  }

  // The epilogue of the kernel that multiplies. Half of a symmetric D is computed if D is larger than one square and no
  // function of this kernel stores it.
  static EpilogueKind kind_of(const Problem& p, const Entry& entry, const EpilogueLaunch& launch) {
    if (launch.is_direct && !p.epilogue.function.is_none()) return EpilogueKind::kFunction;
    const bool is_of_squares = p.m == p.n && p.m > entry.tile.symmetric_side();
    return kind_without_function(entry, p.symmetric && !p.has_two_b() && is_of_squares);
  }

  static Instance instance_of(const Entry& entry, Major a, Major b) {
    const Instruction& x = *entry.instruction;
    return {entry.tile, x.mma, operands_text(x.a.text(a), x.b.text(b))};
  }

  // Calls f with the kernel that multiplies.
  template <typename Visitor>
  std::invoke_result_t<Visitor, const KernelReference&> with_kernel_of(const Problem& p, const Entry& entry,
                                                                       EpilogueKind kind, Visitor&& f) const {
    const Major a = major_of_a(p), b = major_of_b(p);
    if (kind == EpilogueKind::kFunction) {
      const Instance instance = instance_of(entry, a, b);
      return f(KernelReference(kernel_source(instance, EpilogueKind::kFunction, p.epilogue.function.name)));
    }
    const size_t row = &entry - entries().data();
    return f(kernels_[row * 8 + (a == Major::kMN) * 4 + (b == Major::kMN) * 2 + is_symmetric(kind)]);
  }

  std::deque<KernelReference> kernels_;  // [entry][major of A][of B][symmetric]
};

}  // namespace
}  // namespace mma

const Implementation* mma_sync() {
  static const mma::MmaSync implementation;
  return &implementation;
}

}  // namespace tcgemm
