// Element types of instructions for which CUDA's headers have no type of their own.
#pragma once

#include <cstdint>

namespace tcgemm::ptx {

// A float32 of which the tensor core reads the high 19 bits.
struct TF32 {
  uint32_t bits;
};

}  // namespace tcgemm::ptx
