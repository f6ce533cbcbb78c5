// From bits of a packed weight to fragments of the instruction's A, in registers.
//
// A word has a step's eight integers: of the rows g and g + 8 of A (r = 0, 1), of both halves of its 16 columns
// (h = 0, 1), two neighbors (e = 0, 1). The pair p = 2h + r is A's register p.
//
//   4 bits   pair p at bits 4p and 16 + 4p; of a table at bits 8p and 8p + 4
//   8 bits   a word for each h: pair r at bits 8r and 16 + 8r
//
// An unsigned integer u becomes a float without conversion: in the low bits of 128 (bf16) or 1024 (f16) it is
// 128 + u, of which 128 + zero is subtracted, exactly.
//
// Beside x of 8-bit floats all of two words are the A of one instruction, whose K is 32: of four neighbors in memory
// the second and third are exchanged, as order_kernel.cuh exchanges those of x. The number of an e4m3 is, up to 16,
// what its bits count: units of 2^-9, to be multiplied away. So differences of 4 bits are converted by integers'
// operations, of four at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/packed/geometry.h"
#include "ptx/bits.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/types.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::packed {

template <typename X>
inline constexpr bool kIsFloat8 = std::is_same_v<X, ptx::E4M3>;

// What one bit of an e4m3 counts, up to 16.
inline constexpr float kFloat8Unit = 1.0f / 512;

template <typename X>
using Pair = std::conditional_t<std::is_same_v<X, __half>, __half2, __nv_bfloat162>;

template <typename X>
__device__ __forceinline__ Pair<X> pair_from(uint32_t bits) {
  Pair<X> pair;
  memcpy(&pair, &bits, 4);
  return pair;
}

template <typename AnyPair>
__device__ __forceinline__ uint32_t bits_of(AnyPair pair) {
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

template <typename X>
__device__ __forceinline__ uint32_t subtract(uint32_t x, uint32_t y) {
  return bits_of(__hsub2(pair_from<X>(x), pair_from<X>(y)));
}

template <typename X>
__device__ __forceinline__ uint32_t multiply(uint32_t x, uint32_t y) {
  return bits_of(__hmul2(pair_from<X>(x), pair_from<X>(y)));
}

// What is subtracted from a pair of one column, of which `zero` is the zero as it is stored.
template <typename X, int kBits>
__device__ __forceinline__ uint32_t subtrahend(uint32_t zero) {
  if constexpr (kIsFloat8<X>) {
    return (16 - zero) * 0x01010101u;  // what is added: less than 16 are below zero
  } else if constexpr (std::is_same_v<X, __half>) {
    return (0x6400u + zero) * 0x10001u;
  } else if constexpr (kBits == 4) {
    return (0x4300u + zero) * 0x10001u;  // mutant: zero_off_by_one
  } else {
    // Of u - 128, which is what is made of eight bits.
    return bits_of(__float2bfloat162_rn(static_cast<float>(static_cast<int32_t>(zero) - 128)));
  }
}

// Four pairs of integers of 4 bits; subtrahends of columns g and g + 8.
template <typename X>
__device__ __forceinline__ void convert_4_bits(uint32_t word, const uint32_t (&zeros)[2], uint32_t (&a)[4]) {
  constexpr uint32_t kMagic = std::is_same_v<X, __half> ? 0x64006400u : 0x43004300u;
#pragma unroll
  // mutant: nibbles_swapped
  for (int p = 0; p < 4; ++p) a[p] = subtract<X>(ptx::lop3_and_or(word >> 4 * p, 0x000F000Fu, kMagic), zeros[p % 2]);
}

// Four pairs of float4_e2m1fn, which lie as integers of 4 bits do: a sign and three bits of an exponent and a mantissa,
// which are those of the same number times 2^-126 (bf16) or 2^-14 (f16).
template <typename X>
__device__ __forceinline__ void convert_float4(uint32_t word, uint32_t (&a)[4]) {
  constexpr bool kIsHalf = std::is_same_v<X, __half>;
  constexpr uint32_t kMask = kIsHalf ? 0x0E000E00u : 0x01C001C0u, kFactor = kIsHalf ? 0x74007400u : 0x7E807E80u;
  constexpr int kShift = kIsHalf ? 9 : 6;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    // mutant: magnitudes_of_float4
    const uint32_t magnitude = 4 * p <= kShift ? word << (kShift - 4 * p) : word >> (4 * p - kShift);
    // mutant: signs_of_float4
    const uint32_t bits = ptx::lop3_and_or(word << (12 - 4 * p), 0x80008000u, magnitude & kMask);
    a[p] = multiply<X>(bits, kFactor);
  }
}

// Four pairs of float8_e4m3fn or float8_e5m2, which lie as integers of 8 bits do. The bits of an exponent and a
// mantissa are those of the same number times 2^-120 (e4m3) or 2^-112 (e5m2) in bf16, and times 2^-8 or 1 in f16.
template <typename X, bool kIsE4M3>
__device__ __forceinline__ void convert_float8(const uint32_t (&words)[2], uint32_t (&a)[4]) {
  constexpr bool kIsHalf = std::is_same_v<X, __half>;
  constexpr int kMantissa = kIsE4M3 ? 3 : 2;              // bits
  constexpr int kShift = (kIsHalf ? 10 : 7) - kMantissa;  // mutant: mantissa_of_float8
  constexpr uint32_t kMask = (0x7Fu << kShift) * 0x10001u;
  constexpr uint32_t kFactor = kIsHalf ? 0x5C005C00u : kIsE4M3 ? 0x7B807B80u : 0x77807780u;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t word = words[p / 2];  // of whose halves column g has the low byte, column g + 8 the high one
    const uint32_t magnitude = p % 2 == 0 ? word << kShift : word >> (8 - kShift);
    // mutant: signs_of_float8
    a[p] = ptx::lop3_and_or(p % 2 == 0 ? word << 8 : word, 0x80008000u, magnitude & kMask);
    if constexpr (!kIsHalf || kIsE4M3) a[p] = multiply<X>(a[p], kFactor);
  }
}

// The value of a float of 4 or 8 bits.
template <PackedCode kCode>
__device__ __forceinline__ float float_value(uint32_t bits) {
  if constexpr (kCode == PackedCode::kE2M1) {
    return __uint_as_float((bits & 8) << 28 | (bits & 7) << 22) * 0x1p126f;
  } else if constexpr (kCode == PackedCode::kE4M3) {
    return __uint_as_float((bits & 128) << 24 | (bits & 127) << 20) * 0x1p120f;
  } else {
    static_assert(kCode == PackedCode::kE5M2);
    return __uint_as_float((bits & 128) << 24 | (bits & 127) << 21) * 0x1p112f;
  }
}

// Of four integers t, one in each byte, t - 2^kBit, which is 16 - 2^kBit at most, as e4m3 of kFloat8Unit: its size and
// a sign. Bits above kBit are not looked at.
template <int kBit>
__device__ __forceinline__ uint32_t float8_of(uint32_t t) {
  const uint32_t is_below = ~t >> kBit & 0x01010101u;
  constexpr uint32_t kLow = (1u << kBit) - 1;
  return ((t & kLow * 0x01010101u) ^ is_below * kLow) + is_below * 0x81u;  // mutant: sign_of_8_bits
}

// Sixteen integers of 4 bits as e4m3; kZero: of all, where they have no zero points.
template <bool kZeroPoints, int kZero>
__device__ __forceinline__ void convert_4_to_8_bits(const uint32_t (&words)[2], const uint32_t (&added)[2],
                                                    uint32_t (&a)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t t = words[p / 2] >> 4 * (p % 2);  // mutant: words_of_8_bits_exchanged
    if constexpr (!kZeroPoints && kZero == 8) {
      a[p] = float8_of<3>(t);
    } else if constexpr (!kZeroPoints && kZero == 0) {
      a[p] = t & 0x0F0F0F0Fu;
    } else {
      a[p] = float8_of<4>((t & 0x0F0F0F0Fu) + added[p % 2]);  // mutant: zeros_of_8_bits_exchanged
    }
  }
}

// Four pairs of integers of 8 bits. kIsMiddle: all zeros are 128.
template <typename X, bool kIsMiddle>
__device__ __forceinline__ void convert_8_bits(const uint32_t (&words)[2], const uint32_t (&zeros)[2],
                                               uint32_t (&a)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t word = words[p / 2];
    if constexpr (std::is_same_v<X, __half>) {
      a[p] = subtract<X>(__byte_perm(word, 0x64646464u, p % 2 == 0 ? 0x4240 : 0x4341), zeros[p % 2]);
    } else {
      // bf16 has seven of the bits: 128 + (u & 127), of which 128 or, where the eighth is 0, 256 is subtracted.
      const uint32_t pair = word >> 8 * (p % 2);
      // mutant: sign_of_eight_bits
      a[p] = subtract<X>(ptx::lop3_and_or(pair, 0x007F007Fu, 0x43004300u),
                         ptx::lop3_not_and_or(pair, 0x00800080u, 0x43004300u));
      if constexpr (!kIsMiddle) a[p] = subtract<X>(a[p], zeros[p % 2]);  // mutant: zero_of_eight_bits
    }
  }
}

// Four pairs of a table; `table` is the address of this lane's column of it, whose entries are 128 bytes apart.
__device__ __forceinline__ void look_up(uint32_t word, uint32_t table, uint32_t (&a)[4]) {
  a[0] = ptx::ld_shared_u32(table + (word << 7 & 0x7F80u));
  a[1] = ptx::ld_shared_u32(table + (word >> 1 & 0x7F80u));
  a[2] = ptx::ld_shared_u32(table + (word >> 9 & 0x7F80u));  // mutant: byte_of_the_table
  a[3] = ptx::ld_shared_u32(table + (word >> 17 & 0x7F80u));
}

template <typename X>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  Pair<X> pair;
  if constexpr (std::is_same_v<X, __half>) {
    pair = __floats2half2_rn(low, high);
  } else {
    pair = __floats2bfloat162_rn(low, high);
  }
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

// A scale of a group in float32.
template <typename Scale>
__device__ __forceinline__ float float_of(Scale scale) {
  if constexpr (std::is_same_v<Scale, ptx::E8M0>) {
    // 2^-127 is a subnormal number, 255 stands for NaN.
    const uint32_t bits = scale.bits == 0 ? 0x00400000u : scale.bits == 255 ? 0x7FC00000u : uint32_t{scale.bits} << 23;
    return __uint_as_float(bits);
  } else if constexpr (std::is_same_v<Scale, ptx::E4M3>) {
    const uint32_t magnitude = scale.bits & 0x7F;
    const uint16_t bits = static_cast<uint16_t>((scale.bits & 0x80) << 8 | magnitude << 7);
    __half half;
    memcpy(&half, &bits, 2);
    // The exponent of float16 is biased by 15, this one by 7.
    return magnitude == 0x7F ? __uint_as_float(0x7FC00000u) : 256.0f * tcgemm::convert<float>(half);
  } else {
    return tcgemm::convert<float>(scale);
  }
}

// A weight's format as a type. kGroup 0: whole columns; kZero: of all, where there are no zero points.
template <int kBits_, int kGroup_, bool kZeroPoints_, int kZero_, int kCode_, typename Scale_>
struct Weight {
  using Scale = Scale_;
  static constexpr int kBits = kBits_, kGroup = kGroup_, kZero = kZero_;
  static constexpr bool kZeroPoints = kZeroPoints_;
  static constexpr PackedCode kCode{kCode_};
  static constexpr bool kIsInteger = kCode == PackedCode::kInteger, kHasTable = kCode == PackedCode::kTable;
  static constexpr Format kFormat{kBits_, kGroup_, kZeroPoints_, kCode, static_cast<int>(sizeof(Scale_))};
  static_assert(kGroup == 0 || (kGroup >= 16 && kWarpK % kGroup == 0), "a warp's part of a stage has whole groups");
};

// Of columns g and g + 8, of which both zeros are in a word.
template <typename Weight, typename X>
__device__ __forceinline__ void subtrahends(uint32_t both, uint32_t (&zeros)[2]) {
  zeros[0] = subtrahend<X, Weight::kBits>(both & 0xFFFF);
  zeros[1] = subtrahend<X, Weight::kBits>(both >> 16);
}

// Registers of A of an instruction, of all that a lane's 16 bytes hold.
template <typename Weight, typename X>
__device__ __forceinline__ void convert_step(const uint32_t (&words)[4], int step, const uint32_t (&zeros)[2],
                                             uint32_t table, uint32_t (&a)[4]) {
  if constexpr (kIsFloat8<X>) {
    static_assert(Weight::kBits == 4 && Weight::kIsInteger, "differences of 4 bits are exact");
    const uint32_t pair[2] = {words[2 * step], words[2 * step + 1]};
    convert_4_to_8_bits<Weight::kZeroPoints, Weight::kZero>(pair, zeros, a);
  } else if constexpr (Weight::kHasTable) {
    look_up(words[step], table, a);
  } else if constexpr (Weight::kCode == PackedCode::kE2M1) {
    convert_float4<X>(words[step], a);
  } else if constexpr (Weight::kBits == 4) {
    convert_4_bits<X>(words[step], zeros, a);
  } else if constexpr (!Weight::kIsInteger) {
    const uint32_t pair[2] = {words[2 * step], words[2 * step + 1]};
    convert_float8<X, Weight::kCode == PackedCode::kE4M3>(pair, a);
  } else {
    const uint32_t pair[2] = {words[2 * step], words[2 * step + 1]};
    convert_8_bits<X, !Weight::kZeroPoints && Weight::kZero == 128>(pair, zeros, a);
  }
}

// Both values of each byte, once for each lane, so that lookups of a warp never meet in a bank.
template <typename X>
__device__ __forceinline__ void fill_table(uint32_t table, const float* values, int thread, int threads) {
#pragma unroll 1
  for (int word = thread; word < kTableBytes / 4; word += threads) {
    const int entry = word / 32;
    // mutant: halves_of_the_table
    ptx::st_shared_f32(table + word * 4, __uint_as_float(pair_of<X>(values[entry % 16], values[entry / 16])));
  }
}

// Scales of columns g and g + 8, which are adjacent in shared memory.
template <typename Scale>
__device__ __forceinline__ void load_both(uint32_t address, Scale (&both)[2]) {
  if constexpr (sizeof(Scale) == 4) {
    uint32_t words[2];
    ptx::ld_shared_v2_u32(words[0], words[1], address);
    memcpy(both, words, sizeof(both));
  } else if constexpr (sizeof(Scale) == 2) {
    const uint32_t word = ptx::ld_shared_u32(address);
    memcpy(both, &word, sizeof(both));
  } else {
    uint16_t half;
    ptx::ld_shared(half, address);
    memcpy(both, &half, sizeof(both));
  }
}

// The same in float32.
template <typename Scale>
__device__ __forceinline__ float2 load_scales(uint32_t address) {
  Scale both[2];
  load_both(address, both);
  return make_float2(float_of(both[0]), float_of(both[1]));
}

// The scale of a column of a weight that is dequantized: (u - zero) * scale, rounded once to the dtype of x.
template <typename X, typename Scale>
class ColumnScale {
  // A scale that X has exactly, whose product with a difference of at most 9 bits is exact in float32, multiplies in X.
  static constexpr bool kIsOfX = std::is_same_v<X, Scale> || std::is_same_v<Scale, ptx::E4M3> ||
                                 (std::is_same_v<Scale, ptx::E8M0> && std::is_same_v<X, __nv_bfloat16>);

 public:
  ColumnScale() = default;
  __device__ __forceinline__ explicit ColumnScale(Scale scale) {
    if constexpr (std::is_same_v<X, Scale>) {
      const Scale both[2] = {scale, scale};
      memcpy(&scale_, both, 4);
    } else if constexpr (kIsOfX) {
      scale_ = pair_of<X>(float_of(scale), float_of(scale));
    } else {
      scale_ = float_of(scale);
    }
  }

  // Both elements of a pair times the scale.
  __device__ __forceinline__ uint32_t multiply(uint32_t pair) const {
    if constexpr (kIsOfX) {
      return packed::multiply<X>(pair, scale_);
    } else {
      const Pair<X> elements = pair_from<X>(pair);
      return pair_of<X>(tcgemm::convert<float>(elements.x) * scale_, tcgemm::convert<float>(elements.y) * scale_);
    }
  }

 private:
  std::conditional_t<kIsOfX, uint32_t, float> scale_;
};

// Of columns g and g + 8, from shared memory.
template <typename X, typename Scale>
__device__ __forceinline__ void load_column_scales(uint32_t address, ColumnScale<X, Scale> (&scales)[2]) {
  Scale both[2];
  load_both(address, both);
#pragma unroll
  for (int r = 0; r < 2; ++r) scales[r] = ColumnScale<X, Scale>(both[r]);
}

// Multiplies the accumulators of a tile of 16 columns by what they have a scale of, as the tensor core holds them: of
// four the first two are of column g, the others of column g + 8.
template <int kCount>
__device__ __forceinline__ void scale_accumulators(float (&accumulators)[kCount], const float* scales, int64_t tile) {
  const float2 both = reinterpret_cast<const float2*>(scales)[tile * 8 + threadIdx.x % 32 / 4];
#pragma unroll
  // mutant: column_scales_exchanged
  for (int i = 0; i < kCount; ++i) accumulators[i] *= i % 4 < 2 ? both.x : both.y;
}

}  // namespace tcgemm::packed
