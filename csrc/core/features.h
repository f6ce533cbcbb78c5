// What a problem may ask for that not every implementation can do.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/names.h"

namespace tcgemm {

enum class Feature : int32_t {
  // Of products, and some of them of grouped ones.
  kAlpha,
  kBeta,
  kGated,
  kFunction,
  kBlockScales,
  kGathered,  // of grouped products
  kTokensLast,
  kWeighted,    // of sums of rows
  kScalarArgs,  // of BLAS
  kItems,
};
template <>
inline constexpr std::array kNames<Feature>{"alpha other than 1",    "beta other than 0",
                                            "gated product",         "function",
                                            "block scales",          "gathered rows",
                                            "tokens in columns",     "weights",
                                            "scalars on the device", "several products in a call"};

class Features {
 public:
  constexpr Features() = default;
  constexpr Features(std::initializer_list<Feature> features) {
    for (const Feature feature : features) add(feature);
  }

  constexpr void add(Feature feature, bool is_there = true) {
    if (is_there) bits_ |= uint64_t{1} << static_cast<int32_t>(feature);
  }
  constexpr bool has(Feature feature) const { return bits_ >> static_cast<int32_t>(feature) & 1; }

  // "no gated product" for the first one that is needed and not here; empty where there is none.
  std::string lack(Features needed) const {
    if ((needed.bits_ & ~bits_) == 0) return "";
    for (size_t i = 0; i < kNames<Feature>.size(); ++i) {
      const auto feature = static_cast<Feature>(i);
      if (needed.has(feature) && !has(feature)) return std::string("no ") + name_of(feature);
    }
    return "";
  }

 private:
  uint64_t bits_ = 0;
};

}  // namespace tcgemm
