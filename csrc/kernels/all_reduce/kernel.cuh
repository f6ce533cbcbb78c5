// One-shot all-reduce by stores to peer memory.
//
//   out = sum over devices of in        in float32, in the order of ranks, rounded once
//
// Every device stores its array into a slot of every device, sets a flag there, waits for the flags of the others and
// adds the slots of its own memory. So a sum takes one exchange, and all devices get the same bits.
//
// kChannels CTAs of kThreads threads. Channel c of a device exchanges vectors with channel c of the others and with no
// other channel: it has flags and a count of epochs of its own. Channels without a vector only count.
//
// Epochs: no host tells a kernel which exchange it is, so that kernels can be part of CUDA graphs. Each channel counts
// its calls in its own device's memory. All devices run the calls in one order, so that the counts agree.
//
// Reuse of slots: two sets, for even and odd epochs. When a kernel of epoch e + 1 starts, the kernel of epoch e has
// ended on its device as a whole (griddepcontrol.wait), so one of its channels has seen the flags of the others: they
// had started epoch e and ended epoch e - 1. So their slots of epoch e - 1 may be overwritten.
//
// Failures: a flag also tells the execution of the program and its call. Another one in the same epoch, two kernels of
// one device at the same time, and a wait of over kTimeoutNs are failures. The first one is written to every device, so
// that no kernel waits any more, and to the host, which reports it at the next call. Results are NaN from then on.
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
  static constexpr int64_t kSlotBytes = slot_bytes(kDevices);

  char* base;

  __device__ Header* header() const { return reinterpret_cast<Header*>(base); }
  __device__ uint64_t* flag(int parity, int rank, int channel) const { return &header()->flags[parity][rank][channel]; }
  __device__ char* slot(int parity, int rank) const {
    return base + sizeof(Header) + (parity * kDevices + rank) * kSlotBytes;
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

// A flag: 32 bits of the epoch, 24 of the program's execution, 8 of the call, the low ones of each. A channel may find
// a flag of any earlier epoch, if it had no vectors since: with fewer bits, that could look like the flag it waits for.
constexpr int kEpochShift = 32, kRunShift = 8;
__device__ __forceinline__ uint64_t flag_of(uint64_t epoch, uint32_t run, uint32_t call_id) {
  constexpr uint64_t kRunMask = (1 << (kEpochShift - kRunShift)) - 1, kCallMask = (1 << kRunShift) - 1;
  // mutant: call_left_out, execution_left_out
  return epoch << kEpochShift | (run & kRunMask) << kRunShift | (call_id & kCallMask);
}

__device__ __forceinline__ uint64_t load_state(const Header* header) {
  return ptx::ld_relaxed_sys_u64(reinterpret_cast<const uint64_t*>(&header->state));
}
__device__ __forceinline__ Failure failure_of(uint64_t state) { return static_cast<Failure>(state >> 32); }

// Waits for another device's flag.
__device__ __forceinline__ Failure wait_for(const uint64_t* flag, uint64_t expected, const Header* own,
                                            const Params& p) {
  const uint64_t start = ptx::globaltimer();
  for (int32_t look = 1;; look = look < p.looks_per_check ? look + 1 : 1) {
    const uint64_t seen = ptx::ld_acquire_sys_u64(flag);
    if (seen >> kEpochShift == expected >> kEpochShift) {
      return seen == expected ? Failure::kNone : Failure::kOtherCall;  // mutant: call_not_compared
    }
    if (look < p.looks_per_check) continue;
    const Failure failure = failure_of(load_state(own));
    if (failure != Failure::kNone) return failure;
    if (ptx::globaltimer() - start > p.timeout_ns) return Failure::kTimeout;
  }
}

// Tells every device and the host, unless the failure of another kernel is known here.
template <int kDevices>
__device__ __forceinline__ void report(Failure failure, const Params& p) {
  Header* const own = Workspace<kDevices>{p.workspaces[p.rank]}.header();
  if (atomicCAS(&own->state.failure, 0u, static_cast<uint32_t>(failure)) != 0) return;
  *p.failure = static_cast<uint32_t>(failure);
#pragma unroll
  for (int rank = 0; rank < kDevices; ++rank) {
    Header* const other = Workspace<kDevices>{p.workspaces[rank]}.header();
    if (rank != p.rank) ptx::st_relaxed_sys_u32(&other->state.failure, static_cast<uint32_t>(failure));
  }
}

template <typename T, int kDevices>
__device__ __forceinline__ void reduce_channel(const Params& p, int channel) {
  static_assert(kDevices >= 2 && kDevices <= kMaxDevices, "Params has so many workspaces");
  constexpr int kCount = Vector<T>::kCount;
  const int64_t num_vectors = (p.elements + kCount - 1) / kCount;
  const int64_t first = int64_t{channel} * kThreads + threadIdx.x;
  constexpr int64_t kStep = int64_t{kChannels} * kThreads;
  const Workspace<kDevices> own{p.workspaces[p.rank]};
  Header* const header = own.header();
  ptx::wait_for_previous();
  // Relaxed: no load waits for another one.
  const uint64_t epoch = ptx::ld_relaxed_sys_u64(&header->epochs[channel]) + 1;
  const uint64_t state = load_state(header);
  Failure failure = failure_of(state);
  const bool has_claimed = threadIdx.x == 0 && atomicCAS(&header->busy[channel], 0u, 1u) == 0;
  if (threadIdx.x == 0 && !has_claimed) failure = Failure::kConcurrent;
  const bool may_send = !__syncthreads_or(failure != Failure::kNone);
  const int parity = static_cast<int>(epoch & 1);  // mutant: one_set_of_slots
  for (int64_t i = first; i < num_vectors && may_send; i += kStep) {
    Vector<T> x = load_vector<T>(p, i);
#pragma unroll
    for (int rank = 0; rank < kDevices; ++rank) {
      const Workspace<kDevices> workspace{p.workspaces[rank]};
      // mutant: slot_of_another_device
      ptx::st_relaxed_sys_v4_u32(workspace.slot(parity, p.rank) + i * kVectorBytes, x.words());
    }
  }
  __syncthreads();  // mutant: stores_not_awaited
  const int peer = static_cast<int>(threadIdx.x);
  if (may_send && int64_t{channel} * kThreads < num_vectors && peer < kDevices && peer != p.rank) {
    const Workspace<kDevices> other{p.workspaces[peer]};
    const uint64_t flag = flag_of(epoch, static_cast<uint32_t>(state), p.call_id);
    ptx::st_release_sys_u64(other.flag(parity, p.rank, channel), flag);    // mutant: flag_of_another_device
    failure = wait_for(own.flag(parity, peer, channel), flag, header, p);  // mutant: flags_not_awaited
  }
  if (failure != Failure::kNone) report<kDevices>(failure, p);
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
  if (has_claimed) {
    header->epochs[channel] = epoch;  // mutant: epoch_not_counted
    header->busy[channel] = 0;        // mutant: channel_not_released
  }
}

template <typename T, int kDevices>
__global__ void __launch_bounds__(kThreads) kernel(const __grid_constant__ Params params) {
  reduce_channel<T, kDevices>(params, static_cast<int>(blockIdx.x));
}

}  // namespace tcgemm::all_reduce
