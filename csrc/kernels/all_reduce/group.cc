#include "kernels/all_reduce/group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/cuda_status.h"
#include "core/relaxed_capture.h"

namespace tcgemm::all_reduce {
namespace {

// How long the devices of a program's first execution wait for each other.
constexpr std::chrono::milliseconds kMeetingTime{60'000};

// Makes a device the calling thread's until the end of the block.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    cudaGetDevice(&before_);
    cudaSetDevice(ordinal);
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

Status check_access(int device, int peer) {
  int can_access = 0;
  const cudaError_t error = cudaDeviceCanAccessPeer(&can_access, device, peer);
  if (Status s = cuda_status(error, "cudaDeviceCanAccessPeer"); !s.is_ok()) return s;
  if (can_access) return Status::ok();
  return Status::invalid("GPU " + std::to_string(device) + " cannot access the memory of GPU " + std::to_string(peer));
}

Status enable_access(int peer) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) return cuda_status(error, "cudaDeviceEnablePeerAccess");
  cudaGetLastError();
  return Status::ok();
}

}  // namespace

Status Group::find(const std::vector<int>& ordinals, const Group** group) {
  static std::mutex& mutex = *new std::mutex;
  static auto& groups = *new std::map<std::vector<int>, std::unique_ptr<Group>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Group>& found = groups[ordinals];
  if (found == nullptr) {
    std::unique_ptr<Group> made(new Group(ordinals));
    if (Status s = made->allocate(); !s.is_ok()) return s;
    found = std::move(made);
  }
  *group = found.get();
  return Status::ok();
}

Status Group::allocate() {
  const RelaxedCapture relaxed;
  for (const int device : ordinals_) {
    for (const int peer : ordinals_) {
      if (device == peer) continue;
      if (Status s = check_access(device, peer); !s.is_ok()) return s;
      const CurrentDevice current(device);
      if (Status s = enable_access(peer); !s.is_ok()) return s;
    }
  }
  const auto size = static_cast<size_t>(workspace_bytes(static_cast<int64_t>(ordinals_.size())));
  for (size_t rank = 0; rank < ordinals_.size(); ++rank) {
    const CurrentDevice current(ordinals_[rank]);
    void* memory = nullptr;
    if (Status s = cuda_status(cudaMalloc(&memory, size), "cudaMalloc"); !s.is_ok()) {
      return Status::internal(s.message + "; leave " + std::to_string(size) +
                              " bytes outside of JAX's pool of memory (XLA_PYTHON_CLIENT_MEM_FRACTION)");
    }
    workspaces_[rank] = static_cast<char*>(memory);
    // Slots are read after they have been written only.
    if (Status s = cuda_status(cudaMemset(memory, 0, sizeof(Header)), "cudaMemset"); !s.is_ok()) return s;
    if (Status s = cuda_status(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"); !s.is_ok()) return s;
  }
  void* failure = nullptr;
  const cudaError_t error = cudaHostAlloc(&failure, sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped);
  if (Status s = cuda_status(error, "cudaHostAlloc"); !s.is_ok()) return s;
  failure_ = static_cast<uint32_t*>(failure);
  *failure_ = static_cast<uint32_t>(Failure::kNone);
  return Status::ok();
}

Group::~Group() {
  for (size_t rank = 0; rank < ordinals_.size(); ++rank) {
    const CurrentDevice current(ordinals_[rank]);
    cudaFree(workspaces_[rank]);
  }
  cudaFreeHost(failure_);
}

int Group::rank_of(int ordinal) const {
  const auto found = std::find(ordinals_.begin(), ordinals_.end(), ordinal);
  return found == ordinals_.end() ? -1 : static_cast<int>(found - ordinals_.begin());
}

Status Group::begin(int ordinal, int64_t run, cudaStream_t stream) const {
  if (Status s = status(); !s.is_ok()) return s;
  const int rank = rank_of(ordinal);
  if (rank < 0) {
    return Status::internal("the program ran on other devices before, got device " + std::to_string(ordinal));
  }
  // One execution may have many calls.
  if (runs_[rank].exchange(run) == run) return Status::ok();
  const RelaxedCapture relaxed;
  const auto number = static_cast<uint32_t>(run);
  char* const address = workspaces_[rank] + offsetof(Header, state) + offsetof(State, run);
  return cuda_status(cudaMemcpyAsync(address, &number, sizeof(number), cudaMemcpyHostToDevice, stream),
                     "cudaMemcpyAsync");
}

Status Group::status() const {
  const std::string restart = "; results are NaN; start the process again";
  switch (static_cast<Failure>(*static_cast<volatile const uint32_t*>(failure_))) {
    case Failure::kNone: return Status::ok();
    case Failure::kTimeout:
      return Status::internal("a device waited for another one for over " + std::to_string(kTimeoutNs / 1'000'000'000) +
                              " seconds" + restart);
    case Failure::kOtherCall:
      return Status::internal(
          "devices ran programs in different orders, or one of them did not run a program that others ran; call "
          "programs that share devices from one thread" +
          restart);
    case Failure::kConcurrent: break;
  }
  return Status::internal("a device ran two sums over devices at the same time, on two streams" + restart);
}

CallState::CallState(int64_t num_devices)
    : devices_(static_cast<size_t>(num_devices), kMeetingTime), call_id_([] {
        static std::atomic<uint32_t> count{0};
        return ++count;
      }()) {}

Status CallState::begin(int ordinal, int64_t run, cudaStream_t stream) {
  const Group* group = nullptr;
  if (Status s = devices_.meet(ordinal, &Group::find, &group); !s.is_ok()) return s;
  return group->begin(ordinal, run, stream);
}

Status check_peer_access() {
  int count = 0;
  if (Status s = cuda_status(cudaGetDeviceCount(&count), "cudaGetDeviceCount"); !s.is_ok()) return s;
  for (int device = 0; device < count; ++device) {
    for (int peer = 0; peer < count; ++peer) {
      if (device == peer) continue;
      if (Status s = check_access(device, peer); !s.is_ok()) return s;
    }
  }
  return Status::ok();
}

}  // namespace tcgemm::all_reduce
