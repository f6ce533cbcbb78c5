// Tensor maps as this machine has them, and TMA's copies.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

namespace emulator {

// Stands in for the driver's function, with its rules.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill);

void check_address(const CUtensorMap* map);
// Into each block whose bit is set, at a time of its own.
void tma_load(uint32_t destination, const CUtensorMap* map, uint32_t barrier, uint32_t cta_mask,
              const std::vector<int32_t>& coordinates);
void tma_store(const CUtensorMap* map, uint32_t source, const std::vector<int32_t>& coordinates);

}  // namespace emulator
