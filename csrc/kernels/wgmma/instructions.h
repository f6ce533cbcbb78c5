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
    std::string text(tile::Major major, int scaled_rows = 0) const {
      return operand_text(element, major, major == tile::Major::kK ? tile::Source::kShared : *source_mn, scaled_rows);
    }
  };

  Input a, b;
  Compute compute;
  std::string mma;
  bool promotes;  // its accumulators are promoted before the end of K

  template <typename A, typename B, typename Mma>
  static Instruction make(Compute compute, std::optional<tile::Source> a_mn, std::optional<tile::Source> b_mn) {
    return {{ElementType<A>::kDType, ElementType<A>::kText, a_mn},
            {ElementType<B>::kDType, ElementType<B>::kText, b_mn},
            compute,
            text_of(Mma{}),
            Mma::kPromoteEvery != 0};
  }
};

// A row for each: the elements of A and B in memory and the instruction, then how it takes an A that is M-major and a B
// that is N-major. The tensor core adds up products of 8-bit floats with a mantissa of about 14 bits, so that their
// accumulators are promoted after each k block, unless a problem says that it need not be so.
inline const std::vector<Instruction>& instructions() {
  using bf16 = __nv_bfloat16;
  using f16 = __half;
  using ptx::E4M3;
  using ptx::E5M2;
  using ptx::TF32;
  using tile::Mma;
  using tile::Source;
  static const std::vector<Instruction> rows = [] {
    std::vector<Instruction> all{
        Instruction::make<bf16, bf16, Mma<bf16, bf16, float>>(Compute::kF32, Source::kShared, Source::kShared),
        Instruction::make<bf16, bf16, Mma<bf16, bf16, float, 64>>(Compute::kF32Promoted, Source::kShared,
                                                                  Source::kShared),
        Instruction::make<f16, f16, Mma<f16, f16, float>>(Compute::kF32, Source::kShared, Source::kShared),
        Instruction::make<float, float, Mma<TF32, TF32, float>>(Compute::kTF32, Source::kTransposed, std::nullopt),
    };
    const auto add_f8 = [&](auto a, auto b) {
      using A = decltype(a);
      using B = decltype(b);
      all.push_back(Instruction::make<A, B, Mma<A, B, float, 128>>(Compute::kF32, std::nullopt, std::nullopt));
      all.push_back(Instruction::make<A, B, Mma<A, B, float>>(Compute::kF32FastAccum, std::nullopt, std::nullopt));
    };
    add_f8(E4M3{}, E4M3{});
    add_f8(E4M3{}, E5M2{});
    add_f8(E5M2{}, E4M3{});
    add_f8(E5M2{}, E5M2{});
    const auto add_integers = [&](auto a, auto b) {
      using A = decltype(a);
      using B = decltype(b);
      all.push_back(Instruction::make<A, B, Mma<A, B, int32_t>>(Compute::kS32, std::nullopt, std::nullopt));
    };
    add_integers(int8_t{}, int8_t{});
    add_integers(int8_t{}, uint8_t{});
    add_integers(uint8_t{}, int8_t{});
    add_integers(uint8_t{}, uint8_t{});
    return all;
  }();
  return rows;
}

}  // namespace tcgemm::wgmma_family
