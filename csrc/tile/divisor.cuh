// Division by a number that is known before the launch.
#pragma once

#include <cstdint>

namespace tcgemm {

// n / divisor for 0 <= n < 2^31 as a multiplication and a shift (Granlund and Montgomery, "Division by
// Invariant Integers using Multiplication"): a few clocks, where a general division takes over a hundred.
class Divisor {
 public:
  Divisor() = default;
  // 1 <= divisor < 2^31
  __host__ __device__ explicit Divisor(int64_t divisor) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>(((int64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }

  __device__ __forceinline__ int32_t divide(int32_t n) const {
    return static_cast<int32_t>(high_word(2 * static_cast<uint32_t>(n), multiplier_) >> shift_);
  }

 private:
  // Of a product of 64 bits. Written as one, it takes registers, of which a kernel then spilled some.
  __host__ __device__ static uint32_t high_word(uint32_t x, uint32_t y) {
#if defined(__CUDA_ARCH__)
    return __umulhi(x, y);
#else
    return static_cast<uint32_t>(uint64_t{x} * y >> 32);
#endif
  }

  uint32_t multiplier_ = uint32_t{1} << 31, shift_ = 0;
};

}  // namespace tcgemm
