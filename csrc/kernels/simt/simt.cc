// simt_naive and simt_tiled: what they accept, and which kernel runs it.
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/simt/config.h"
#include "kernels/simt/launch.h"

namespace tcgemm {
namespace {

const std::vector<DType> kFloats{DType::kF32, DType::kF16, DType::kBF16};

class SimtNaive final : public Implementation {
 public:
  const char* name() const override { return "simt_naive"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> names{"8x32"};
    return names;
  }

  Features features() const override { return {Feature::kAlpha, Feature::kBeta}; }

  std::string reject_rest(const Problem& p, const Device& device, std::string_view config) const override {
    static const std::vector<TypeRule> rules{
        {DType::kF16, Compute::kF32, kFloats},       {DType::kBF16, Compute::kF32, kFloats},
        {DType::kF32, Compute::kF32, kFloats},       {DType::kF64, Compute::kF64, {DType::kF64}},
        {DType::kS8, Compute::kS32, {DType::kS32}},  {DType::kU8, Compute::kS32, {DType::kS32}},
        {DType::kC64, Compute::kF32, {DType::kC64}}, {DType::kC128, Compute::kF64, {DType::kC128}}};
    if (std::string reason = reject_device(device, 80); !reason.empty()) return reason;
    if (std::string reason = reject_types(p, rules); !reason.empty()) return reason;
    if (std::string reason = reject_scalars(p); !reason.empty()) return reason;
    return reject_grid(p, simt::NaiveConfig::kTileM, simt::NaiveConfig::kTileN);
  }

  std::vector<KernelSource> kernels(const Problem& p, const Device& device, std::string_view) const override {
    return {KernelReference(simt::naive_source(p)).source_for(device)};
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    Kernel* kernel = nullptr;
    if (Status s = KernelReference(simt::naive_source(p)).find(device, &kernel); !s.is_ok()) return s;
    return simt::launch_naive(p, buffers, *kernel, static_cast<cudaStream_t>(stream));
  }
};

class SimtTiled final : public Implementation {
 public:
  const char* name() const override { return "simt_tiled"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> names{"128x64x16", "128x128x16", "64x64x8"};
    return names;
  }

  Features features() const override { return {Feature::kAlpha, Feature::kBeta}; }

  std::string reject_rest(const Problem& p, const Device& device, std::string_view config) const override {
    static const std::vector<TypeRule> rules{{DType::kF32, Compute::kF32, kFloats},
                                             {DType::kF64, Compute::kF64, {DType::kF64}},
                                             {DType::kC64, Compute::kF32, {DType::kC64}},
                                             {DType::kC128, Compute::kF64, {DType::kC128}}};
    if (std::string reason = reject_device(device, 80); !reason.empty()) return reason;
    if (std::string reason = reject_types(p, rules); !reason.empty()) return reason;
    const bool is_small = config == "64x64x8";
    if (is_small == (p.a.dtype == DType::kF32)) {
      return "config " + std::string(config) + " multiplies " + (is_small ? "f64, c64, c128" : "f32") + ", got " +
             name_of(p.a.dtype);
    }
    return is_small ? reject_grid(p, 64, 64) : reject_grid(p, 128, config == "128x64x16" ? 64 : 128);
  }

  std::vector<KernelSource> kernels(const Problem& p, const Device& device, std::string_view config) const override {
    return {KernelReference(simt::tiled_source(p, config)).source_for(device)};
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    Kernel* kernel = nullptr;
    if (Status s = KernelReference(simt::tiled_source(p, config)).find(device, &kernel); !s.is_ok()) return s;
    return simt::launch_tiled(p, buffers, config, *kernel, static_cast<cudaStream_t>(stream));
  }
};

}  // namespace

const Implementation* simt_naive() {
  static const SimtNaive instance;
  return &instance;
}

const Implementation* simt_tiled() {
  static const SimtTiled instance;
  return &instance;
}

}  // namespace tcgemm
