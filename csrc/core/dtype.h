// Element types, and how products of them are accumulated.
#pragma once

#include <array>
#include <cstdint>

#include "core/names.h"

namespace tcgemm {

enum class DType : int32_t { kF16, kBF16, kF32, kF64, kS8, kU8, kS32, kC64, kC128, kF8E4M3FN, kF8E5M2, kF8E8M0FNU };
template <>
inline constexpr std::array kNames<DType>{"f16", "bf16", "f32",  "f64",      "s8",     "u8",
                                          "s32", "c64",  "c128", "f8e4m3fn", "f8e5m2", "f8e8m0fnu"};

constexpr int64_t dtype_bytes(DType dtype) {
  constexpr std::array<int64_t, 12> kBytes{2, 2, 4, 8, 1, 1, 4, 8, 16, 1, 1, 1};
  return kBytes[static_cast<size_t>(dtype)];
}

// How products are formed and accumulated. kTF32 rounds float32 operands to TF32 and
// accumulates in float32; for complex types it speaks of the real components. kF32FastAccum, of 8-bit floats,
// accumulates as the tensor core does, of whose accumulators Hopper keeps about 14 bits of mantissa; for these kF32 is
// really float32. kF32Promoted, of bfloat16, adds what the tensor core accumulates of each k-tile to float32 registers:
// it truncates where it adds to larger accumulators.
enum class Compute : int32_t { kF16, kF32, kTF32, kF64, kS32, kF32FastAccum, kF32Promoted };
template <>
inline constexpr std::array kNames<Compute>{"f16", "f32", "tf32", "f64", "s32", "f32_fast_accum", "f32_promoted"};

}  // namespace tcgemm
