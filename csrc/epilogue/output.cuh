// Where a kernel's accumulators go: epilogue, conversion, and a store as wide as alignment allows.
//
// Kernels take an `Outputs` with one function, visit(f), which calls f with the Output to store
// through. Output itself is the case of one output type; FloatOutputs holds float16, bfloat16
// and float32 behind a switch that the whole grid takes alike, so one kernel serves all three.
#pragma once

#include <cstdint>

#include "tile/numeric.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm {

// D is packed row-major with batch stride m * n. `aligned`: each row starts on 16 bytes.
template <typename Out, typename Epilogue>
struct Output {
  Out* d;
  int64_t m, n;
  bool aligned;
  Epilogue epilogue;

  template <typename Visitor>
  __device__ __forceinline__ void visit(Visitor&& visitor) const {
    visitor(*this);
  }

  // Stores those of kCount adjacent accumulators that lie inside the row. m_idx < m;
  // n_idx is a multiple of kCount.
  template <int kCount, typename Acc>
  __device__ __forceinline__ void store(Acc (&acc)[kCount], int64_t batch_idx, int64_t m_idx, int64_t n_idx) const {
    Out* target = d + (batch_idx * m + m_idx) * n + n_idx;
    if (aligned && n_idx + kCount <= n) {
      epilogue(acc, batch_idx, m_idx, n_idx);
      store_vectors(acc, target);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (n_idx + i < n) {
          Acc one[1] = {acc[i]};
          epilogue(one, batch_idx, m_idx, n_idx + i);
          target[i] = convert<Out>(one[0]);
        }
      }
    }
  }
};

// Only the member that `type` names is set.
template <template <typename, typename> class Epilogue, typename Acc>
struct FloatOutputs {
  FloatType type;
  Output<__half, Epilogue<Acc, __half>> f16;
  Output<__nv_bfloat16, Epilogue<Acc, __nv_bfloat16>> bf16;
  Output<float, Epilogue<Acc, float>> f32;

  template <typename Visitor>
  __device__ __forceinline__ void visit(Visitor&& visitor) const {
    switch (type) {
      case FloatType::kF16: visitor(f16); break;
      case FloatType::kBF16: visitor(bf16); break;
      case FloatType::kF32: visitor(f32); break;
    }
  }
};

}  // namespace tcgemm
