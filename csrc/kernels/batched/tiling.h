// How the kernel divides a product's matrices among threads.
#pragma once

#include "core/problem.h"
#include "kernels/batched/geometry.h"

namespace tcgemm::batched {

// The tiling with the least estimated time of those that shared memory and registers leave room for. It depends on the
// sizes of a matrix, layouts and dtypes only. m, n and k are from kLeastSize to kMostSize.
Tiling choose_tiling(const Problem& p);

}  // namespace tcgemm::batched
