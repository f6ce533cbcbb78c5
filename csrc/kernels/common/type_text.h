// C++ text of the types that kernels are instantiated with: from the types themselves where kernels are built, from
// what a problem says where one is asked for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/problem.h"
#include "epilogue/epilogue.cuh"
#include "epilogue/output.cuh"
#include "ptx/types.cuh"
#include "tile/operands.cuh"

namespace tcgemm {

// Of an operand's element: its dtype; of an instruction's: text alone.
template <typename T>
struct ElementType;
template <>
struct ElementType<__half> {
  static constexpr DType kDType = DType::kF16;
  static constexpr const char* kText = "__half";
};
template <>
struct ElementType<__nv_bfloat16> {
  static constexpr DType kDType = DType::kBF16;
  static constexpr const char* kText = "__nv_bfloat16";
};
template <>
struct ElementType<float> {
  static constexpr DType kDType = DType::kF32;
  static constexpr const char* kText = "float";
};
template <>
struct ElementType<double> {
  static constexpr DType kDType = DType::kF64;
  static constexpr const char* kText = "double";
};
template <>
struct ElementType<ptx::TF32> {
  static constexpr const char* kText = "tcgemm::ptx::TF32";
};
template <>
struct ElementType<ptx::E4M3> {
  static constexpr DType kDType = DType::kF8E4M3FN;
  static constexpr const char* kText = "tcgemm::ptx::E4M3";
};
template <>
struct ElementType<ptx::E5M2> {
  static constexpr DType kDType = DType::kF8E5M2;
  static constexpr const char* kText = "tcgemm::ptx::E5M2";
};
template <>
struct ElementType<ptx::E8M0> {
  static constexpr DType kDType = DType::kF8E8M0FNU;
  static constexpr const char* kText = "tcgemm::ptx::E8M0";
};
template <>
struct ElementType<int8_t> {
  static constexpr DType kDType = DType::kS8;
  static constexpr const char* kText = "int8_t";
};
template <>
struct ElementType<uint8_t> {
  static constexpr DType kDType = DType::kU8;
  static constexpr const char* kText = "uint8_t";
};
template <>
struct ElementType<int32_t> {
  static constexpr const char* kText = "int32_t";
};

template <>
struct ElementType<Complex<float>> {
  static constexpr const char* kText = "tcgemm::Complex<float>";
};
template <>
struct ElementType<Complex<double>> {
  static constexpr const char* kText = "tcgemm::Complex<double>";
};

// The type of an array's elements.
inline const char* element_text(DType dtype) {
  switch (dtype) {
    case DType::kF16: return ElementType<__half>::kText;
    case DType::kBF16: return ElementType<__nv_bfloat16>::kText;
    case DType::kF64: return ElementType<double>::kText;
    case DType::kC64: return ElementType<Complex<float>>::kText;
    case DType::kC128: return ElementType<Complex<double>>::kText;
    case DType::kF8E4M3FN: return ElementType<ptx::E4M3>::kText;
    case DType::kF8E5M2: return ElementType<ptx::E5M2>::kText;
    case DType::kF8E8M0FNU: return ElementType<ptx::E8M0>::kText;
    case DType::kS8: return ElementType<int8_t>::kText;
    case DType::kU8: return ElementType<uint8_t>::kText;
    case DType::kS32: return ElementType<int32_t>::kText;
    default: return ElementType<float>::kText;
  }
}

// Of what becomes of sums that epilogue/output.cuh stores.
template <typename Epilogue>
struct EpilogueText;
template <typename Acc, typename Out>
struct EpilogueText<epilogue::Identity<Acc, Out>> {
  static constexpr const char* kName = "tcgemm::epilogue::Identity";
};
template <typename Acc, typename Out>
struct EpilogueText<epilogue::AlphaBetaC<Acc, Out>> {
  static constexpr const char* kName = "tcgemm::epilogue::AlphaBetaC";
};
template <typename Out, template <typename, typename> class Epilogue, typename Acc>
std::string text_of(const Output<Out, Epilogue<Acc, Out>>*) {
  const std::string types = std::string(ElementType<Acc>::kText) + ", " + ElementType<Out>::kText;
  return std::string("tcgemm::Output<") + ElementType<Out>::kText + ", " + EpilogueText<Epilogue<Acc, Out>>::kName +
         "<" + types + ">>";
}
template <template <typename, typename> class Epilogue, typename Acc>
std::string text_of(const FloatOutputs<Epilogue, Acc>*) {
  return std::string("tcgemm::FloatOutputs<") + EpilogueText<Epilogue<Acc, float>>::kName + ", " +
         ElementType<Acc>::kText + ">";
}

// Arguments of a template before others.
inline std::string numbers_text(std::initializer_list<int> numbers) {
  std::string text;
  for (const int number : numbers) text += std::to_string(number) + ", ";
  return text;
}

inline const char* text_of(tile::Source source) {
  switch (source) {
    case tile::Source::kShared: return "kShared";
    case tile::Source::kTransposed: return "kTransposed";
    default: return "kRegisters";
  }
}

inline std::string operand_text(const char* element, tile::Major major, tile::Source source, int scaled_rows = 0) {
  return std::string("tcgemm::tile::Operand<") + element +
         ", tcgemm::tile::Major::" + (major == tile::Major::kK ? "kK" : "kMN") +
         ", tcgemm::tile::Source::" + text_of(source) + (scaled_rows > 0 ? ", " + std::to_string(scaled_rows) : "") +
         ">";
}
inline std::string operands_text(const std::string& a, const std::string& b) {
  return "tcgemm::tile::Operands<" + a + ", " + b + ">";
}

template <typename Element, tile::Major kMajor, tile::Source kSource, int kScaledRows>
std::string text_of(tile::Operand<Element, kMajor, kSource, kScaledRows>) {
  return operand_text(ElementType<Element>::kText, kMajor, kSource, kScaledRows);
}
template <typename A, typename B>
std::string text_of(tile::Operands<A, B>) {
  return operands_text(text_of(A{}), text_of(B{}));
}
template <typename A, typename B, typename Accumulator, int kPromoteEvery>
std::string text_of(tile::Mma<A, B, Accumulator, kPromoteEvery>) {
  std::string text = "tcgemm::tile::Mma<";
  for (const char* type : {ElementType<A>::kText, ElementType<B>::kText, ElementType<Accumulator>::kText}) {
    text += type + std::string(", ");
  }
  return text + std::to_string(kPromoteEvery) + ">";
}

}  // namespace tcgemm
