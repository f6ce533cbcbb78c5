// From the codes of a packed weight to A fragments of the MMA, in registers.
//
// A is the transposed weight: row g + 8r of a fragment (g = lane / 4; r = 0, 1) is column n = g + 8r of a tile of 16
// columns. A 32-bit word has the lane's eight codes of one k-step of 16: for each column, two neighbors (e = 0, 1) of
// both halves of K (h = 0, 1). Register p = 2h + r of A is the pair of codes e = 0, 1:
//
//   4 bits          pair p at bits 4p and 16 + 4p
//   4 bits, table   pair p at bits 8p and 8p + 4
//   float4_e2m1fn   expand_float4
//   8 bits          a word for each h: pair r at bits 8r and 16 + 8r
//
// An unsigned integer u becomes a float without a conversion: in the low bits of the number M, 128 in bf16 and 1024 in
// f16, it makes M + u exactly, of which M + zero is subtracted.
//
// Beside x of 8-bit floats, two words are the A fragment of one instruction, whose K is 32: of four neighbors in memory
// the second and third are exchanged, as order_kernel.cuh exchanges those of x. Up to 16, the value of an e4m3 is its
// code times 2^-9, a factor that is multiplied away later. So u - zero of 4 bits is converted by integer operations on
// four bytes at once.
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

// The value of an e4m3 up to 16 divided by its code.
inline constexpr float kE4M3Unit = 1.0f / 512;

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

// The operand of a conversion that has the stored zero point `zero` of a column: what f16 and bf16 subtract from a
// pair, or 16 - zero, which e4m3 adds to four bytes.
template <typename X, int kBits>
__device__ __forceinline__ uint32_t zero_point_term(uint32_t zero) {
  if constexpr (kIsFloat8<X>) {
    return (16 - zero) * 0x01010101u;  // sums below 16 are negative values
  } else if constexpr (std::is_same_v<X, __half>) {
    return (0x6400u + zero) * 0x10001u;
  } else if constexpr (kBits == 4) {
    return (0x4300u + zero) * 0x10001u;  // mutant: zero_off_by_one
  } else {
    // Of u - 128, which is what is made of eight bits.
    return bits_of(__float2bfloat162_rn(static_cast<float>(static_cast<int32_t>(zero) - 128)));
  }
}

// Four pairs of integers of 4 bits; zero_point_terms of columns g and g + 8.
template <typename X>
__device__ __forceinline__ void convert_4_bits(uint32_t word, const uint32_t (&zeros)[2], uint32_t (&a)[4]) {
  constexpr uint32_t kMagic = std::is_same_v<X, __half> ? 0x64006400u : 0x43004300u;
#pragma unroll
  // mutant: nibbles_swapped
  for (int p = 0; p < 4; ++p) a[p] = subtract<X>(ptx::lop3_and_or(word >> 4 * p, 0x000F000Fu, kMagic), zeros[p % 2]);
}

// The exponent bias of X less that of a float code. Floats of 4 and 8 bits are first expanded to X without adding it to
// their exponents: they are then 2^-kBiasDifference of their values, subnormal ones too.
template <PackedCode kCode, typename X>
inline constexpr int kBiasDifference = (std::is_same_v<X, __half> ? 15 : 127) - (kCode == PackedCode::kE2M1   ? 1
                                                                                 : kCode == PackedCode::kE4M3 ? 7
                                                                                                              : 15);

// The value of a float code that is expanded to a float32.
template <PackedCode kCode>
__device__ __forceinline__ float rebias(float expanded) {
  constexpr uint32_t kExponent = kBiasDifference<kCode, float>;
  return expanded * __uint_as_float((kExponent + 127) << 23);
}

// A pair of the same power of two.
template <typename X, int kExponent>
inline constexpr uint32_t kPowers =
    std::is_same_v<X, __half> ? (kExponent + 15) * 0x04000400u : (kExponent + 127) * 0x00800080u;

__device__ __forceinline__ uint32_t rotate_right(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

// Expands four pairs of float4_e2m1fn. problem/operands/packed_weight.py has the layout: three of a word's pairs need
// one rotation to reach their bits of a bfloat16; the bits of the fourth are split over both words of a k-block.
template <typename X>
__device__ __forceinline__ void expand_float4(const uint32_t (&words)[4], int step, uint32_t (&a)[4]) {
  constexpr uint32_t kSigns = 0x80008000u, kHighExponents = 0x01000100u, kLowBits = 0x00C000C0u;
  constexpr uint32_t kAll = kSigns | kHighExponents | kLowBits;
  const uint32_t own = words[step], first = words[step & ~1], second = words[step | 1];
  const bool is_second = step % 2 == 1;
  a[0] = own & kAll;
  a[1] = rotate_right(own, 4) & kAll;
  a[2] = own << 6 & kAll;  // mutant: magnitudes_of_float4
  a[3] = ptx::lop3_and_or(rotate_right(first, is_second ? 6 : 5), kSigns | kHighExponents,
                          rotate_right(second, is_second ? 14 : 7) & kLowBits);  // mutant: split_pairs_of_float4
  if constexpr (std::is_same_v<X, __half>) {
#pragma unroll
    for (uint32_t& pair : a) pair = ptx::lop3_and_or(pair, kSigns, (pair & ~kSigns) << 3);
  }
}

// Expands four pairs of float8_e4m3fn or float8_e5m2, which have the layout of integers of 8 bits.
template <typename X, bool kIsE4M3>
__device__ __forceinline__ void expand_float8(const uint32_t (&words)[2], uint32_t (&a)[4]) {
  constexpr int kMantissa = kIsE4M3 ? 3 : 2;                                // bits
  constexpr int kShift = (std::is_same_v<X, __half> ? 10 : 7) - kMantissa;  // mutant: mantissa_of_float8
  constexpr uint32_t kMask = (0x7Fu << kShift) * 0x10001u;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t word = words[p / 2];  // of whose halves column g has the low byte, column g + 8 the high one
    const uint32_t magnitude = p % 2 == 0 ? word << kShift : word >> (8 - kShift);
    // mutant: signs_of_float8
    a[p] = ptx::lop3_and_or(p % 2 == 0 ? word << 8 : word, 0x80008000u, magnitude & kMask);
  }
}

// The value of a float of 8 bits.
template <PackedCode kCode>
__device__ __forceinline__ float float8_value(uint32_t bits) {
  constexpr int kShift = kCode == PackedCode::kE4M3 ? 20 : 21;
  return rebias<kCode>(__uint_as_float((bits & 128) << 24 | (bits & 127) << kShift));
}

// Converts four integers t, one in each byte, to the e4m3 codes (a sign and a magnitude) of (t - 2^kBit) * kE4M3Unit.
// t - 2^kBit is at most 16; bits of t above kBit are ignored.
template <int kBit>
__device__ __forceinline__ uint32_t biased_int_to_e4m3(uint32_t t) {
  const uint32_t is_below = ~t >> kBit & 0x01010101u;
  constexpr uint32_t kLow = (1u << kBit) - 1;
  return ((t & kLow * 0x01010101u) ^ is_below * kLow) + is_below * 0x81u;  // mutant: sign_of_8_bits
}

// Sixteen integers of 4 bits as e4m3. Where there are no zero points, kZero is the zero of all.
template <bool kZeroPoints, int kZero>
__device__ __forceinline__ void convert_4_to_8_bits(const uint32_t (&words)[2], const uint32_t (&added)[2],
                                                    uint32_t (&a)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t t = words[p / 2] >> 4 * (p % 2);  // mutant: words_of_8_bits_exchanged
    if constexpr (!kZeroPoints && kZero == 8) {
      a[p] = biased_int_to_e4m3<3>(t);
    } else if constexpr (!kZeroPoints && kZero == 0) {
      a[p] = t & 0x0F0F0F0Fu;
    } else {
      a[p] = biased_int_to_e4m3<4>((t & 0x0F0F0F0Fu) + added[p % 2]);  // mutant: zeros_of_8_bits_exchanged
    }
  }
}

// Four pairs of integers of 8 bits. kZeroIs128: the zero of all.
template <typename X, bool kZeroIs128>
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
      if constexpr (!kZeroIs128) a[p] = subtract<X>(a[p], zeros[p % 2]);  // mutant: zero_of_eight_bits
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

// A weight's format as a type. kGroup 0: a scale for each column. Where there are no zero points, kZero is the zero of
// all.
template <int kBits_, int kGroup_, bool kZeroPoints_, int kZero_, int kCode_, typename Scale_>
struct Weight {
  using Scale = Scale_;
  static constexpr int kBits = kBits_, kGroup = kGroup_, kZero = kZero_;
  static constexpr bool kZeroPoints = kZeroPoints_;
  static constexpr PackedCode kCode{kCode_};
  static constexpr bool kIsInteger = kCode == PackedCode::kInteger, kHasTable = kCode == PackedCode::kTable;
  static constexpr Format kFormat{kBits_, kGroup_, kZeroPoints_, kCode, static_cast<int>(sizeof(Scale_))};
  static_assert(kGroup == 0 || (kGroup >= 16 && kWarpK % kGroup == 0),
                "a warp's K of a stage is a number of whole groups");
};

// Zero-point terms of columns g and g + 8, whose zeros are in one word.
template <typename Weight, typename X>
__device__ __forceinline__ void zero_point_terms(uint32_t both, uint32_t (&zeros)[2]) {
  zeros[0] = zero_point_term<X, Weight::kBits>(both & 0xFFFF);
  zeros[1] = zero_point_term<X, Weight::kBits>(both >> 16);
}

// Expands four pairs of a float code.
template <typename Weight, typename X>
__device__ __forceinline__ void expand_step(const uint32_t (&words)[4], int step, uint32_t (&a)[4]) {
  if constexpr (Weight::kBits == 4) {
    expand_float4<X>(words, step, a);
  } else {
    const uint32_t pair[2] = {words[2 * step], words[2 * step + 1]};
    expand_float8<X, Weight::kCode == PackedCode::kE4M3>(pair, a);
  }
}

// The A fragment of a k-step, from a lane's 16 bytes of codes.
template <typename Weight, typename X>
__device__ __forceinline__ void convert_step(const uint32_t (&words)[4], int step, const uint32_t (&zeros)[2],
                                             uint32_t table, uint32_t (&a)[4]) {
  if constexpr (kIsFloat8<X>) {
    static_assert(Weight::kBits == 4 && Weight::kIsInteger, "differences of 4 bits are exact");
    const uint32_t pair[2] = {words[2 * step], words[2 * step + 1]};
    convert_4_to_8_bits<Weight::kZeroPoints, Weight::kZero>(pair, zeros, a);
  } else if constexpr (Weight::kHasTable) {
    look_up(words[step], table, a);
  } else if constexpr (!Weight::kIsInteger) {
    constexpr int kExponent = kBiasDifference<Weight::kCode, X>;
    expand_step<Weight, X>(words, step, a);
#pragma unroll
    for (uint32_t& pair : a) {
      if constexpr (kExponent > 0) pair = multiply<X>(pair, kPowers<X, kExponent>);
    }
  } else if constexpr (Weight::kBits == 4) {
    convert_4_bits<X>(words[step], zeros, a);
  } else {
    const uint32_t pair[2] = {words[2 * step], words[2 * step + 1]};
    convert_8_bits<X, !Weight::kZeroPoints && Weight::kZero == 128>(pair, zeros, a);
  }
}

// Fills the lookup table: for each byte both values, replicated for each lane, so that lookups have no bank conflicts.
template <typename X>
__device__ __forceinline__ void fill_table(uint32_t table, const float* values, int thread, int threads) {
#pragma unroll 1
  for (int word = thread; word < kTableBytes / 4; word += threads) {
    const int entry = word / 32;
    // mutant: halves_of_the_table
    ptx::st_shared_f32(table + word * 4, __uint_as_float(pair_of<X>(values[entry % 16], values[entry / 16])));
  }
}

// Loads the scales of columns g and g + 8, which are adjacent in shared memory.
template <typename Scale>
__device__ __forceinline__ void load_scale_pair(uint32_t address, Scale (&both)[2]) {
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

// Loads the scales of columns g and g + 8 as float32.
template <typename Scale>
__device__ __forceinline__ float2 load_float_scales(uint32_t address) {
  Scale both[2];
  load_scale_pair(address, both);
  return make_float2(float_of(both[0]), float_of(both[1]));
}

// The scale of a column of a weight that is dequantized: (u - zero) * scale, rounded once to the dtype of x.
template <typename X, typename Scale>
class ColumnScale {
  // Scales that X represents exactly multiply in X: the product in float32 would be exact, so that both round once.
  static constexpr bool kIsExactInX = std::is_same_v<X, Scale> || std::is_same_v<Scale, ptx::E4M3> ||
                                      (std::is_same_v<Scale, ptx::E8M0> && std::is_same_v<X, __nv_bfloat16>);

 public:
  ColumnScale() = default;
  __device__ __forceinline__ explicit ColumnScale(Scale scale) {
    if constexpr (std::is_same_v<X, Scale>) {
      const Scale both[2] = {scale, scale};
      memcpy(&scale_, both, 4);
    } else if constexpr (kIsExactInX && std::is_same_v<Scale, ptx::E8M0>) {
      // 2^-127 is a subnormal number, 255 stands for NaN.
      scale_ = scale.bits == 0 ? 0x00400040u : scale.bits == 255 ? 0x7FC07FC0u : scale.bits * 0x00800080u;
    } else if constexpr (kIsExactInX) {
      scale_ = pair_of<X>(float_of(scale), float_of(scale));
    } else {
      scale_ = float_of(scale);
    }
  }

  // Both elements of a pair times the scale.
  __device__ __forceinline__ uint32_t multiply(uint32_t pair) const {
    if constexpr (kIsExactInX) {
      return packed::multiply<X>(pair, scale_);
    } else {
      const Pair<X> elements = pair_from<X>(pair);
      return pair_of<X>(tcgemm::convert<float>(elements.x) * scale_, tcgemm::convert<float>(elements.y) * scale_);
    }
  }

 private:
  std::conditional_t<kIsExactInX, uint32_t, float> scale_;
};

// The A fragments of a k-block.
inline constexpr int kSteps = 2;
using Fragments = uint32_t[kSteps][4];

// Scales of columns g and g + 8 of a group, which dequantize fragments.
template <typename Weight, typename X>
class FragmentScales {
  using Scale = typename Weight::Scale;

 public:
  static constexpr int kHeadroom = 0;

  FragmentScales() = default;
  __device__ __forceinline__ explicit FragmentScales(const Scale (&both)[2])
      : scales_{ColumnScale<X, Scale>(both[0]), ColumnScale<X, Scale>(both[1])} {}

  // Dequantizes a k-block, which begins with this k-step of a lane's 16 bytes.
  __device__ __forceinline__ void dequantize(const uint32_t (&words)[4], int first_step, const uint32_t (&zeros)[2],
                                             uint32_t table, Fragments& fragments) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      convert_step<Weight, X>(words, first_step + step, zeros, table, fragments[step]);
#pragma unroll
      // mutant: scales_of_fragments_exchanged
      for (int p = 0; p < 4; ++p) fragments[step][p] = scales_[p % 2].multiply(fragments[step][p]);
    }
  }

 private:
  ColumnScale<X, Scale> scales_[2];
};

// Whether the multiplication by the scale also corrects the exponent bias. Scales of 8 bits allow that in bfloat16:
// their products with a float code are exact.
template <typename Weight, typename X>
inline constexpr bool kHasRebiasingScales = !Weight::kIsInteger && !Weight::kHasTable &&
                                            std::is_same_v<X, __nv_bfloat16> && sizeof(typename Weight::Scale) == 1;

// Expands the fragments of a k-block of a float code.
template <typename Weight, typename X>
__device__ __forceinline__ void expand_block(const uint32_t (&words)[4], int first_step, Fragments& fragments) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) expand_step<Weight, X>(words, first_step + step, fragments[step]);
}

// Multiplies the pairs of columns g and g + 8 by the factors of these columns.
__device__ __forceinline__ void multiply_fragments(Fragments& fragments, const uint32_t (&factors)[2]) {
#pragma unroll
  for (auto& step : fragments) {
#pragma unroll
    // mutant: factors_of_fragments_exchanged
    for (int p = 0; p < 4; ++p) step[p] = multiply<__nv_bfloat16>(step[p], factors[p % 2]);
  }
}

// Scales that are powers of two, times 2^kBiasDifference. Only for scales up to 2^(127 - kBiasDifference); the factors
// of larger ones would be infinite.
template <typename Weight>
class RebiasingE8M0Scales {
  static constexpr int kExponent = kBiasDifference<Weight::kCode, __nv_bfloat16>;

 public:
  RebiasingE8M0Scales() = default;
  __device__ __forceinline__ explicit RebiasingE8M0Scales(const ptx::E8M0 (&both)[2])
      : factors_{factor(both[0]), factor(both[1])} {}

  // Return whether one of four scales is too large or NaN.
  static __device__ __forceinline__ bool has_large(uint32_t four) {
    constexpr uint32_t kAbove = (128 - (255 - kExponent) % 128) * 0x01010101u;
    static_assert(255 - kExponent >= 128, "a scale that is too large has the highest bit");
    return (((four & 0x7F7F7F7Fu) + kAbove) & four & 0x80808080u) != 0;  // mutant: largest_power
  }

  __device__ __forceinline__ void dequantize(const uint32_t (&words)[4], int first_step, const uint32_t (&)[2],
                                             uint32_t, Fragments& fragments) const {
    expand_block<Weight, __nv_bfloat16>(words, first_step, fragments);
    multiply_fragments(fragments, factors_);
  }

 private:
  static __device__ __forceinline__ uint32_t factor(ptx::E8M0 scale) {
    return (scale.bits + kExponent) * 0x00800080u;  // mutant: exponent_of_a_power
  }

  uint32_t factors_[2];
};

// Scales that are float8_e4m3fn, times 2^(kBiasDifference - kHeadroom): without the headroom, the factor of 448 would
// be infinite. remove_headroom multiplies the accumulators by 2^kHeadroom.
template <typename Weight>
class RebiasingE4M3Scales {
  using X = __nv_bfloat16;
  static constexpr int kExponent = kBiasDifference<Weight::kCode, X>;
  static constexpr int kScaleBiasDifference = kBiasDifference<PackedCode::kE4M3, X>;

 public:
  static constexpr int kHeadroom = 8;

  RebiasingE4M3Scales() = default;
  __device__ __forceinline__ explicit RebiasingE4M3Scales(const ptx::E4M3 (&both)[2]) {
    const uint32_t codes = both[0].bits | both[1].bits << 16, magnitudes = codes & 0x007F007Fu;
    const uint32_t expanded = ptx::lop3_and_or(codes << 8, 0x80008000u, magnitudes << 4);
    uint32_t pair =
        multiply<X>(multiply<X>(expanded, kPowers<X, kScaleBiasDifference>), kPowers<X, kExponent - kHeadroom>);
    // NaN is the only magnitude, 0x7F, that sets bit 7 when 1 is added to it.
    const uint32_t is_nan = (magnitudes + 0x00010001u) & 0x00800080u;
    pair |= is_nan * 0xFF;
    factors_[0] = __byte_perm(pair, 0, 0x1010);
    factors_[1] = __byte_perm(pair, 0, 0x3232);
  }

  __device__ __forceinline__ void dequantize(const uint32_t (&words)[4], int first_step, const uint32_t (&)[2],
                                             uint32_t, Fragments& fragments) const {
    expand_block<Weight, X>(words, first_step, fragments);
    multiply_fragments(fragments, factors_);
  }

 private:
  uint32_t factors_[2];
};

// The class of a weight's scales, which may have any magnitude.
template <typename Weight, typename X>
using ScalesOf = std::conditional_t<kHasRebiasingScales<Weight, X> && std::is_same_v<typename Weight::Scale, ptx::E4M3>,
                                    RebiasingE4M3Scales<Weight>, FragmentScales<Weight, X>>;

// From shared memory, where both are adjacent.
template <typename Scales, typename Scale>
__device__ __forceinline__ Scales load_fragment_scales(uint32_t address) {
  Scale both[2];
  load_scale_pair(address, both);
  return Scales(both);
}

// Multiplies accumulators by 2^kHeadroom of the scales that dequantized the fragments.
template <typename Scales, int kCount>
__device__ __forceinline__ void remove_headroom(float (&accumulators)[kCount]) {
  if constexpr (Scales::kHeadroom > 0) {
    constexpr float kFactor = 1 << Scales::kHeadroom;
    // By index: ptxas keeps more than 64 accumulators in local memory if the loop is over references.
#pragma unroll
    for (int i = 0; i < kCount; ++i) accumulators[i] *= kFactor;
  }
}

// Multiplies the accumulators of a tile of 16 columns by per-column scales: of each four, 0 and 1 are of column g, 2
// and 3 of column g + 8.
template <int kCount>
__device__ __forceinline__ void scale_accumulators(float (&accumulators)[kCount], const float* scales, int64_t tile) {
  const float2 both = reinterpret_cast<const float2*>(scales)[tile * 8 + threadIdx.x % 32 / 4];
#pragma unroll
  // mutant: column_scales_exchanged
  for (int i = 0; i < kCount; ++i) accumulators[i] *= i % 4 < 2 ? both.x : both.y;
}

}  // namespace tcgemm::packed
