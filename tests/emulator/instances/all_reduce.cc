// All-reduces of several devices. The blocks of all devices are one cluster, so that they run at the same time; a
// device begins a call when all of its blocks have ended the call before.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kernels/all_reduce/kernel.cuh"
#include "machine.h"

namespace {

using namespace tcgemm;
using all_reduce::Params;

constexpr int kDevices = EMULATED_DEVICES;

// The end of a kernel of one device.
struct KernelEnd {
  int num_arrived = 0;
  emulator::Waiters waiters;

  void wait(int num_threads) {
    if (++num_arrived < num_threads) {
      emulator::Machine::get().wait(waiters, "for the end of a kernel");
    } else {
      num_arrived = 0;
      emulator::Machine::get().wake(waiters);
    }
  }
};

// Calls of every device, one after another.
struct Calls {
  int count, num_channels;
  const int64_t* elements;   // of each call
  void* const* arrays;       // for each call, the operands of all devices and their results
  const uint32_t* call_ids;  // of each call, on each device
  const uint32_t* runs;      // of each device
  int busy_device;           // whose first channel another kernel has; -1: none
  uint64_t timeout_ns;       // 0: kernels give up at the first look
  uint32_t* failure;
};

template <typename T>
std::string run(const Calls& calls) {
  const auto bytes = static_cast<size_t>((all_reduce::workspace_bytes(kDevices) + 255) / 256 * 256);
  std::vector<std::unique_ptr<void, void (*)(void*)>> workspaces;
  std::vector<Params> params;
  const int num_channels = calls.num_channels;
  for (int device = 0; device < kDevices; ++device) {
    workspaces.emplace_back(std::aligned_alloc(256, bytes), std::free);
    auto* const header = new (workspaces.back().get()) all_reduce::Header{};
    header->state.run = calls.runs[device];
    if (device == calls.busy_device) header->busy[0] = 1;
    // Slots that no call has stored to hold NaN.
    char* const slots = static_cast<char*>(workspaces.back().get()) + sizeof(all_reduce::Header);
    for (int slot = 0; slot < 2 * kDevices; ++slot) {
      std::memset(slots + slot * all_reduce::slot_bytes(kDevices), 0xFF, num_channels * all_reduce::kThreads * 16);
    }
  }
  for (int call = 0; call < calls.count; ++call) {
    for (int device = 0; device < kDevices; ++device) {
      Params p{};
      p.in = calls.arrays[(2 * call) * kDevices + device];
      p.out = calls.arrays[(2 * call + 1) * kDevices + device];
      for (int i = 0; i < kDevices; ++i) p.workspaces[i] = static_cast<char*>(workspaces[i].get());
      p.failure = calls.failure;
      p.elements = calls.elements[call];
      p.timeout_ns = calls.timeout_ns;
      p.looks_per_check = 1;
      p.call_id = calls.call_ids[call * kDevices + device];
      p.rank = device;
      p.is_aligned = reinterpret_cast<uintptr_t>(p.in) % 16 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
      params.push_back(p);
    }
  }
  emulator::Launch launch{dim3(num_channels * kDevices), dim3(all_reduce::kThreads), 0};
  launch.cluster_size = num_channels * kDevices;
  emulator::Machine& machine = emulator::Machine::get();
  KernelEnd ends[kDevices];
  machine.run(launch, [&] {
    const int channel = static_cast<int>(blockIdx.x) / kDevices, device = static_cast<int>(blockIdx.x) % kDevices;
    for (int call = 0; call < calls.count; ++call) {
      all_reduce::reduce_channel<T, kDevices>(params[call * kDevices + device], channel);
      ends[device].wait(num_channels * all_reduce::kThreads);
    }
  });
  return machine.last_error;
}

}  // namespace

extern "C" {

// Returns what went wrong, or nothing.
const char* emulate_all_reduces(const char* dtype, const Calls* calls, uint64_t seed, int mutant) {
  emulator::Machine& machine = emulator::Machine::get();
  machine.options = {};
  machine.options.seed = seed;
  machine.options.mutant = mutant;
  machine.last_error.clear();
  const std::string name = dtype;
  const auto run_as = name == "f32" ? &run<float> : name == "f16" ? &run<__half> : &run<__nv_bfloat16>;
  static std::string message;
  message = run_as(*calls);
  return message.c_str();
}

}  // extern "C"
