// The epilogues this family is built with. The output type is a run-time branch of the kernel, so
// a kernel takes an epilogue whose `bind<Partial, Out>()` gives the functor of epilogue/epilogue.cuh.
#pragma once

#include <cstdint>

#include "epilogue/epilogue.cuh"

namespace tcgemm::mma {

struct Identity {
  template <typename Partial, typename Out>
  __device__ __forceinline__ epilogue::Identity<Partial, Out> bind() const {
    return {};
  }
};

struct AlphaBetaC {
  double alpha, beta;
  const void* c;
  int64_t m, n;

  template <typename Partial, typename Out>
  __device__ __forceinline__ epilogue::AlphaBetaC<Partial, Out> bind() const {
    return {static_cast<Partial>(alpha), static_cast<Partial>(beta), static_cast<const Out*>(c), m, n};
  }
};

}  // namespace tcgemm::mma
