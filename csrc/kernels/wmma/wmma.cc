// wmma_naive and wmma_tiled: what they accept, and which instantiation runs it.
#include "kernels/common/epilogue_launch.h"
#include "kernels/common/kernel.h"
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/wmma/launch.h"

namespace tcgemm {
namespace {

constexpr std::string_view kSatf = "_satf";

// "m16n16k16_128x128x32_satf"; wmma_naive's names have no tile.
wmma::ConfigName parse(std::string_view name) {
  const bool saturates = name.size() > kSatf.size() && name.substr(name.size() - kSatf.size()) == kSatf;
  if (saturates) name.remove_suffix(kSatf.size());
  const size_t underscore = name.find('_');
  if (underscore == std::string_view::npos) return {name, "", saturates};
  return {name.substr(0, underscore), name.substr(underscore + 1), saturates};
}

bool is_8bit(DType dtype) { return dtype == DType::kS8 || dtype == DType::kU8; }
bool is_16bit(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

// Types and shape, alike for both implementations.
std::string reject_common(const Problem& p, const Device& device, const wmma::ConfigName& config) {
  static const std::vector<DType> floats{DType::kF32, DType::kF16, DType::kBF16};
  static const std::vector<TypeRule> rules{
      {DType::kF16, Compute::kF32, floats},        {DType::kF16, Compute::kF16, floats},
      {DType::kBF16, Compute::kF32, floats},       {DType::kF32, Compute::kTF32, floats},
      {DType::kF64, Compute::kF64, {DType::kF64}}, {DType::kS8, Compute::kS32, {DType::kS32}},
      {DType::kU8, Compute::kS32, {DType::kS32}}};
  if (std::string reason = reject_device(device, 80); !reason.empty()) return reason;
  if (std::string reason = reject_types(p, rules); !reason.empty()) return reason;
  if (std::string reason = reject_scalars(p); !reason.empty()) return reason;
  const bool is_tf32 = config.shape == "m16n16k8", is_f64 = config.shape == "m8n8k4";
  const bool fits = is_tf32  ? p.a.dtype == DType::kF32
                    : is_f64 ? p.a.dtype == DType::kF64
                             : is_16bit(p.a.dtype) || is_8bit(p.a.dtype);
  if (!fits) {
    return "shape " + std::string(config.shape) + " multiplies " +
           (is_tf32  ? "f32 as tf32"
            : is_f64 ? "f64"
                     : "f16, bf16, s8, u8") +
           ", got " + name_of(p.a.dtype);
  }
  if (config.saturates && p.compute != Compute::kF16 && p.compute != Compute::kS32) {
    return std::string("only f16 and s32 accumulators saturate, got compute ") + name_of(p.compute);
  }
  return "";
}

// What both have: kernels of bare products, and all else by a second one, but for alpha and beta of exact sums, and for
// functions where the kernel runs them.
class Wmma : public Implementation {
 public:
  Features features() const override { return kEpilogueFeatures; }

  Features config_features(std::string_view config) const override {
    return parse(config).shape == "m8n8k4" ? Features{Feature::kAlpha, Feature::kBeta} : kEpilogueFeatures;
  }

  int64_t workspace_bytes(const Problem& p, const Device&, std::string_view) const override {
    return launch_of(p).workspace_bytes(p);
  }

  std::vector<KernelSource> kernels(const Problem& p, const Device& device, std::string_view name) const override {
    const EpilogueLaunch launch = launch_of(p);
    std::vector<KernelSource> all = launch.kernels(p, device);
    all.push_back(KernelReference(source_of(launch.product_of(p), parse(name))).source_for(device));
    return all;
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view name,
                void* stream_handle) const override {
    const wmma::ConfigName config = parse(name);
    const auto stream = static_cast<cudaStream_t>(stream_handle);
    return launch_of(p).run(p, buffers, device, stream, [&](const Problem& product, const Buffers& product_buffers) {
      Kernel* kernel = nullptr;
      if (Status s = KernelReference(source_of(product, config)).find(device, &kernel); !s.is_ok()) return s;
      return launch_product(product, product_buffers, config, *kernel, stream);
    });
  }

 protected:
  virtual bool runs_function(const Problem&) const { return false; }

  // The kernel of a product that it stores itself, and its launch.
  virtual KernelSource source_of(const Problem& p, const wmma::ConfigName& config) const = 0;
  virtual Status launch_product(const Problem& p, const Buffers& buffers, const wmma::ConfigName& config,
                                const Kernel& kernel, cudaStream_t stream) const = 0;

 private:
  EpilogueLaunch launch_of(const Problem& p) const {
    const bool is_exact = p.compute == Compute::kS32 || p.compute == Compute::kF64;
    return EpilogueLaunch::make(p, 1, runs_function(p) || (is_exact && p.epilogue.is_none()));
  }
};

class WmmaNaive final : public Wmma {
 public:
  const char* name() const override { return "wmma_naive"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> names{"m16n16k16", "m32n8k16",       "m8n32k16",      "m16n16k8",
                                                "m8n8k4",    "m16n16k16_satf", "m32n8k16_satf", "m8n32k16_satf"};
    return names;
  }

  std::string reject_rest(const Problem& p, const Device& device, std::string_view name) const override {
    const wmma::ConfigName config = parse(name);
    if (std::string reason = reject_common(p, device, config); !reason.empty()) return reason;
    if (config.shape == "m32n8k16") return reject_grid(p, 32, 8);
    if (config.shape == "m8n32k16") return reject_grid(p, 8, 32);
    return config.shape == "m8n8k4" ? reject_grid(p, 8, 8) : reject_grid(p, 16, 16);
  }

 private:
  KernelSource source_of(const Problem& p, const wmma::ConfigName& config) const override {
    return wmma::naive_source(p, config);
  }

  Status launch_product(const Problem& p, const Buffers& buffers, const wmma::ConfigName& config, const Kernel& kernel,
                        cudaStream_t stream) const override {
    return wmma::launch_naive(p, buffers, config, kernel, stream);
  }
};

class WmmaTiled final : public Wmma {
 public:
  const char* name() const override { return "wmma_tiled"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> names{
        "m16n16k16_128x128x32",      "m16n16k16_64x64x32",       "m32n8k16_128x128x32",
        "m8n32k16_128x128x32",       "m16n16k16_128x128x64",     "m32n8k16_128x128x64",
        "m8n32k16_128x128x64",       "m16n16k8_128x128x16",      "m8n8k4_64x128x16",
        "m16n16k16_128x128x32_satf", "m32n8k16_128x128x32_satf", "m8n32k16_128x128x32_satf",
        "m16n16k16_128x128x64_satf", "m32n8k16_128x128x64_satf", "m8n32k16_128x128x64_satf"};
    return names;
  }

  std::string reject_rest(const Problem& p, const Device& device, std::string_view name) const override {
    const wmma::ConfigName config = parse(name);
    if (std::string reason = reject_common(p, device, config); !reason.empty()) return reason;
    if (is_8bit(p.a.dtype) != (config.tile == "128x128x64")) {
      return "tile " + std::string(config.tile) +
             (is_8bit(p.a.dtype) ? " does not multiply " : " multiplies s8, u8, got ") + name_of(p.a.dtype);
    }
    if (config.tile == "64x64x32" && p.compute == Compute::kF16)
      return "tile 64x64x32 accumulates in f32, got compute f16";
    constexpr int64_t kSharedBytes = 96 * 1024;  // no config needs more
    if (device.shared_memory_bytes < kSharedBytes) {
      return "a block must be able to have " + std::to_string(kSharedBytes) + " bytes of shared memory, got " +
             std::to_string(device.shared_memory_bytes);
    }
    if (config.tile == "64x64x32") return reject_grid(p, 64, 64);
    return config.tile == "64x128x16" ? reject_grid(p, 64, 128) : reject_grid(p, 128, 128);
  }

 private:
  bool runs_function(const Problem& p) const override { return is_function_of_sums(p); }

  KernelSource source_of(const Problem& p, const wmma::ConfigName& config) const override {
    return wmma::tiled_source(p, config, runs_function(p));
  }

  Status launch_product(const Problem& p, const Buffers& buffers, const wmma::ConfigName& config, const Kernel& kernel,
                        cudaStream_t stream) const override {
    return wmma::launch_tiled(p, buffers, config, runs_function(p), kernel, stream);
  }
};

}  // namespace

const Implementation* wmma_naive() {
  static const WmmaNaive instance;
  return &instance;
}

const Implementation* wmma_tiled() {
  static const WmmaTiled instance;
  return &instance;
}

}  // namespace tcgemm
