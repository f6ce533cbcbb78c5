// "quantize" behind the common interface.
#include <array>
#include <string>

#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/quantize/instance.h"
#include "kernels/quantize/launch.h"

namespace tcgemm {
namespace quantize {
namespace {

class Quantize final : public QuantizeImplementation {
 public:
  const char* name() const override { return "quantize"; }
  const std::vector<std::string>& configs() const override { return configs_; }

  Features features() const override { return {}; }

  std::string reject_rest(const QuantizeProblem& p, const Device& device, std::string_view) const override {
    // Instructions that convert to 8-bit floats begin there.
    if (std::string rule = reject_device(device, p.out == DType::kS8 ? 80 : 89); !rule.empty()) return rule;
    constexpr int64_t kMax = (int64_t{1} << 31) - 1;
    if (p.form == QuantizeForm::kRows && multiply_add(p.batch, p.rows, 0) > kMax) {
      return "x must have at most 2^31 - 1 rows";
    }
    return num_blocks(p) <= kMax ? "" : "the grid must have at most 2^31 - 1 blocks";
  }

  std::vector<KernelSource> kernels(const QuantizeProblem& p, const Device& device, std::string_view) const override {
    return {reference_to(p).source_for(device)};
  }

  Status launch(const QuantizeProblem& p, const QuantizeBuffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    Kernel* kernel = nullptr;
    if (Status s = reference_to(p).find(device, &kernel); !s.is_ok()) return s;
    return quantize::launch(p, buffers, *kernel, static_cast<cudaStream_t>(stream));
  }

 private:
  const KernelReference& reference_to(const QuantizeProblem& p) const {
    const Key key{static_cast<int>(p.form),
                  p.transposed,
                  static_cast<int>(p.in),
                  static_cast<int>(p.out),
                  p.form == QuantizeForm::kRows ? row_warps(p.columns) : 0,
                  has_vectors(p)};
    return references_.get(key, [&] { return kernel_source(p); });
  }

  using Key = std::array<int, 6>;
  const std::vector<std::string> configs_{"default"};
  mutable KernelReferences<Key> references_;
};

}  // namespace
}  // namespace quantize

const QuantizeImplementation* quantizer() {
  static const quantize::Quantize implementation;
  return &implementation;
}

}  // namespace tcgemm
