// All-reduces of several devices. The blocks of all devices are one cluster, so that they run at the same time; a
// device begins a call when all of its blocks have ended the call before.
#include <cstdlib>
#include <cstring>
#include <memory>
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

template <typename T>
std::string run(int num_calls, int num_lanes, const int64_t* elements, void* const* arrays, const uint32_t* numbers,
                uint64_t timeout_ns, uint32_t* failure) {
  const auto bytes = static_cast<size_t>((all_reduce::workspace_bytes(kDevices) + 255) / 256 * 256);
  std::vector<std::unique_ptr<void, void (*)(void*)>> workspaces;
  std::vector<Params> params;
  for (int device = 0; device < kDevices; ++device) {
    workspaces.emplace_back(std::aligned_alloc(256, bytes), std::free);
    std::memset(workspaces.back().get(), 0, sizeof(all_reduce::Header));
    // What no call has stored is NaN.
    char* const slots = static_cast<char*>(workspaces.back().get()) + sizeof(all_reduce::Header);
    for (int slot = 0; slot < 2 * kDevices; ++slot) {
      std::memset(slots + slot * all_reduce::slot_bytes(kDevices), 0xFF, num_lanes * all_reduce::kThreads * 16);
    }
  }
  for (int call = 0; call < num_calls; ++call) {
    for (int device = 0; device < kDevices; ++device) {
      Params p{};
      p.in = arrays[(2 * call) * kDevices + device];
      p.out = arrays[(2 * call + 1) * kDevices + device];
      for (int i = 0; i < kDevices; ++i) p.workspaces[i] = static_cast<char*>(workspaces[i].get());
      p.failure = failure;
      p.elements = elements[call];
      p.timeout_ns = timeout_ns;
      p.call = numbers[call * kDevices + device];
      p.rank = device;
      p.is_aligned = reinterpret_cast<uintptr_t>(p.in) % 16 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
      params.push_back(p);
    }
  }
  emulator::Launch launch{dim3(num_lanes * kDevices), dim3(all_reduce::kThreads), 0};
  launch.cluster_size = num_lanes * kDevices;
  emulator::Machine& machine = emulator::Machine::get();
  KernelEnd ends[kDevices];
  machine.run(launch, [&] {
    const int lane = static_cast<int>(blockIdx.x) / kDevices, device = static_cast<int>(blockIdx.x) % kDevices;
    for (int call = 0; call < num_calls; ++call) {
      all_reduce::reduce_lane<T, kDevices>(params[call * kDevices + device], lane);
      ends[device].wait(num_lanes * all_reduce::kThreads);
    }
  });
  return machine.last_error;
}

}  // namespace

extern "C" {

// Calls of every device one after another. `arrays` holds, for each call, the operands of all devices and their
// results, `numbers` the call's number on each device. Returns what went wrong, or nothing.
const char* emulate_all_reduces(const char* dtype, int num_calls, int num_lanes, const int64_t* elements,
                                void* const* arrays, const uint32_t* numbers, uint64_t timeout_ns, uint32_t* failure,
                                uint64_t seed, int mutant) {
  emulator::Machine& machine = emulator::Machine::get();
  machine.options = {};
  machine.options.seed = seed;
  machine.options.mutant = mutant;
  machine.last_error.clear();
  const std::string name = dtype;
  const auto run_as = name == "f32" ? &run<float> : name == "f16" ? &run<__half> : &run<__nv_bfloat16>;
  static std::string message;
  message = run_as(num_calls, num_lanes, elements, arrays, numbers, timeout_ns, failure);
  return message.c_str();
}

}  // extern "C"
