// Devices of one process that reach each other's memory, and what a call of a program knows of them.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/implementation.h"
#include "kernels/all_reduce/params.cuh"
#include "kernels/all_reduce/rendezvous.h"

namespace tcgemm::all_reduce {

// The workspaces of some devices, allocated once and kept until the process ends: kernels may use them at any time.
class Group {
 public:
  // The group of these devices, in ascending order; made at the first call.
  static Status find(const std::vector<int>& ordinals, const Group** group);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::vector<int>& ordinals() const { return ordinals_; }
  // Workspaces by rank, the position of a device in ordinals().
  const std::array<char*, kMaxDevices>& workspaces() const { return workspaces_; }
  // -1 for a device that is not in it.
  int rank_of(int ordinal) const;

  // Tells the kernels of a device which execution of a program they are of, when `stream` gets there.
  Status begin(int ordinal, int64_t run, cudaStream_t stream) const;

  // Where kernels write why they gave up.
  uint32_t* failure() const { return failure_; }
  // The failure that a kernel wrote, if any. A group that has failed stays so: the counts of its devices may differ.
  Status status() const;

 private:
  explicit Group(std::vector<int> ordinals) : ordinals_(std::move(ordinals)) {}
  Status allocate();

  const std::vector<int> ordinals_;
  std::array<char*, kMaxDevices> workspaces_{};
  uint32_t* failure_ = nullptr;
  mutable std::array<std::atomic<int64_t>, kMaxDevices> runs_{};  // the last one that each device was told
};

// The state of a call of one loaded program, on all devices that run it.
class CallState {
 public:
  explicit CallState(int64_t num_devices);

  // Begins execution `run` of the program on a device, before any kernel of it is launched. In the first execution,
  // waits until all devices have come here.
  Status begin(int ordinal, int64_t run, cudaStream_t stream);

  // Null before the first execution.
  const Group* group() const { return devices_.result(); }
  // Part of the flags of this call.
  uint32_t call_id() const { return call_id_; }

 private:
  Rendezvous<Group> devices_;
  const uint32_t call_id_;
};

// Whether every GPU of this process reaches the memory of every other one; else the reason.
Status check_peer_access();

}  // namespace tcgemm::all_reduce
