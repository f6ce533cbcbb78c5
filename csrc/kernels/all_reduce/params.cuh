// What a launch tells kernel.cuh, and how the workspace of a device is laid out.
#pragma once

#include <cstdint>

namespace tcgemm::all_reduce {

inline constexpr int kThreads = 512, kLanes = 64, kMaxDevices = 8;
inline constexpr int kVectorBytes = 16;

// A device takes as long as any other one: kernels give up when they have waited for one for so long.
inline constexpr uint64_t kTimeoutNs = 120'000'000'000;

// A slot holds one array of one device. A device sends its array to every other one: with more bytes, an all-reduce
// that sends shares of the array is faster.
inline constexpr int64_t kMostSentBytes = int64_t{8} << 20;
inline constexpr int64_t slot_bytes(int64_t devices) {
  return kMostSentBytes / (devices - 1) / kVectorBytes * kVectorBytes;
}

// A flag is the turn of the lane that sent it and, in the low bits, the number of its call.
inline constexpr int kCallBits = 24;

// The start of the workspace of each device. Two slots of each device follow: for even and for odd turns.
struct Header {
  uint64_t turns[kLanes];                  // calls in which each lane took part
  uint64_t flags[2][kMaxDevices][kLanes];  // by parity of the turn, sending device and lane
};

inline constexpr int64_t workspace_bytes(int64_t devices) {
  return static_cast<int64_t>(sizeof(Header)) + 2 * devices * slot_bytes(devices);
}

// Why a kernel gave up; 0: it did not.
enum class Failure : uint32_t { kNone, kTimeout, kOtherCall };

struct Params {
  const void* in;
  void* out;
  char* workspaces[kMaxDevices];  // of all devices, by rank
  uint32_t* failure;              // in host memory
  int64_t elements;
  uint64_t timeout_ns;
  uint32_t call;       // less than 2^kCallBits
  int32_t rank;        // of this device
  int32_t is_aligned;  // whether `in` and `out` are 16-byte aligned
};

}  // namespace tcgemm::all_reduce
