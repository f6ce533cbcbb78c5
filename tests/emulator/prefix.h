// Included before everything else: what nvcc would give to a file of CUDA C++.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "device_math.h"
#include "machine.h"

// From here on the sources are compiled as for the device.
#define __CUDACC__ 1
#define __CUDA_ARCH__ TCGEMM_EMULATED_ARCH
#if TCGEMM_EMULATED_ARCH == 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#endif

#define __launch_bounds__(...)

// Set whenever a thread goes on.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// Functions and intrinsics of the device -----------------------------------------------------------

inline void __syncthreads() { emulator::sync_threads(); }
inline unsigned atomicCAS(unsigned* address, unsigned expected, unsigned desired) {
  const unsigned old = *address;
  if (old == expected) *address = desired;
  return old;
}
inline int __syncthreads_or(int vote) { return emulator::sync_threads_or(vote != 0); }
inline void __syncwarp(unsigned mask = ~0u) {
  emulator::meet("__syncwarp", mask, nullptr, [](void**) {});
}
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

namespace emulator {

// source(lane) names the lane whose value a lane gets.
template <typename T, typename Source>
T shuffle(unsigned mask, T value, const Source& source) {
  struct Exchange {
    T given, taken;
    int from;
  } exchange{value, value, source(current().lane)};
  meet("a shuffle", mask, &exchange, [mask](void** all) {
    for (int lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      auto* mine = static_cast<Exchange*>(all[lane]);
      if (mask >> mine->from & 1) mine->taken = static_cast<Exchange*>(all[mine->from])->given;
    }
  });
  return exchange.taken;
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emulator::shuffle(mask, value, [=](int lane) { return (lane & ~(width - 1)) | (source & (width - 1)); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return emulator::shuffle(mask, value, [=](int lane) { return lane ^ bits; });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int delta) {
  return emulator::shuffle(mask, value, [=](int lane) { return lane >= delta ? lane - delta : lane; });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int delta) {
  return emulator::shuffle(mask, value, [=](int lane) { return lane + delta < 32 ? lane + delta : lane; });
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  struct Vote {
    bool given;
    unsigned taken;
  } vote{predicate, 0};
  emulator::meet("a ballot", mask, &vote, [mask](void** all) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) votes |= static_cast<unsigned>(static_cast<Vote*>(all[lane])->given) << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) static_cast<Vote*>(all[lane])->taken = votes;
    }
  });
  return vote.taken;
}
inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }

template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::shared_offset(pointer); }

// Whether the sources, where a test has changed them, behave as number `mutant`.
namespace emulator {
inline bool is_mutant(int mutant) { return Machine::get().options.mutant == mutant; }
}  // namespace emulator
