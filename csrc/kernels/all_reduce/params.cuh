// The parameters of the kernels in kernel.cuh, and the layout of a device's workspace.
#pragma once

#include <cstdint>

namespace tcgemm::all_reduce {

inline constexpr int kThreads = 512, kChannels = 64, kMaxDevices = 8;
inline constexpr int kVectorBytes = 16;

// A kernel that has waited this long for another device gives up.
inline constexpr uint64_t kTimeoutNs = 120'000'000'000;
// A waiting kernel looks at the clock and for failures of others once in so many looks at a flag.
inline constexpr int kLooksPerCheck = 1024;

// A slot holds one array of one device. A device sends its array to every other one: with more bytes, an all-reduce
// that sends shares of the array is faster.
inline constexpr int64_t kMostSentBytes = int64_t{8} << 20;
inline constexpr int64_t slot_bytes(int64_t devices) {
  return kMostSentBytes / (devices - 1) / kVectorBytes * kVectorBytes;
}

// Why a kernel gave up.
enum class Failure : uint32_t { kNone, kTimeout, kOtherCall, kConcurrent };

struct alignas(8) State {
  uint32_t run;      // the program's execution, which the host writes before it
  uint32_t failure;  // a Failure, of the first kernel of any device that gave up
};

// The start of the workspace of each device. Two slots of each device follow: for even and for odd epochs.
struct alignas(kVectorBytes) Header {
  uint64_t epochs[kChannels];                 // calls that each channel has ended
  uint64_t flags[2][kMaxDevices][kChannels];  // by parity of the epoch, sending device and channel
  uint32_t busy[kChannels];                   // whether a kernel has the channel
  State state;
};

inline constexpr int64_t workspace_bytes(int64_t devices) {
  return static_cast<int64_t>(sizeof(Header)) + 2 * devices * slot_bytes(devices);
}

struct Params {
  const void* in;
  void* out;
  char* workspaces[kMaxDevices];  // of all devices, by rank
  uint32_t* failure;              // in host memory
  int64_t elements;
  uint64_t timeout_ns;
  int32_t looks_per_check;
  uint32_t call_id;
  int32_t rank;        // of this device
  int32_t is_aligned;  // whether `in` and `out` are 16-byte aligned
};

}  // namespace tcgemm::all_reduce
