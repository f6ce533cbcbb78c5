// Types of floats as kernels are told them.
#pragma once

#include "core/dtype.h"
#include "tile/numeric.cuh"

namespace tcgemm {

// Of f16, bf16 and f32; of anything else that of f32.
inline FloatType float_type(DType dtype) {
  return dtype == DType::kF16 ? FloatType::kF16 : dtype == DType::kBF16 ? FloatType::kBF16 : FloatType::kF32;
}

}  // namespace tcgemm
