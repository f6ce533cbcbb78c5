// Sums and products of rows behind the common interface.
#include <string>

#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/rows/launch.h"

namespace tcgemm {
namespace {

class SimtRows final : public RowsImplementation {
 public:
  const char* name() const override { return "simt"; }
  const std::vector<std::string>& configs() const override { return configs_; }

  Features features() const override { return {Feature::kWeighted}; }

  std::string reject_rest(const RowsProblem& p, const Device& device, std::string_view) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    if (p.in == DType::kF64) return "rows must be f16, bf16 or f32, got f64";
    return rows::most_blocks(p) <= (int64_t{1} << 31) - 1 ? "" : "the grid must have at most 2^31 - 1 blocks";
  }

  Status launch(const RowsProblem& p, const RowsBuffers& buffers, const Device&, std::string_view,
                void* stream) const override {
    return rows::launch(p, buffers, static_cast<cudaStream_t>(stream));
  }

 private:
  const std::vector<std::string> configs_{"default"};
};

}  // namespace

const RowsImplementation* simt_rows() {
  static const SimtRows implementation;
  return &implementation;
}

}  // namespace tcgemm
