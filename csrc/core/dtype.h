// Element types, and how products of them are accumulated.
#pragma once

#include <array>
#include <cstdint>

#include "core/names.h"

namespace tcgemm {

enum class DType : int32_t { kF16, kBF16, kF32, kF64, kS8, kU8, kS32, kC64, kC128 };
template <>
inline constexpr std::array kNames<DType>{"f16", "bf16", "f32", "f64", "s8", "u8", "s32", "c64", "c128"};

constexpr int64_t dtype_bytes(DType dtype) {
  constexpr std::array<int64_t, 9> kBytes{2, 2, 4, 8, 1, 1, 4, 8, 16};
  return kBytes[static_cast<size_t>(dtype)];
}

// How products are formed and accumulated. kTF32 rounds float32 operands to TF32 and
// accumulates in float32; for complex types it speaks of the real components.
enum class Compute : int32_t { kF16, kF32, kTF32, kF64, kS32 };
template <>
inline constexpr std::array kNames<Compute>{"f16", "f32", "tf32", "f64", "s32"};

}  // namespace tcgemm
