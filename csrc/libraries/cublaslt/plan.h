// One cublasLtMatmul call without its addresses: descriptors and the algorithms the library's
// heuristic proposes for it. Asking for them costs tens of microseconds, so plans are kept.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/implementation.h"
#include "libraries/cublaslt/api.h"

namespace tcgemm::lt {

// How many of the heuristic's proposals are kept, and so can be chosen by config.
inline constexpr int kMaxAlgorithms = 8;

// What cuBLASLt calls the types of a product.
struct Types {
  cudaDataType_t in, out, scale;
  cublasComputeType_t compute;
};

// Everything a plan depends on, all of it plain integers and in cuBLASLt's column-major terms:
// X is its first operand (our B), Y its second (our A), and rows and columns of D^T are our n
// and m. Alignments are bytes.
struct PlanKey {
  int64_t device;
  Types types;
  cublasOperation_t op_x, op_y;
  int64_t n, m, k;
  int64_t ld_x, ld_y;
  int64_t batch;
  int64_t stride_x, stride_y, stride_d;
  int64_t align_x, align_y, align_c, align_d;
  int64_t workspace_bytes;

  using Words = std::array<int64_t, 21>;
  Words words() const {
    return {device,   types.in, types.out, types.scale, types.compute, op_x,    op_y,
            n,        m,        k,         ld_x,        ld_y,          batch,   stride_x,
            stride_y, stride_d, align_x,   align_y,     align_c,       align_d, workspace_bytes};
  }
};

class Plan {
 public:
  explicit Plan(const Api& api) : api_(api) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan();

  // Creates the descriptors and asks the heuristic; to be called once.
  Status build(cublasLtHandle_t handle, const PlanKey& key);

  int num_algorithms() const { return static_cast<int>(algorithms_.size()); }

  cublasStatus_t run(cublasLtHandle_t handle, int rank, const void* alpha, const void* x, const void* y,
                     const void* beta, const void* c, void* d, void* workspace, int64_t workspace_bytes,
                     cudaStream_t stream) const {
    return api_.cublasLtMatmul(handle, desc_, alpha, x, x_layout_, y, y_layout_, beta, c, d_layout_, d, d_layout_,
                               &algorithms_[rank], workspace, workspace_bytes, stream);
  }

 private:
  const Api& api_;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t x_layout_ = nullptr, y_layout_ = nullptr, d_layout_ = nullptr;
  std::vector<cublasLtMatmulAlgo_t> algorithms_;
};

// The plan for `key`, from a cache shared by all threads and devices.
Status find_plan(const Api& api, cublasLtHandle_t handle, const PlanKey& key, std::shared_ptr<const Plan>* plan);

}  // namespace tcgemm::lt
