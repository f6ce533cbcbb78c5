// Devices of one process that reach each other's memory, and what a call of a program knows of them.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "core/implementation.h"
#include "kernels/all_reduce/params.cuh"

namespace tcgemm::all_reduce {

// The workspaces of some devices, allocated once and kept until the process ends: kernels may use them at any time.
class Group {
 public:
  // The group of these devices, in ascending order; made at the first call.
  static Status find(const std::vector<int>& ordinals, const Group** group);

  const std::vector<int>& ordinals() const { return ordinals_; }
  // Workspaces by rank, the position of a device in ordinals().
  const std::array<char*, kMaxDevices>& workspaces() const { return workspaces_; }
  // -1 for a device that is not in it.
  int rank_of(int ordinal) const;

  // Where kernels write why they gave up.
  uint32_t* failure() const { return failure_; }
  // What they wrote. A group that has failed stays so: the counts of its devices may differ.
  Status status() const;
  void fail(Failure failure) const { *failure_ = static_cast<uint32_t>(failure); }

 private:
  explicit Group(std::vector<int> ordinals) : ordinals_(std::move(ordinals)) {}
  Status allocate();

  const std::vector<int> ordinals_;
  std::array<char*, kMaxDevices> workspaces_{};
  uint32_t* failure_ = nullptr;
};

// The state of a call of one loaded program, on all devices that run it.
class Call {
 public:
  explicit Call(int64_t num_devices);

  // Begins execution `run` of the program on a device, before any kernel of it is launched. The first execution waits
  // until all devices have come here. An execution that does not come in the same order on all devices is refused:
  // kernels of different executions would exchange their arrays.
  Status begin(int ordinal, int64_t run);

  // Null before the first execution.
  const Group* group() const;
  // What the flags of this call say.
  uint32_t number() const { return number_; }

 private:
  Status meet(int ordinal, std::unique_lock<std::mutex>* lock);

  const size_t num_devices_;
  const uint32_t number_;
  mutable std::mutex mutex_;
  std::condition_variable has_changed_;
  std::vector<int> arrived_;
  const Group* group_ = nullptr;
  Status status_;                   // of making the group
  std::map<int, int64_t> num_run_;  // executions begun, by device
  std::deque<int64_t> runs_;        // those that some device has not begun yet
  int64_t num_dropped_ = 0;         // executions before these
};

// Whether every GPU of this process reaches the memory of every other one; else the reason.
Status check_peer_access();

}  // namespace tcgemm::all_reduce
