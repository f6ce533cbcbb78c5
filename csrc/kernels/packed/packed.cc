// "packed" behind the common interface.
#include <array>
#include <string>
#include <tuple>

#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/packed/instance.h"
#include "kernels/packed/launch.h"
#include "kernels/packed/wide_launch.h"

namespace tcgemm {
namespace packed {
namespace {

// Of products; a weight is written by one kernel alone. Columns of a block, its warps along K, and blocks of a cluster.
// The more columns, the less often x is read; the more blocks along K, the less the last of them hold the others up.
// Wide ones, of wide_kernel.cuh and dequantizing_kernel.cuh, have no warps along K, as many rows as they say, and may
// share x.
struct ConfigEntry {
  const char* name;
  int columns, warps_k, cluster;
  int rows = 0, multicast_size = 1;
  bool dequantizes = false;

  bool is_wide() const { return rows != 0; }
  WideTile wide_tile() const { return {columns, rows, cluster, multicast_size, dequantizes}; }
};
constexpr std::array kConfigs{
    ConfigEntry{"128x2_c1", 128, 2, 1},
    ConfigEntry{"128x2_c2", 128, 2, 2},
    ConfigEntry{"128x2_c4", 128, 2, 4},
    ConfigEntry{"128x2_c8", 128, 2, 8},
    ConfigEntry{"256x2_c1", 256, 2, 1},
    ConfigEntry{"256x2_c2", 256, 2, 2},
    ConfigEntry{"256x2_c4", 256, 2, 4},
    ConfigEntry{"256x2_c8", 256, 2, 8},
    ConfigEntry{"64x4_c1", 64, 4, 1},
    ConfigEntry{"64x4_c2", 64, 4, 2},
    ConfigEntry{"w128x64_c1", 128, 0, 1, 64},
    ConfigEntry{"w128x64_c2", 128, 0, 2, 64},
    ConfigEntry{"w128x64_c4", 128, 0, 4, 64},
    ConfigEntry{"w128x64_m2", 128, 0, 1, 64, 2},
    ConfigEntry{"w128x96_c1", 128, 0, 1, 96},
    ConfigEntry{"w128x96_c2", 128, 0, 2, 96},
    ConfigEntry{"w128x96_m2", 128, 0, 1, 96, 2},
    ConfigEntry{"w128x128_c1", 128, 0, 1, 128},
    ConfigEntry{"w128x128_c2", 128, 0, 2, 128},
    ConfigEntry{"w128x128_c4", 128, 0, 4, 128},
    ConfigEntry{"w128x128_m2", 128, 0, 1, 128, 2},
    ConfigEntry{"w256x64_c1", 256, 0, 1, 64},
    ConfigEntry{"w256x64_c2", 256, 0, 2, 64},
    ConfigEntry{"d128x64_c1", 128, 0, 1, 64, 1, true},
    ConfigEntry{"d128x64_c2", 128, 0, 2, 64, 1, true},
    ConfigEntry{"d128x64_c4", 128, 0, 4, 64, 1, true},
    ConfigEntry{"d128x64_c8", 128, 0, 8, 64, 1, true},
    ConfigEntry{"d128x96_c1", 128, 0, 1, 96, 1, true},
    ConfigEntry{"d128x96_c2", 128, 0, 2, 96, 1, true},
    ConfigEntry{"d128x96_c4", 128, 0, 4, 96, 1, true},
    ConfigEntry{"d128x96_c8", 128, 0, 8, 96, 1, true},
    ConfigEntry{"d128x128_c1", 128, 0, 1, 128, 1, true},
    ConfigEntry{"d128x128_c2", 128, 0, 2, 128, 1, true},
    ConfigEntry{"d128x128_c4", 128, 0, 4, 128, 1, true},
    ConfigEntry{"d128x128_c8", 128, 0, 8, 128, 1, true},
    ConfigEntry{"d128x160_c1", 128, 0, 1, 160, 1, true},
    ConfigEntry{"d128x160_c2", 128, 0, 2, 160, 1, true},
    ConfigEntry{"d128x192_c1", 128, 0, 1, 192, 1, true},
    ConfigEntry{"d128x192_c2", 128, 0, 2, 192, 1, true},
    ConfigEntry{"d128x224_c1", 128, 0, 1, 224, 1, true},
    ConfigEntry{"d128x256_c1", 128, 0, 1, 256, 1, true},
};

const ConfigEntry& entry_of(std::string_view config) {
  for (const ConfigEntry& entry : kConfigs) {
    if (config == entry.name) return entry;
  }
  return kConfigs[0];
}

// As many as rows need, of experts twice the mean, for they have more or less; of more than four, several passes over
// the weight.
Tile tile_of(const PackedProblem& p, const ConfigEntry& entry) {
  const int64_t rows = p.is_grouped() ? 2 * ceil_div(p.m, p.num_sizes) : p.m;
  return {entry.columns, entry.warps_k, entry.cluster, rows <= 8 ? 1 : rows <= 16 ? 2 : 4};
}

// Whole columns, too, where one of the sizes is that of all rows: a scale for each.
Types types_of(const PackedProblem& p) {
  const bool has_groups = p.group_size == 16 || p.group_size == 32 || p.group_size == 64 || p.group_size == 128;
  const Format format{static_cast<int>(p.bits), has_groups ? static_cast<int>(p.group_size) : 0, p.zero_points, p.code,
                      static_cast<int>(dtype_bytes(p.scale))};
  return {format, static_cast<int>(p.zero), p.scale, p.in, p.is_grouped()};
}

WideGeometry wide_geometry(const PackedProblem& p, const WideTile& tile) {
  return {tile, types_of(p).format, static_cast<int>(dtype_bytes(p.in))};
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

  Features features() const override { return {Feature::kGated, Feature::kFunction}; }

  std::string reject_rest(const PackedProblem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    if (p.k % 8 != 0)
      return "rows of x must begin on 16 bytes, so that k is a multiple of 8, got " + std::to_string(p.k);
    const ConfigEntry& entry = entry_of(config);
    const Types types = types_of(p);
    if (types.format.group == 0 && p.group_size != p.k) {
      return "groups must have 16, 32, 64, 128 or all rows, got " + std::to_string(p.group_size);
    }
    if (!p.is_product()) return "";
    const std::string named = "config " + std::string(config);
    if (entry.is_wide()) return reject_wide(p, device, entry.wide_tile(), named);
    if (p.row_scales) return named + " multiplies f16 and bf16, got x of f8e4m3fn, which those with a w take";
    const Geometry geometry{tile_of(p, entry), types.format};
    if (geometry.tile.cluster > 1 && device.compute_capability < 90) {
      return named + " has clusters, which begin with compute capability 9.0";
    }
    if (geometry.shared_bytes() > device.shared_memory_bytes)
      return lacks_memory(named, geometry.shared_bytes(), device);
    if (geometry.spills())
      return named + " lacks registers for more than 16 rows of x with zero points, tables or groups of fewer than " +
             std::to_string(kWarpK) + " rows of the weight";
    return reject_grid(p, geometry.tile.columns, geometry.tile.rows(), geometry.tile.cluster, named);
  }

  int64_t workspace_bytes(const PackedProblem& p, const Device& device, std::string_view config) const override {
    return p.is_product() && entry_of(config).is_wide() ? ordered_bytes(p, p.m) : 0;
  }

  std::vector<KernelSource> kernels(const PackedProblem& p, const Device& device,
                                    std::string_view config) const override {
    if (!p.is_product()) return {reference_to_weight(p).source_for(device)};
    const ConfigEntry& entry = entry_of(config);
    std::vector<KernelSource> all{
        with_reference_to(p, entry, [&](const KernelReference& x) { return x.source_for(device); })};
    if (entry.is_wide()) all.push_back(reference_to_order(p).source_for(device));
    return all;
  }

  Status launch(const PackedProblem& p, const PackedBuffers& buffers, const Device& device, std::string_view config,
                void* cuda_stream) const override {
    const auto stream = static_cast<cudaStream_t>(cuda_stream);
    for (const void* array : {buffers.x, buffers.values, buffers.scales, buffers.zero_points,
                              static_cast<const void*>(buffers.d), static_cast<const void*>(buffers.workspace)}) {
      if (!is_aligned(array, 16)) return Status::invalid("arrays must begin on 16 bytes");
    }
    Kernel *kernel = nullptr, *order = nullptr;
    if (!p.is_product()) {
      if (Status s = reference_to_weight(p).find(device, &kernel); !s.is_ok()) return s;
      return launch_weight(p, buffers, *kernel, stream);
    }
    const ConfigEntry& entry = entry_of(config);
    const auto find = [&](const KernelReference& x) { return x.find(device, &kernel); };
    if (Status s = with_reference_to(p, entry, find); !s.is_ok()) return s;
    if (entry.is_wide()) {
      if (Status s = reference_to_order(p).find(device, &order); !s.is_ok()) return s;
      return launch_wide({kernel, order, wide_geometry(p, entry.wide_tile()), &p, buffers, stream});
    }
    return packed::launch({kernel, {tile_of(p, entry), types_of(p).format}, &p, buffers, stream});
  }

 private:
  static std::string lacks_memory(const std::string& named, int shared_bytes, const Device& device) {
    return named + " needs " + std::to_string(shared_bytes) + " bytes of shared memory in a block, the device has " +
           std::to_string(device.shared_memory_bytes);
  }

  static std::string reject_grid(const PackedProblem& p, int columns, int rows, int cluster, const std::string& named) {
    constexpr int64_t kMax = (int64_t{1} << 31) - 1;
    if (num_blocks(p, columns, rows, cluster) > kMax) return named + " would have more than 2^31 - 1 blocks";
    if (p.all_tiles() > kMax) return "experts must have at most 2^31 - 1 tiles of 16 columns in all";
    return "";
  }

  static std::string reject_wide(const PackedProblem& p, const Device& device, const WideTile& tile,
                                 const std::string& named) {
    if (std::string rule = reject_other_devices(device, 90); !rule.empty()) return named + " is of wgmma: " + rule;
    if (tile.dequantizes && p.row_scales) return named + " multiplies f16 and bf16, got x of f8e4m3fn";
    const WideGeometry geometry = wide_geometry(p, tile);
    if (!tile.dequantizes && geometry.format.group == 16) return named + " has no accumulators for groups of 16 rows";
    if (p.epilogue.gated && geometry.scales_bytes() / 2 % 128 != 0) {
      return named + " loads scales of gate and up that begin on 128 bytes, which one of 8 bits for a stage does not";
    }
    if (geometry.shared_bytes() > device.shared_memory_bytes)
      return lacks_memory(named, geometry.shared_bytes(), device);
    if (num_order_blocks(p) > (int64_t{1} << 31) - 1) return named + " would copy x by more than 2^31 - 1 blocks";
    return reject_grid(p, tile.columns * tile.multicast_size, tile.rows(), tile.blocks(), named);
  }

  // Calls f with the kernel that multiplies, and runs the problem's function if there is one.
  template <typename Visitor>
  std::invoke_result_t<Visitor, const KernelReference&> with_reference_to(const PackedProblem& p,
                                                                          const ConfigEntry& entry, Visitor&& f) const {
    const Types types = types_of(p);
    const Tile tile = tile_of(p, entry);
    const auto source = [&](const std::string& function = "") {
      return entry.is_wide() ? kernel_source(entry.wide_tile(), types, function) : kernel_source(tile, types, function);
    };
    if (!p.epilogue.is_none()) return f(KernelReference(source(p.epilogue.function.name)));
    // Made as they are asked for: there are hundreds.
    return f(references_.get(key_of(entry, tile, types), source));
  }

  static std::array<int, 14> key_of(const ConfigEntry& entry, const Tile& tile, const Types& types) {
    const Format& format = types.format;
    return {tile.columns,
            tile.warps_k,
            tile.cluster,
            entry.is_wide() ? entry.rows : tile.token_blocks,
            entry.multicast_size,
            entry.dequantizes,
            format.bits,
            format.group,
            format.zero_points,
            static_cast<int>(format.code),
            types.zero,
            static_cast<int>(types.scale),
            static_cast<int>(types.x),
            types.grouped};
  }

  const KernelReference& reference_to_order(const PackedProblem& p) const {
    const int element_bytes = static_cast<int>(dtype_bytes(p.in));
    return orders_.get(element_bytes, [&] { return order_source(element_bytes); });
  }

  const KernelReference& reference_to_weight(const PackedProblem& p) const {
    const Format format = types_of(p).format;
    const std::array key{format.bits, static_cast<int>(format.code), static_cast<int>(p.out),
                         static_cast<int>(p.scale)};
    return weights_.get(key, [&] { return weight_source(format, p.out, p.scale); });
  }

  mutable KernelReferences<std::array<int, 14>> references_;
  mutable KernelReferences<int> orders_;
  mutable KernelReferences<std::array<int, 4>> weights_;
};

}  // namespace
}  // namespace packed

const PackedImplementation* packed_products() {
  static const packed::Packed implementation;
  return &implementation;
}

}  // namespace tcgemm
