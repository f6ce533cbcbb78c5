// "packed" behind the common interface.
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/packed/instance.h"
#include "kernels/packed/launch.h"

namespace tcgemm {
namespace packed {
namespace {

// Of products; a weight is written by one kernel alone. Columns of a block, its warps along K, and blocks of a cluster.
// The more columns, the less often x is read; the more blocks along K, the less the last of them hold the others up.
struct ConfigEntry {
  const char* name;
  int columns, warps_k, cluster;
};
constexpr std::array kConfigs{
    ConfigEntry{"128x2_c1", 128, 2, 1}, ConfigEntry{"128x2_c2", 128, 2, 2}, ConfigEntry{"128x2_c4", 128, 2, 4},
    ConfigEntry{"128x2_c8", 128, 2, 8}, ConfigEntry{"256x2_c1", 256, 2, 1}, ConfigEntry{"256x2_c2", 256, 2, 2},
    ConfigEntry{"256x2_c4", 256, 2, 4}, ConfigEntry{"256x2_c8", 256, 2, 8}, ConfigEntry{"64x4_c1", 64, 4, 1},
};

const ConfigEntry& entry_of(std::string_view config) {
  for (const ConfigEntry& entry : kConfigs) {
    if (config == entry.name) return entry;
  }
  return kConfigs[0];
}

// As many as rows need, of experts twice the mean, for they have more or less; of more than four, several passes over
// the weight.
int token_blocks(const PackedProblem& p) {
  const int64_t rows = p.is_grouped() ? 2 * ceil_div(p.m, p.num_sizes) : p.m;
  return rows <= 8 ? 1 : rows <= 16 ? 2 : 4;
}

// Whole columns, too, where one of the sizes is that of all rows: a scale for each.
Instance instance_of(const PackedProblem& p, const ConfigEntry& entry) {
  const bool has_groups = p.group_size == 32 || p.group_size == 64 || p.group_size == 128;
  const Tile tile{entry.columns, entry.warps_k, entry.cluster, token_blocks(p)};
  const Format format{static_cast<int>(p.bits), has_groups ? static_cast<int>(p.group_size) : 0, p.zero_points, p.table,
                      static_cast<int>(dtype_bytes(p.scale))};
  return {{tile, format}, static_cast<int>(p.zero), p.scale, p.in, p.is_grouped()};
}

class Packed final : public PackedImplementation {
 public:
  const char* name() const override { return "packed"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> all = [] {
      std::vector<std::string> names;
      for (const ConfigEntry& entry : kConfigs) names.emplace_back(entry.name);
      return names;
    }();
    return all;
  }

  Features features() const override { return {}; }

  std::string reject_rest(const PackedProblem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    if (p.k % 8 != 0)
      return "rows of x must begin on 16 bytes, so that k is a multiple of 8, got " + std::to_string(p.k);
    const Instance instance = instance_of(p, entry_of(config));
    if (instance.geometry.format.group == 0 && p.group_size != p.k) {
      return "groups must have 32, 64, 128 or all rows, got " + std::to_string(p.group_size);
    }
    if (!p.is_product()) return "";
    const Geometry& geometry = instance.geometry;
    const std::string named = "config " + std::string(config);
    if (geometry.tile.cluster > 1 && device.compute_capability < 90) {
      return named + " has clusters, which begin with compute capability 9.0";
    }
    if (geometry.shared_bytes() > device.shared_memory_bytes) {
      return named + " needs " + std::to_string(geometry.shared_bytes()) +
             " bytes of shared memory in a block, the device has " + std::to_string(device.shared_memory_bytes);
    }
    if (geometry.spills())
      return named + " lacks registers for zero points, tables or groups of 32 or 64 beside more than 16 rows";
    if (num_blocks(p, geometry.tile) > (int64_t{1} << 31) - 1) {
      return named + " would have more than 2^31 - 1 blocks";
    }
    if (p.all_tiles() > (int64_t{1} << 31) - 1) return "experts must have at most 2^31 - 1 tiles of 16 columns in all";
    return "";
  }

  std::vector<KernelSource> kernels(const PackedProblem& p, const Device& device,
                                    std::string_view config) const override {
    if (!p.is_product()) return {};
    return reference_to(instance_of(p, entry_of(config))).missing(device);
  }

  Status launch(const PackedProblem& p, const PackedBuffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    for (const void* array :
         {buffers.x, buffers.values, buffers.scales, buffers.zero_points, static_cast<const void*>(buffers.d)}) {
      if (!is_aligned(array, 16)) return Status::invalid("arrays must begin on 16 bytes");
    }
    if (!p.is_product()) return launch_weight(p, buffers, static_cast<cudaStream_t>(stream));
    const Instance instance = instance_of(p, entry_of(config));
    Call call{nullptr, instance.geometry, &p, buffers, static_cast<cudaStream_t>(stream)};
    if (Status s = reference_to(instance).find(device, &call.kernel); !s.is_ok()) return s;
    return packed::launch(call);
  }

 private:
  // Made as they are asked for: there are hundreds.
  const KernelReference& reference_to(const Instance& x) const {
    const Tile& tile = x.geometry.tile;
    const Format& format = x.geometry.format;
    const Key key{
        tile.columns,       tile.warps_k, tile.cluster, tile.token_blocks,         format.bits,           format.group,
        format.zero_points, format.table, x.zero,       static_cast<int>(x.scale), static_cast<int>(x.x), x.grouped};
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = references_.find(key);
    if (found != references_.end()) return *found->second;
    kept_.emplace_back(kernel_source(x));
    return *references_.emplace(key, &kept_.back()).first->second;
  }

  using Key = std::array<int, 12>;
  mutable std::mutex mutex_;
  mutable std::deque<KernelReference> kept_;
  mutable std::map<Key, const KernelReference*> references_;
};

}  // namespace
}  // namespace packed

const PackedImplementation* packed_products() {
  static const packed::Packed implementation;
  return &implementation;
}

}  // namespace tcgemm
