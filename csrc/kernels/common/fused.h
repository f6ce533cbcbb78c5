// Host side of fused.cuh: its arguments from a problem.
#pragma once

#include "core/problem.h"
#include "epilogue/fused.cuh"

namespace tcgemm::epilogue {

inline FloatType float_type(DType dtype) {
  return dtype == DType::kF16 ? FloatType::kF16 : dtype == DType::kBF16 ? FloatType::kBF16 : FloatType::kF32;
}

// For a problem whose D is f16, bf16 or f32. A whole row of 16-byte vectors has 8 columns at a time.
inline Fused make_fused(const Problem& p, const Buffers& buffers) {
  const Epilogue& e = p.epilogue;
  Fused fused{};
  fused.activation = e.activation;
  fused.derivative = e.derivative;
  fused.gated = e.gated;
  fused.bias_along_m = e.bias == Bias::kM;
  fused.type = float_type(p.out);
  fused.bias_type = float_type(e.bias_dtype);
  fused.alpha = static_cast<float>(p.alpha);
  fused.beta = static_cast<float>(p.beta);
  fused.bias = e.bias == Bias::kNone ? nullptr : buffers.bias;
  fused.bias_batch_stride = e.bias_batch_stride;
  fused.c = buffers.c;
  fused.aux_in = e.derivative ? buffers.aux_in : nullptr;
  fused.aux_out = e.aux_out ? buffers.aux_out : nullptr;
  fused.d = buffers.d;
  fused.m = p.m;
  fused.n = p.n;
  uintptr_t bits = static_cast<uintptr_t>(p.n * dtype_bytes(p.out));
  for (const void* address :
       {fused.c, fused.aux_in, static_cast<const void*>(fused.aux_out), static_cast<const void*>(fused.d)}) {
    bits |= reinterpret_cast<uintptr_t>(address);
  }
  fused.vectors = bits % 16 == 0;
  const int64_t bias_bytes = dtype_bytes(e.bias_dtype);
  fused.bias_vectors = (reinterpret_cast<uintptr_t>(fused.bias) | static_cast<uintptr_t>(p.n * bias_bytes) |
                        static_cast<uintptr_t>(e.bias_batch_stride * bias_bytes)) %
                           16 ==
                       0;
  return fused;
}

}  // namespace tcgemm::epilogue
