#include "instructions.h"

#include <algorithm>
#include <cmath>

#include "tensor_map.h"

namespace emulator {

float to_float(Format format, uint32_t bits) {
  float value;
  switch (format) {
    case Format::kF16: {
      __half_raw raw;
      raw.x = static_cast<unsigned short>(bits);
      return __half2float(__half(raw));
    }
    case Format::kBF16: bits <<= 16; break;
    case Format::kTF32: bits &= ~0x1FFFu; break;
    case Format::kS8: return static_cast<int8_t>(bits);
    case Format::kU8: return static_cast<uint8_t>(bits);
    case Format::kE4M3: {
      const uint32_t exponent = bits >> 3 & 15, mantissa = bits & 7;
      if ((bits & 0x7F) == 0x7F) return NAN;
      value = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : mantissa + 8),
                         std::max(static_cast<int>(exponent), 1) - 10);
      return bits & 0x80 ? -value : value;
    }
    case Format::kE5M2: return to_float(Format::kF16, bits << 8);  // a float16's high byte
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

uint32_t round_to_tf32(uint32_t bits) {
  if ((bits & 0x7F800000u) == 0x7F800000u) return bits;  // infinities and NaN
  return (bits + 0xFFFu + (bits >> 13 & 1)) & ~0x1FFFu;
}

// Barriers in shared memory ------------------------------------------------------------------------

namespace {

// What a barrier's memory holds, so that whoever writes there is found out.
constexpr uint64_t kBarrierMark = 0x6261727269657221;

MBarrier& barrier_at(Block& block, uint32_t offset) {
  const auto found = block.mbarriers.find(offset);
  if (found == block.mbarriers.end()) {
    fail("uses an mbarrier of block " + std::to_string(block.idx.x) + " at " + std::to_string(offset) +
         " that is not initialised");
  }
  uint64_t mark;
  std::memcpy(&mark, block.memory + offset, 8);
  if (mark != kBarrierMark) fail("uses an mbarrier that has been overwritten");
  return found->second;
}

void complete_phase_if_due(MBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  Machine::get().wake(barrier.waiters);
}

void arrive(Block& block, uint32_t offset, uint32_t bytes) {
  MBarrier& barrier = barrier_at(block, offset);
  if (barrier.pending == 0) fail("arrives at an mbarrier more often than it expects");
  barrier.bytes += bytes;
  --barrier.pending;
  complete_phase_if_due(barrier);
}

}  // namespace

void mbarrier_init(uint32_t address, uint32_t count) {
  const SharedPlace place = resolve(address, 8, 8);
  std::memcpy(place.pointer(), &kBarrierMark, 8);
  MBarrier& barrier = place.block->mbarriers[place.offset];
  if (!barrier.waiters.empty()) fail("initialises an mbarrier that others wait for");
  barrier = {};
  barrier.expected = barrier.pending = count;
}

void mbarrier_arrive(uint32_t address, uint32_t bytes) {
  const SharedPlace place = resolve(address, 8, 8);
  arrive(*place.block, place.offset, bytes);
  if (Machine::get().current != nullptr) Machine::get().may_switch();
}

void mbarrier_complete(Block& block, uint32_t offset, uint32_t bytes) {
  MBarrier& barrier = barrier_at(block, offset);
  barrier.bytes -= bytes;
  complete_phase_if_due(barrier);
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  const SharedPlace place = resolve(address, 8, 8);
  MBarrier& barrier = barrier_at(*place.block, place.offset);
  Machine::get().may_switch();
  while ((barrier.phase & 1) == (parity & 1)) {
    Machine::get().wait(barrier.waiters, "at the mbarrier at %, parity %", place.offset, parity);
  }
}

// Clusters -----------------------------------------------------------------------------------------

uint32_t map_to_block(uint32_t address, uint32_t rank) {
  if (rank >= Machine::get().cluster.size()) fail("maps an address to a block that the cluster has not got");
  return (address & 0xFFFFFF) | (rank + 1) << 24;
}

void write_remotely(std::function<void()> write) { current().remote_writes.issue(std::move(write)); }

template <typename T>
static void store_and_wake(T* address, T value) {
  write_remotely([=] {
    *address = value;
    ++Machine::get().num_flag_stores;
    Machine::get().wake(Machine::get().flag_waiters);
  });
}

void store_flag(uint32_t* address, uint32_t value) { store_and_wake(address, value); }

void release_flag(uint64_t* address, uint64_t value) {
  for (const auto& thread : current().block->threads) thread->remote_writes.run_all();
  store_and_wake(address, value);
}

uint64_t poll_flag(const uint64_t* address) {
  Thread& thread = current();
  Machine& machine = Machine::get();
  if (thread.polled == address && thread.polled_at == machine.num_flag_stores) {
    machine.wait(machine.flag_waiters, "for a flag");
  }
  thread.polled = address;
  thread.polled_at = machine.num_flag_stores;
  return *address;
}

void store_async(uint32_t address, std::array<float, 4> values, uint32_t barrier) {
  const SharedPlace place = resolve(address, 16, 16), counted_at = resolve(barrier, 8, 8);
  if (place.block != counted_at.block) fail("stores into one block what a barrier of another one counts");
  ++place.block->loads_under_way;
  Machine::get().issue_alone([=] {
    std::memcpy(place.pointer(), values.data(), 16);
    --place.block->loads_under_way;
    mbarrier_complete(*place.block, counted_at.offset, 16);
  });
}

void cluster_arrive() {
  Machine& machine = Machine::get();
  Thread& thread = current();
  if (thread.is_cluster_arrived) fail("arrives at the cluster's barrier twice");
  thread.is_cluster_arrived = true;
  auto& barrier = machine.cluster_barrier;
  thread.cluster_phase = barrier.phase;
  if (++barrier.arrived == machine.launch.cluster_size * machine.launch.block.x) {
    barrier.arrived = 0;
    ++barrier.phase;
    machine.wake(barrier.waiters);
  }
}

void cluster_wait() {
  Thread& thread = current();
  if (!thread.is_cluster_arrived) fail("waits at the cluster's barrier without having arrived");
  auto& barrier = Machine::get().cluster_barrier;
  while (barrier.phase == thread.cluster_phase) Machine::get().wait(barrier.waiters, "at the cluster's barrier");
  thread.is_cluster_arrived = false;
}

void set_registers(int count, bool is_increase, int blocks) {
  Thread& thread = current();
  Block& block = *thread.block;
  if (thread.registers == launch_registers(1)) thread.registers = launch_registers(blocks);
  if (count % 8 != 0 || count < 24 || count > 256) fail("setmaxnreg to a number it does not take");
  if (is_increase != (count > thread.registers)) {
    fail("setmaxnreg from " + std::to_string(thread.registers) + " to " + std::to_string(count));
  }
  while (block.free_registers < count - thread.registers) {
    Machine::get().wait(block.register_waiters, "for % registers", count);
  }
  block.free_registers -= count - thread.registers;
  thread.registers = count;
  Machine::get().wake(block.register_waiters);
}

// Copies and matrix instructions of a warp ---------------------------------------------------------

void cp_async(uint32_t destination, const void* source, uint32_t bytes, uint32_t valid) {
  uint8_t* target = resolve(destination, bytes, bytes).pointer();
  if (valid > 0 && reinterpret_cast<uintptr_t>(source) % bytes != 0) {
    fail("cp.async from an address that is not aligned");
  }
  if (valid > bytes) fail("cp.async of more bytes than it copies");
  current().copies.queue.issue([=] {
    std::memcpy(target, source, valid);
    std::memset(target + valid, 0, bytes - valid);
  });
}

void cp_async_arrive(uint32_t barrier) {
  const SharedPlace place = resolve(barrier, 8, 8);
  current().copies.queue.issue([=] { arrive(*place.block, place.offset, 0); });
}

namespace {

struct MatrixAccess {
  uint8_t* row;
  uint32_t* registers;
};

// Calls visit(register half, element in shared memory) for all of four 8x8 matrices.
template <typename Visit>
void visit_matrices(void** lanes, bool transposed, const Visit& visit) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int i = 0; i < 2; ++i) {
        const int along = lane % 4 * 2 + i, across = lane / 4;
        const int row = transposed ? along : across, column = transposed ? across : along;
        uint8_t* element = static_cast<MatrixAccess*>(lanes[matrix * 8 + row])->row + column * 2;
        auto* half = reinterpret_cast<uint8_t*>(&static_cast<MatrixAccess*>(lanes[lane])->registers[matrix]) + i * 2;
        visit(half, element);
      }
    }
  }
}

}  // namespace

void ldmatrix_x4(uint32_t (&r)[4], uint32_t address, bool transposed) {
  MatrixAccess access{resolve(address, 16, 16).pointer(), r};
  meet("ldmatrix", ~0u, &access, [=](void** lanes) {
    visit_matrices(lanes, transposed, [](uint8_t* half, const uint8_t* element) { std::memcpy(half, element, 2); });
  });
}

void stmatrix_x4(uint32_t address, std::array<uint32_t, 4> r, bool transposed) {
  MatrixAccess access{resolve(address, 16, 16).pointer(), r.data()};
  meet("stmatrix", ~0u, &access, [=](void** lanes) {
    visit_matrices(lanes, transposed, [](const uint8_t* half, uint8_t* element) { std::memcpy(element, half, 2); });
  });
}

namespace {

// Of A, register 2 * h + r holds row lane / 4 + 8 * r and the h-th half of k; of B, register h the column
// lane / 4 of that half. A register is the lane % 4-th run of 4 / size elements.
template <typename Sum>
void multiply(Format of_a, Format of_b, Sum (&d)[4], const std::array<uint32_t, 6>& operands) {
  struct Fragment {
    Sum* d;
    const uint32_t* operands;
  } fragment{d, operands.data()};
  meet("mma", ~0u, &fragment, [=](void** lanes) {
    const int bytes = bytes_of(of_a), run = 4 / bytes, half = 4 * run;
    Sum a[16][32], b[8][32];
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t* registers = static_cast<Fragment*>(lanes[lane])->operands;
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < run; ++i) {
          const int k = h * half + lane % 4 * run + i;
          const auto element = [&](Format format, int r) {
            return static_cast<Sum>(to_float(format, registers[r] >> i * 8 * bytes));
          };
          for (int r = 0; r < 2; ++r) a[lane / 4 + 8 * r][k] = element(of_a, 2 * h + r);
          b[lane / 4][k] = element(of_b, 4 + h);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        Sum sum{};
        for (int k = 0; k < 2 * half; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[lane % 4 * 2 + i % 2][k];
        static_cast<Fragment*>(lanes[lane])->d[i] += sum;
      }
    }
  });
}

}  // namespace

void mma(Format a, Format b, float (&d)[4], std::array<uint32_t, 6> operands) { multiply(a, b, d, operands); }
void mma(Format a, Format b, int32_t (&d)[4], std::array<uint32_t, 6> operands) { multiply(a, b, d, operands); }

}  // namespace emulator
