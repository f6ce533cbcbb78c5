// The arguments of a launch of a grouped product.
#pragma once

#include "kernels/mma_sync/params.cuh"
#include "tile/groups.cuh"

namespace tcgemm::mma {

struct RaggedParams {
  Params gemm;  // batch entries of B (rows) or of D (contraction) are the groups
  Groups groups;
};

}  // namespace tcgemm::mma
