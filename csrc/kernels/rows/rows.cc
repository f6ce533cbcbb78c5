// Sums and products of rows behind the common interface.
#include <array>
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

  // Where arrays begin is known to a call only.
  std::vector<KernelSource> kernels(const RowsProblem& p, const Device& device, std::string_view) const override {
    const rows::Shape aligned = rows::Shape::aligned(p), other = rows::Shape::element_by_element();
    std::vector<KernelSource> all{reference_to(p, other).source_for(device)};
    if (aligned.count != other.count) all.push_back(reference_to(p, aligned).source_for(device));
    return all;
  }

  Status launch(const RowsProblem& p, const RowsBuffers& buffers, const Device& device, std::string_view,
                void* stream) const override {
    const rows::Shape shape = rows::shape_of(p, buffers);
    Kernel* kernel = nullptr;
    if (Status s = reference_to(p, shape).find(device, &kernel); !s.is_ok()) return s;
    return rows::launch(p, buffers, shape, *kernel, static_cast<cudaStream_t>(stream));
  }

 private:
  const KernelReference& reference_to(const RowsProblem& p, const rows::Shape& shape) const {
    return references_.get({p.is_sums(), static_cast<int>(p.in), shape.count, shape.packs},
                           [&] { return rows::kernel_source(p, shape); });
  }

  const std::vector<std::string> configs_{"default"};
  mutable KernelReferences<std::array<int, 4>> references_;
};

}  // namespace

const RowsImplementation* simt_rows() {
  static const SimtRows implementation;
  return &implementation;
}

}  // namespace tcgemm
