// What the family multiplies by what: the one table of its instructions.
#pragma once

#include <string>
#include <vector>

#include "kernels/common/type_text.h"

namespace tcgemm::mma {

struct Instruction {
  struct Input {
    DType dtype;
    const char* element;

    std::string text(tile::Major major) const { return operand_text(element, major, tile::Source::kRegisters); }
  };

  Input a, b;
  Compute compute;
  std::string mma;
  int mma_bytes;        // of an element that the instruction takes
  bool has_every_tile;  // or those of every type alone: see config.h

  template <typename A, typename B, typename Mma>
  static Instruction make(Compute compute, bool has_every_tile) {
    return {{ElementType<A>::kDType, ElementType<A>::kText},
            {ElementType<B>::kDType, ElementType<B>::kText},
            compute,
            text_of(Mma{}),
            sizeof(typename Mma::A),
            has_every_tile};
  }
};

// A row for each: the elements of A and B in memory, and the instruction.
inline const std::vector<Instruction>& instructions() {
  using bf16 = __nv_bfloat16;
  using f16 = __half;
  using ptx::TF32;
  using tile::Mma;
  static const std::vector<Instruction> rows{
      Instruction::make<f16, f16, Mma<f16, f16, float>>(Compute::kF32, true),
      Instruction::make<bf16, bf16, Mma<bf16, bf16, float>>(Compute::kF32, true),
      Instruction::make<f16, f16, Mma<f16, f16, f16>>(Compute::kF16, false),
      Instruction::make<float, float, Mma<TF32, TF32, float>>(Compute::kTF32, false),
      Instruction::make<int8_t, int8_t, Mma<int8_t, int8_t, int32_t>>(Compute::kS32, false),
      Instruction::make<uint8_t, uint8_t, Mma<uint8_t, uint8_t, int32_t>>(Compute::kS32, false),
      Instruction::make<int8_t, uint8_t, Mma<int8_t, uint8_t, int32_t>>(Compute::kS32, false),
      Instruction::make<uint8_t, int8_t, Mma<uint8_t, int8_t, int32_t>>(Compute::kS32, false),
  };
  return rows;
}

}  // namespace tcgemm::mma
