// wgmma. A warpgroup multiplies once each of its threads has issued the instruction, at any time until it
// is waited for.
#include <algorithm>
#include <cmath>

#include "instructions.h"

namespace emulator {

struct Multiplication {
  WgmmaShape shape;
  int num_threads = 0;
  float* values[128];
  uint32_t a_registers[128][4];
};

namespace {

// What a lane finds in registers that wgmma still works on.
constexpr uint32_t kTaken = 0x7FC0DEAD;

constexpr int kMaxN = 256, kMaxK = 32;

// An operand's descriptor (PTX ISA, "Matrix Descriptor Format"): where a 16-byte chunk lies.
struct Descriptor {
  uint32_t start, leading, stride, row_bytes;

  explicit Descriptor(uint64_t bits) {
    start = static_cast<uint32_t>(bits & 0x3FFF) << 4;
    leading = static_cast<uint32_t>(bits >> 16 & 0x3FFF) << 4;
    stride = static_cast<uint32_t>(bits >> 32 & 0x3FFF) << 4;
    constexpr uint32_t kRowBytes[] = {16, 128, 64, 32};
    row_bytes = kRowBytes[bits >> 62];
    if ((bits >> 49 & 7) != 0) fail("a matrix descriptor has a base offset, which is not modelled");
  }

  // Byte `k_byte` of row `row` of a K-major operand.
  uint32_t k_major(int row, int k_byte) const {
    const uint32_t offset = row / 8 * stride + row % 8 * row_bytes;
    return swizzle(start + offset + (row_bytes == 16 ? k_byte / 16 * leading + k_byte % 16 : k_byte));
  }
  // Byte `byte` along M or N of row k.
  uint32_t mn_major(int byte, int k) const {
    if (row_bytes == 16) fail("an M- or N-major operand without a swizzle is not modelled");
    return swizzle(start + byte / row_bytes * leading + k / 8 * stride + k % 8 * row_bytes + byte % row_bytes);
  }
  // The bits from 16 bytes on are flipped by those from 128 bytes on.
  uint32_t swizzle(uint32_t address) const { return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4); }
};

// `count` rows of an operand: out[k * kMaxN + row].
void read_operand(const Block& block, Format format, uint64_t bits, bool mn_major, int count, float* out) {
  const Descriptor descriptor(bits);
  const int bytes = bytes_of(format), per_chunk = 16 / bytes, depth = 32 / bytes;
  const auto read_chunk = [&](uint32_t address, float (&values)[16]) {
    if (address + 16 > block.memory_bytes) fail("wgmma reads past its block's shared memory");
    if (block.unfenced_writers[address / kFencedUnit] != 0) {
      fail("wgmma reads what a thread has stored without fence.proxy.async");
    }
    for (int i = 0; i < per_chunk; ++i) {
      uint32_t element = 0;
      std::memcpy(&element, block.memory + address + i * bytes, bytes);
      values[i] = to_float(format, element);
    }
  };
  float values[16];
  if (mn_major) {
    for (int k = 0; k < depth; ++k) {
      for (int row = 0; row < count; row += per_chunk) {
        read_chunk(descriptor.mn_major(row * bytes, k), values);
        std::copy_n(values, per_chunk, out + k * kMaxN + row);
      }
    }
  } else {
    for (int row = 0; row < count; ++row) {
      for (int chunk = 0; chunk < 2; ++chunk) {
        read_chunk(descriptor.k_major(row, chunk * 16), values);
        for (int i = 0; i < per_chunk; ++i) out[(chunk * per_chunk + i) * kMaxN + row] = values[i];
      }
    }
  }
}

// To the 13 bits of mantissa that the tensor core keeps of sums of 8-bit floats.
float truncated(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits &= ~0x3FFu;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The sum of two floats without rounding, cut off after 24 bits: of 16-bit floats accumulators are not rounded.
float cut_off(float x, float y) {
  const double exact = static_cast<double>(x) + y;
  const float nearest = static_cast<float>(exact);
  return std::abs(nearest) > std::abs(exact) ? std::nextafter(nearest, 0.0f) : nearest;
}

void multiply(const Block& block, const Multiplication& x) {
  const WgmmaShape& shape = x.shape;
  const int depth = 32 / bytes_of(shape.a);
  const bool is_integer = shape.a == Format::kS8 || shape.a == Format::kU8,
             is_f8 = bytes_of(shape.a) == 1 && !is_integer;
  static float a[kMaxK * kMaxN], b[kMaxK * kMaxN], sums[kMaxN];
  read_operand(block, shape.b, shape.desc_b, shape.trans_b, shape.n, b);
  if (shape.a_in_registers) {
    // A register has neighbors along K.
    const int bytes = bytes_of(shape.a), run = 4 / bytes;
    for (int thread = 0; thread < 128; ++thread) {
      for (int i = 0; i < 4; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8, k = (thread % 4 + i / 2 * 4) * run;
        for (int e = 0; e < run; ++e) {
          a[(k + e) * kMaxN + row] = to_float(shape.a, x.a_registers[thread][i] >> e * 8 * bytes);
        }
      }
    }
  } else {
    read_operand(block, shape.a, shape.desc_a, shape.trans_a, 64, a);
  }
  for (int row = 0; row < 64; ++row) {
    std::fill_n(sums, shape.n, 0.0f);
    for (int k = 0; k < depth; ++k) {
      const float factor = a[k * kMaxN + row];
      const float* column = b + k * kMaxN;
      for (int n = 0; n < shape.n; ++n) sums[n] += factor * column[n];
    }
    for (int n = 0; n < shape.n; ++n) {
      float& value = x.values[row / 16 * 32 + row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 % 2 * 2 + n % 2];
      if (is_integer) {
        // Of 32 products: floats have them exactly. What is held are the bits of an int32.
        int32_t sum = 0;
        if (shape.accumulate) std::memcpy(&sum, &value, 4);
        sum = static_cast<int32_t>(static_cast<uint32_t>(sum) + static_cast<uint32_t>(static_cast<int32_t>(sums[n])));
        std::memcpy(&value, &sum, 4);
        continue;
      }
      value = shape.accumulate ? cut_off(value, sums[n]) : sums[n];
      if (is_f8) value = truncated(value);
    }
  }
}

bool same(const WgmmaShape& x, const WgmmaShape& y) {
  return x.a == y.a && x.b == y.b && x.n == y.n && x.trans_a == y.trans_a && x.trans_b == y.trans_b &&
         x.a_in_registers == y.a_in_registers && x.desc_a == y.desc_a && x.desc_b == y.desc_b &&
         x.accumulate == y.accumulate;
}

// The thread's accumulators at `d`, taken from it if they are not yet.
float* take(Thread& thread, float* d, int count, bool reads) {
  for (Accumulators& taken : thread.accumulators) {
    if (taken.registers + taken.count <= d || d + count <= taken.registers) continue;
    if (taken.registers != d || taken.count != count) fail("two wgmma of different shapes share accumulators");
    taken.last_use = thread.num_issued;
    return taken.values.get();
  }
  if (!thread.has_fenced_registers) fail("wgmma on registers that no wgmma.fence has handed over");
  Accumulators taken{d, count, thread.num_issued, std::make_unique<float[]>(count)};
  if (reads) std::copy_n(d, count, taken.values.get());
  for (int i = 0; i < count; ++i) std::memcpy(d + i, &kTaken, 4);
  thread.accumulators.push_back(std::move(taken));
  return thread.accumulators.back().values.get();
}

}  // namespace

void wgmma(const WgmmaShape& shape, float* d, const uint32_t* a) {
  Thread& thread = current();
  Warpgroup& group = *thread.warpgroup;
  const size_t i = thread.num_issued - group.num_formed;
  if (i == group.forming.size()) {
    group.forming.push_back(std::make_shared<Multiplication>());
    group.forming.back()->shape = shape;
  }
  Multiplication& x = *group.forming[i];
  if (!same(x.shape, shape)) fail("wgmma with other operands than other threads of its warpgroup");
  if (bytes_of(shape.a) != bytes_of(shape.b)) fail("wgmma of elements of unlike sizes");
  if ((shape.a == Format::kS8 || shape.a == Format::kU8) && shape.n % 16 != 0 && shape.n > 24) {
    fail("wgmma of integers with other numbers of columns than 8, 16, 24 and multiples of 16");
  }
  if (bytes_of(shape.a) != 2 && (shape.trans_a || shape.trans_b)) {
    fail("wgmma of an operand that is not K-major and has no elements of 16 bits");
  }
  const int thread_idx = thread.idx.x % 128;
  x.values[thread_idx] = take(thread, d, shape.n / 2, shape.accumulate);
  if (a != nullptr) std::copy_n(a, 4, x.a_registers[thread_idx]);
  ++thread.num_issued;
  if (++x.num_threads == 128) {
    group.multiplications.issue([&group, formed = group.forming.front()] { multiply(*group.block, *formed); });
    group.forming.pop_front();
    ++group.num_formed;
    Machine::get().wake(group.waiters);
  }
}

void wgmma_commit() {
  Thread& thread = current();
  Warpgroup& group = *thread.warpgroup;
  while (!Machine::get().options.loose_warpgroups && group.num_formed < thread.num_issued) {
    Machine::get().wait(group.waiters, "for its warpgroup to issue % wgmma", static_cast<uint32_t>(thread.num_issued));
  }
  thread.group_ends.push_back(thread.num_issued);
}

void wgmma_wait(int pending) {
  Machine& machine = Machine::get();
  Thread& thread = current();
  Warpgroup& group = *thread.warpgroup;
  machine.may_switch();
  const int num_groups = static_cast<int>(thread.group_ends.size());
  if (num_groups <= pending) return;
  const int64_t end = thread.group_ends[num_groups - 1 - pending];
  while (group.num_formed < end) {
    machine.wait(group.waiters, "for its warpgroup to issue % wgmma", static_cast<uint32_t>(end));
  }
  group.multiplications.wait_until(end);
  auto& taken = thread.accumulators;
  for (size_t i = 0; i < taken.size();) {
    if (taken[i].last_use >= end) {
      ++i;
      continue;
    }
    for (int j = 0; j < taken[i].count; ++j) {
      if (std::memcmp(taken[i].registers + j, &kTaken, 4) != 0) fail("wrote to registers while wgmma worked on them");
    }
    std::copy_n(taken[i].values.get(), taken[i].count, taken[i].registers);
    taken.erase(taken.begin() + i);
    thread.has_fenced_registers = false;
  }
}

}  // namespace emulator
