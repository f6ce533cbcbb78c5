// One-shot all-reduce by stores to peer memory.
//
//   out = sum over devices of in        in float32, in the order of ranks, rounded once
//
// Every device stores its array into a slot of every device, sets a flag there, waits for the flags of the others and
// adds the slots of its own memory. So a sum takes one exchange, and all devices get the same bits.
//
// kLanes CTAs of kThreads threads. Lane l of a device exchanges vectors with lane l of the others and with no other
// lane: it has flags and a count of turns of its own. Lanes without a vector only count.
//
// Turns: no host tells a kernel which call it is, so that kernels can be part of CUDA graphs. Each lane counts its
// calls in its own device's memory. All devices run the calls in one order, so that the counts agree.
//
// Reuse of slots: two sets, for even and odd turns. A lane that has seen the flags of turn t knows that the kernels of
// turn t - 1 have ended on the other devices, so that their slots of turn t - 1 may be overwritten in turn t + 1.
//
// A flag also says of which call of the program it is: calls in different orders on different devices are a failure, as
// is a wait of over kTimeoutNs. Then the results are NaN, and the host reports the failure at the next call.
#pragma once

#include <cstdint>

#include "kernels/all_reduce/params.cuh"
#include "ptx/early_start.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/special_registers.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::all_reduce {

// Workspace of one device.
template <int kDevices>
struct Workspace {
  char* base;

  __device__ Header* header() const { return reinterpret_cast<Header*>(base); }
  __device__ uint64_t* flag(int parity, int rank, int lane) const { return &header()->flags[parity][rank][lane]; }
  __device__ char* slot(int parity, int rank) const {
    return base + sizeof(Header) + (parity * kDevices + rank) * slot_bytes(kDevices);
  }
};

template <typename T>
struct Vector {
  static constexpr int kCount = kVectorBytes / sizeof(T);
  alignas(kVectorBytes) T values[kCount];

  __device__ uint32_t (&words())[4] { return reinterpret_cast<uint32_t (&)[4]>(values); }
};

// Vector `index` of an array; 0 past its end.
template <typename T>
__device__ __forceinline__ Vector<T> load_vector(const Params& p, int64_t index) {
  constexpr int kCount = Vector<T>::kCount;
  const T* in = static_cast<const T*>(p.in) + index * kCount;
  const int64_t count = p.elements - index * kCount;
  Vector<T> x;
  if (p.is_aligned && count >= kCount) {
    ptx::ld_global_v4_u32(x.words(), in);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x.values[i] = i < count ? in[i] : convert<T>(0.0f);
  }
  return x;
}

template <typename T>
__device__ __forceinline__ void store_vector(const Params& p, int64_t index, Vector<T> x) {
  constexpr int kCount = Vector<T>::kCount;
  T* out = static_cast<T*>(p.out) + index * kCount;
  const int64_t count = p.elements - index * kCount;
  if (p.is_aligned && count >= kCount) {
    ptx::st_global_v4_u32(out, x.words());
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) out[i] = x.values[i];  // mutant: past_the_end
    }
  }
}

// Waits for a device's flag of a turn.
__device__ __forceinline__ Failure wait_for(const uint64_t* flag, uint64_t turn, uint32_t call, uint64_t timeout_ns) {
  const uint64_t start = ptx::globaltimer();
  while (true) {
    const uint64_t seen = ptx::ld_acquire_sys_u64(flag);
    if (seen >> kCallBits == turn) {
      return (seen & ((1u << kCallBits) - 1)) == call ? Failure::kNone : Failure::kOtherCall;
    }
    if (ptx::globaltimer() - start > timeout_ns) return Failure::kTimeout;
  }
}

template <typename T, int kDevices>
__device__ __forceinline__ void reduce_lane(const Params& p, int lane) {
  static_assert(kDevices >= 2 && kDevices <= kMaxDevices, "Params has so many workspaces");
  constexpr int kCount = Vector<T>::kCount;
  const int64_t num_vectors = (p.elements + kCount - 1) / kCount;
  const int64_t first = int64_t{lane} * kThreads + threadIdx.x;
  constexpr int64_t kStep = int64_t{kLanes} * kThreads;
  const Workspace<kDevices> own{p.workspaces[p.rank]};
  ptx::wait_for_previous();
  uint64_t* const turns = &own.header()->turns[lane];
  // Relaxed: loads of the array need not wait for this one.
  const uint64_t turn = ptx::ld_relaxed_sys_u64(turns) + 1;
  const int parity = static_cast<int>(turn & 1);  // mutant: one_set_of_slots
  for (int64_t i = first; i < num_vectors; i += kStep) {
    Vector<T> x = load_vector<T>(p, i);
#pragma unroll
    for (int rank = 0; rank < kDevices; ++rank) {
      const Workspace<kDevices> workspace{p.workspaces[rank]};
      // mutant: slot_of_another_device
      ptx::st_relaxed_sys_v4_u32(workspace.slot(parity, p.rank) + i * kVectorBytes, x.words());
    }
  }
  __syncthreads();  // mutant: stores_not_awaited
  Failure failure = Failure::kNone;
  const int peer = static_cast<int>(threadIdx.x);
  if (int64_t{lane} * kThreads < num_vectors && peer < kDevices && peer != p.rank) {
    const Workspace<kDevices> other{p.workspaces[peer]};
    // mutant: flag_of_another_device
    ptx::st_release_sys_u64(other.flag(parity, p.rank, lane), turn << kCallBits | p.call);
    failure = wait_for(own.flag(parity, peer, lane), turn, p.call, p.timeout_ns);  // mutant: flags_not_awaited
    if (failure != Failure::kNone) *p.failure = static_cast<uint32_t>(failure);
  }
  const bool has_failed = __syncthreads_or(failure != Failure::kNone);
  for (int64_t i = first; i < num_vectors; i += kStep) {
    Vector<T> x[kDevices];
#pragma unroll
    for (int rank = 0; rank < kDevices; ++rank) {
      ptx::ld_relaxed_sys_v4_u32(x[rank].words(), own.slot(parity, rank) + i * kVectorBytes);
    }
    Vector<T> sum;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float value = convert<float>(x[0].values[j]);
#pragma unroll
      for (int rank = 1; rank < kDevices; ++rank) {
        value += convert<float>(x[rank].values[j]);  // mutant: device_left_out
      }
      sum.values[j] = convert<T>(has_failed ? __uint_as_float(0x7FFFFFFFu) : value);
    }
    store_vector(p, i, sum);
  }
  if (threadIdx.x == 0) *turns = turn;  // mutant: turn_not_counted
}

template <typename T, int kDevices>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ Params params) {
  reduce_lane<T, kDevices>(params, static_cast<int>(blockIdx.x));
}

}  // namespace tcgemm::all_reduce
