// The grouped products of "mma_sync" behind the common interface.
#include "kernels/common/limits.h"
#include "kernels/kernels.h"
#include "kernels/mma_sync/ragged_launch.h"

namespace tcgemm {
namespace {

using namespace tcgemm::mma;

class MmaSyncRagged final : public RaggedImplementation {
 public:
  const char* name() const override { return "mma_sync"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> all{std::to_string(RaggedTile::kTileM) + "x" +
                                              std::to_string(RaggedTile::kTileN)};
    return all;
  }

  Features features() const override { return {}; }

  std::string reject_rest(const RaggedProblem& p, const Device& device, std::string_view) const override {
    if (std::string rule = reject_device(device, 80); !rule.empty()) return rule;
    const std::vector<DType> floats{DType::kF16, DType::kBF16, DType::kF32};
    if (std::string rule = reject_types(p.in, p.in, p.compute, p.out,
                                        {{DType::kF16, Compute::kF32, floats},
                                         {DType::kBF16, Compute::kF32, floats},
                                         {DType::kF32, Compute::kTF32, floats}});
        !rule.empty()) {
      return rule;
    }
    return reject_ragged_tiles(p, RaggedTile::kTileM, RaggedTile::kTileN);
  }

  Status launch(const RaggedProblem& p, const RaggedBuffers& buffers, const Device&, std::string_view,
                void* stream) const override {
    for (int64_t i = 0; i < p.batch; ++i) {
      if (Status s = launch_entry(p, batch_entry(p, buffers, i), static_cast<cudaStream_t>(stream)); !s.is_ok()) {
        return s;
      }
    }
    return Status::ok();
  }

 private:
  static Status launch_entry(const RaggedProblem& p, const RaggedBuffers& buffers, cudaStream_t stream) {
    switch (p.in) {
      case DType::kF16: return launch_ragged<F16F32>(p, buffers, stream);
      case DType::kBF16: return launch_ragged<BF16F32>(p, buffers, stream);
      default: return launch_ragged<TF32F32>(p, buffers, stream);
    }
  }
};

}  // namespace

const RaggedImplementation* mma_sync_ragged() {
  static const MmaSyncRagged implementation;
  return &implementation;
}

}  // namespace tcgemm
