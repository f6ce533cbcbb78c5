// What configs are called: parts of the C++ expressions that instantiate kernels.
#pragma once

#include <string>

#include "core/implementation.h"
#include "kernels/common/type_text.h"
#include "kernels/wmma/config.h"

namespace tcgemm::wmma {

inline const char* text_of(bool x) { return x ? "true" : "false"; }

template <int kM, int kN, int kK>
std::string text_of(Shape<kM, kN, kK>) {
  return "tcgemm::wmma::Shape<" + numbers_text({kM, kN}) + std::to_string(kK) + ">";
}
template <int kM, int kN, int kK, int kWarpM, int kWarpN, int kStages, int kMinBlocks>
std::string text_of(Tile<kM, kN, kK, kWarpM, kWarpN, kStages, kMinBlocks>) {
  return "tcgemm::wmma::Tile<" + numbers_text({kM, kN, kK, kWarpM, kWarpN, kStages}) + std::to_string(kMinBlocks) + ">";
}
template <bool kATransposed, bool kBTransposed>
std::string text_of(OneLayout<kATransposed, kBTransposed>) {
  return std::string("tcgemm::wmma::OneLayout<") + text_of(kATransposed) + ", " + text_of(kBTransposed) + ">";
}
inline std::string text_of(AnyLayout) { return "tcgemm::wmma::AnyLayout"; }
template <typename Mma, typename Tile, typename Layout, bool kSaturate>
std::string text_of(TiledConfig<Mma, Tile, Layout, kSaturate>) {
  return "tcgemm::wmma::TiledConfig<" + text_of(Mma{}) + ", " + text_of(Tile{}) + ", " + text_of(Layout{}) + ", " +
         text_of(kSaturate) + ">";
}
template <typename Mma, bool kSaturate>
std::string text_of(NaiveConfig<Mma, kSaturate>) {
  return "tcgemm::wmma::NaiveConfig<" + text_of(Mma{}) + ", " + text_of(kSaturate) + ">";
}

}  // namespace tcgemm::wmma
