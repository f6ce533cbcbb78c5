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

// Addresses that cuBLASLt takes as part of its descriptor; null unless the epilogue needs them.
struct EpilogueAddresses {
  const void* bias;
  void* aux;
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
  cublasLtEpilogue_t epilogue;
  int64_t align_bias, align_aux;

  using Words = std::array<int64_t, 24>;
  Words words() const {
    return {device,  types.in, types.out, types.scale, types.compute,   op_x,     op_y,       n,
            m,       k,        ld_x,      ld_y,        batch,           stride_x, stride_y,   stride_d,
            align_x, align_y,  align_c,   align_d,     workspace_bytes, epilogue, align_bias, align_aux};
  }
};

class Plan {
 public:
  explicit Plan(const Api& api) : api_(api) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan();

  // Creates the descriptors and asks the heuristic, which sees how the addresses are aligned but keeps
  // none; to be called once.
  Status build(cublasLtHandle_t handle, const PlanKey& key, const EpilogueAddresses& addresses);

  int num_algorithms() const { return static_cast<int>(algorithms_.size()); }

  // `key`: that of build().
  Status run(cublasLtHandle_t handle, const PlanKey& key, int rank, const void* alpha, const void* x, const void* y,
             const void* beta, const void* c, void* d, const EpilogueAddresses& addresses, void* workspace,
             cudaStream_t stream) const;

 private:
  const Api& api_;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t x_layout_ = nullptr, y_layout_ = nullptr, d_layout_ = nullptr;
  std::vector<cublasLtMatmulAlgo_t> algorithms_;
};

// The plan for `key`, from a cache shared by all threads and devices.
Status find_plan(const Api& api, cublasLtHandle_t handle, const PlanKey& key, const EpilogueAddresses& addresses,
                 std::shared_ptr<const Plan>* plan);

}  // namespace tcgemm::lt
