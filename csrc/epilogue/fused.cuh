// Every epilogue of core/problem.h over float32 accumulators, its parts chosen at run time so that
// a kernel is built with all of them once: the branches are the same for the whole grid and stand
// around whole vectors of elements, whose code is straight.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue/activations.h"
#include "tile/numeric.cuh"
#include "tile/store_vectors.cuh"

namespace tcgemm::epilogue {

// Calls visit(T{}) with the type's own type.
template <typename Visit>
__device__ __forceinline__ void visit(FloatType type, Visit&& visit) {
  switch (type) {
    case FloatType::kF16: visit(__half{}); break;
    case FloatType::kBF16: visit(__nv_bfloat16{}); break;
    case FloatType::kF32: visit(float{}); break;
  }
}

// values[i] = base[offset + i] for i < count. `vectors`: all of them lie inside, and the first on a
// boundary of as many bytes as they take, or of 16.
template <int kCount>
__device__ __forceinline__ void load_floats(float (&values)[kCount], const void* base, FloatType type, int64_t offset,
                                            int count, bool vectors) {
  visit(type, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kBytes = kCount * sizeof(T);
    using Vector = std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
    const T* source = static_cast<const T*>(base) + offset;
    if constexpr (kBytes % sizeof(Vector) == 0) {
      if (vectors) {
        constexpr int kPerVector = sizeof(Vector) / sizeof(T);
#pragma unroll
        for (int i = 0; i < kCount; i += kPerVector) {
          const Vector words = *reinterpret_cast<const Vector*>(source + i);
          T elements[kPerVector];
          memcpy(elements, &words, sizeof(words));
#pragma unroll
          for (int j = 0; j < kPerVector; ++j) values[i + j] = convert<float>(elements[j]);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = i < count ? convert<float>(source[i]) : 0.0f;
  });
}

template <int kCount>
__device__ __forceinline__ void store_floats(const float (&values)[kCount], void* base, FloatType type, int64_t offset,
                                             int count, bool vectors) {
  visit(type, [&](auto tag) {
    using T = decltype(tag);
    T* target = static_cast<T*>(base) + offset;
    if constexpr (kCount * sizeof(T) % 8 == 0) {
      if (vectors) {
        store_vectors(values, target);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) target[i] = convert<T>(values[i]);
    }
  });
}

// D = values + beta * C. Changes the values.
template <int kCount>
__device__ __forceinline__ void add_c_and_store(float (&values)[kCount], FloatType type, float beta, const void* c,
                                                void* d, int64_t offset, int count, bool vectors) {
  if (beta != 0.0f) {
    float source[kCount];
    load_floats(source, c, type, offset, count, vectors);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += beta * source[i];
  }
  store_floats(values, d, type, offset, count, vectors);
}

// The values move down by kBy places, the first ones to the end.
template <int kBy, int kCount>
__device__ __forceinline__ void rotate(float (&x)[kCount]) {
  float rotated[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) rotated[i] = x[(i + kBy) % kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = rotated[i];
}

// Calls apply(i) so that it meets every place of the arrays. A function whose code is long is there for four
// values and in a loop, through which the others move: kernels are built with all functions.
template <typename Function, typename Apply, int kCount, typename... More>
__device__ __forceinline__ void visit_values(Apply&& apply, float (&x)[kCount], More&... more) {
  constexpr int kAtOnce = activation::kIsLong<Function> && kCount % 4 == 0 ? 4 : kCount;
#pragma unroll 1
  for (int first = 0; first < kCount; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) apply(i);
    if constexpr (kAtOnce < kCount) {
      rotate<kAtOnce>(x);
      (rotate<kAtOnce>(more), ...);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void apply_value(Activation activation, float (&x)[kCount]) {
  activation::visit(activation, [&](auto f) { visit_values<decltype(f)>([&](int i) { x[i] = f.value(x[i]); }, x); });
}

// g[i] becomes g[i] * f'(x[i]), and x[i] becomes f(x[i]).
template <int kCount>
__device__ __forceinline__ void apply_gradient(Activation activation, float (&x)[kCount], float (&g)[kCount]) {
  activation::visit(activation, [&](auto f) {
    const auto apply = [&](int i) {
      g[i] = f.gradient(x[i], g[i]);
      x[i] = f.value(x[i]);
    };
    visit_values<decltype(f)>(apply, x, g);
  });
}

template <int kCount>
__device__ __forceinline__ void multiply(float (&x)[kCount], const float (&y)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] *= y[i];
}

// See Epilogue in core/problem.h; addresses are null where it has no use for them.
struct Fused {
  Activation activation;
  bool derivative, gated;
  bool bias_along_m;
  bool vectors;       // every row of C, D and aux starts on a 16-byte boundary
  bool bias_vectors;  // so does each batch entry's bias, and its up part
  FloatType type, bias_type;
  float alpha, beta;
  const void* bias;
  int64_t bias_batch_stride;
  const void* c;
  const void* aux_in;
  void* aux_out;
  void* d;
  int64_t m, n;

  __host__ __device__ bool has_two_d() const { return gated && derivative; }
  __host__ __device__ bool has_two_z() const { return gated && !derivative; }

  // Stores what becomes of the sums of kCount adjacent columns of row m_idx, of which the first
  // `count` lie inside the matrix. sums_up: the second product's, of a gated forward one.
  template <int kCount>
  __device__ __forceinline__ void store(float (&sums)[kCount], float (&sums_up)[kCount], int64_t batch_idx,
                                        int64_t m_idx, int64_t n_idx, int count) const {
    const bool whole = vectors && count == kCount;
    const int64_t row = batch_idx * m + m_idx;
    const int64_t one = row * n + n_idx, two = 2 * row * n + n_idx;  // in rows of n and of 2 n
    scale(sums, batch_idx, m_idx, n_idx, count);
    if (has_two_z()) scale(sums_up, batch_idx, m_idx, n + n_idx, count);
    if (aux_out != nullptr) {
      store_floats(sums, aux_out, type, gated ? two : one, count, whole);
      if (gated) store_floats(sums_up, aux_out, type, two + n, count, whole);
    }
    if (!derivative) {
      apply_value(activation, sums);
      if (gated) multiply(sums, sums_up);
      return add_c_and_store(sums, one, count, whole);
    }
    // All is read before anything is stored: D may lie in the place of aux_in.
    float saved[kCount];
    load_floats(saved, aux_in, type, gated ? two : one, count, whole);
    if (gated) {
      float up[kCount];
      load_floats(up, aux_in, type, two + n, count, whole);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums_up[i] = sums[i];
        sums[i] *= up[i];
      }
    }
    apply_gradient(activation, saved, sums);
    add_c_and_store(sums, gated ? two : one, count, whole);
    if (gated) {
      multiply(sums_up, saved);
      add_c_and_store(sums_up, two + n, count, whole);
    }
  }

 private:
  // `bias_idx`: of the first column.
  template <int kCount>
  __device__ __forceinline__ void scale(float (&sums)[kCount], int64_t batch_idx, int64_t m_idx, int64_t bias_idx,
                                        int count) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] *= alpha;
    if (bias == nullptr) return;
    const int64_t first = batch_idx * bias_batch_stride;
    if (bias_along_m) {
      float value[1];
      load_floats(value, bias, bias_type, first + m_idx, 1, false);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += value[0];
    } else {
      float values[kCount];
      load_floats(values, bias, bias_type, first + bias_idx, count, bias_vectors && count == kCount);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += values[i];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add_c_and_store(float (&values)[kCount], int64_t offset, int count,
                                                  bool whole) const {
    epilogue::add_c_and_store(values, type, beta, c, d, offset, count, whole);
  }
};

}  // namespace tcgemm::epilogue
