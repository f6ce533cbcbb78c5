// The kernels of prebuilt.h. Included by prebuilt_*.cu, which compile side by side.
#pragma once

#include "kernels/wgmma/config.h"
#include "kernels/wgmma/instances.cuh"
#include "kernels/wgmma/prebuilt.h"

namespace tcgemm::wgmma_family {

// All configs for one instruction and its operands.
template <typename Mma, typename A, typename B>
bool add_prebuilt() {
  bool is_new = true;
#define TCGEMM_ENTRY(...) is_new &= add<Config<__VA_ARGS__>, Mma, tile::Operands<A, B>>();
  TCGEMM_WGMMA_PREBUILT(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  return is_new;
}

template <typename Element>
using KMajor = tile::Operand<Element, tile::Major::kK, tile::Source::kShared>;
template <typename Element>
using MNMajor = tile::Operand<Element, tile::Major::kMN, tile::Source::kShared>;
template <typename Element>
using Transposed = tile::Operand<Element, tile::Major::kMN, tile::Source::kTransposed>;

// Elements of 16 bits, which shared memory has with either extent contiguous.
template <typename Element>
bool add_prebuilt_16bit() {
  using Mma = tile::Mma<Element, Element, float>;
  using K = KMajor<Element>;
  using MN = MNMajor<Element>;
  return add_prebuilt<Mma, K, K>() & add_prebuilt<Mma, K, MN>() & add_prebuilt<Mma, MN, K>() &
         add_prebuilt<Mma, MN, MN>();
}

}  // namespace tcgemm::wgmma_family
