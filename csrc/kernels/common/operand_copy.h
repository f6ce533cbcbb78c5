// Copies of operands that TMA cannot read, or whose layout an instruction cannot.
#pragma once

#include <cuda_runtime_api.h>

#include "core/implementation.h"
#include "kernels/common/operand_copy_params.cuh"

namespace tcgemm {

// What a program has to bring for copies of elements of so many bytes.
KernelSource copy_source(int element_bytes, const Device& device);

// One launch for all operands whose elements are alike; a job without rows does nothing.
Status launch_copies(const CopyJob (&jobs)[2], const Device& device, cudaStream_t stream);

}  // namespace tcgemm
