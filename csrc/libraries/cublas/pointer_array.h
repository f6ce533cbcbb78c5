// Arrays of pointers in device memory, for the batched functions that want them.
#pragma once

#include <driver_types.h>

#include <cstdint>
#include <vector>

#include "core/implementation.h"

namespace tcgemm::cublas {

// Writes, for each base and after it each of its `batch` entries, base + entry * stride_bytes.
// `pointers` holds bases.size() * batch addresses.
Status fill_pointers(const std::vector<const void*>& bases, int64_t stride_bytes, int64_t batch, const void** pointers,
                     const Device& device, cudaStream_t stream);

// What a program has to bring for it.
KernelSource fill_pointers_source(const Device& device);

}  // namespace tcgemm::cublas
