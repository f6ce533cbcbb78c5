// What cuTENSOR has decided about one operation: a kernel and its parameters, without addresses and
// without the values of alpha, beta and gamma. Making one takes up to milliseconds, so plans are kept.
#pragma once

#include <cstdint>
#include <memory>

#include "core/implementation.h"
#include "libraries/cutensor/api.h"
#include "libraries/cutensor/operation.h"

namespace tcgemm::cutensor {

// Addresses of one call, each aligned to kAlignment; those that the operation lacks are null.
struct Buffers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* d = nullptr;
  void* workspace = nullptr;  // aligned to kWorkspaceAlignment, operation.workspace_bytes long
};

inline constexpr uint32_t kAlignment = 16;  // what XLA promises for every buffer
inline constexpr int64_t kWorkspaceAlignment = 256;

class Plan {
 public:
  Plan(const Api& api, cutensorHandle_t handle) : api_(api), handle_(handle) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan();

  // To be called once. The device must be the handle's.
  Status build(const Operation& operation);

  Status run(const Operation& operation, const Buffers& buffers, cudaStream_t stream) const;

 private:
  const Api& api_;
  cutensorHandle_t handle_;
  cutensorPlan_t plan_ = nullptr;
  cudaDataType_t scalar_type_ = CUDA_R_32F;
};

// The bytes that cuTENSOR would like for the operation on the calling thread's device, which it then has
// a plan for with so many; an invalid status where it does not support it.
Status estimate_workspace(Operation operation, int64_t* bytes);

// The plan of the operation for device `ordinal`, which must be the calling thread's: a kept one, or
// made now. At most kMaxPlans are kept, and the one unused for longest makes room.
inline constexpr size_t kMaxPlans = 512;
Status find_plan(int ordinal, const Operation& operation, std::shared_ptr<const Plan>* plan);

struct PlanCacheCounts {
  int64_t hits, misses, evictions, size;
};
PlanCacheCounts plan_cache_counts();
void clear_plan_cache();

}  // namespace tcgemm::cutensor
