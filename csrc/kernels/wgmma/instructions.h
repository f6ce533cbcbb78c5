// What the family multiplies by what: the one table of its instructions and of how they take their operands.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/common/type_text.h"

namespace tcgemm::wgmma_family {

// A and B are the kernel's: where a config is swapped, the problem's B and A.
struct Instruction {
  struct Input {
    DType dtype;
    const char* element;
    // Where from the instruction takes an operand that is not K-major. Nowhere: a copy makes it K-major.
    std::optional<tile::Source> source_mn;

    bool takes(tile::Major major) const { return major == tile::Major::kK || source_mn.has_value(); }
    std::string text(tile::Major major) const {
      return operand_text(element, major, major == tile::Major::kK ? tile::Source::kShared : *source_mn);
    }
  };

  Input a, b;
  Compute compute;
  std::string mma;

  template <typename A, typename B, typename Mma>
  static Instruction make(Compute compute, std::optional<tile::Source> a_mn, std::optional<tile::Source> b_mn) {
    return {{ElementType<A>::kDType, ElementType<A>::kText, a_mn},
            {ElementType<B>::kDType, ElementType<B>::kText, b_mn},
            compute,
            text_of(Mma{})};
  }
};

// A row for each: the elements of A and B in memory and the instruction, then how it takes an A that is M-major and a B
// that is N-major.
inline const std::vector<Instruction>& instructions() {
  using bf16 = __nv_bfloat16;
  using f16 = __half;
  using ptx::TF32;
  using tile::Mma;
  using tile::Source;
  static const std::vector<Instruction> rows{
      Instruction::make<bf16, bf16, Mma<bf16, bf16, float>>(Compute::kF32, Source::kShared, Source::kShared),
      Instruction::make<f16, f16, Mma<f16, f16, float>>(Compute::kF32, Source::kShared, Source::kShared),
      Instruction::make<float, float, Mma<TF32, TF32, float>>(Compute::kTF32, Source::kTransposed, std::nullopt),
  };
  return rows;
}

}  // namespace tcgemm::wgmma_family
