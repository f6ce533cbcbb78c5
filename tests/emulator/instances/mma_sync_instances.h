// Kernels that are compiled with the emulator, known by name.
#pragma once

#include <type_traits>

#include "kernels/common/kernel.h"
#include "kernels/common/type_text.h"
#include "kernels/mma_sync/instance.h"
#include "kernels/mma_sync/kernel.cuh"
#include "kernels/mma_sync/ragged_kernel.cuh"

namespace tcgemm::mma {

template <typename Config, typename Mma, typename Operands, typename Epilogue>
bool add() {
  constexpr EpilogueKind kKind = std::is_same_v<Epilogue, Bare> ? EpilogueKind::kBare : EpilogueKind::kScaled;
  return add_kernel(kernel_source({Config::kTile, text_of(Mma{}), text_of(Operands{})}, kKind).name,
                    reinterpret_cast<const void*>(&gemm_kernel<Config, Mma, Operands, Epilogue>));
}

template <typename Config, typename Mma, typename Operands>
bool add_ragged() {
  return add_kernel(ragged_kernel_source({Config::kTile, text_of(Mma{}), text_of(Operands{})}).name,
                    reinterpret_cast<const void*>(&ragged_kernel<Config, Mma, Operands>));
}

// add(operands) for operands of every major.
template <typename A, typename B, typename Add>
void add_layouts(const Add& add) {
  using tile::Major;
  using tile::Operand;
  constexpr tile::Source kSource = tile::Source::kRegisters;
  add(tile::Operands<Operand<A, Major::kK, kSource>, Operand<B, Major::kK, kSource>>{});
  add(tile::Operands<Operand<A, Major::kK, kSource>, Operand<B, Major::kMN, kSource>>{});
  add(tile::Operands<Operand<A, Major::kMN, kSource>, Operand<B, Major::kK, kSource>>{});
  add(tile::Operands<Operand<A, Major::kMN, kSource>, Operand<B, Major::kMN, kSource>>{});
}

}  // namespace tcgemm::mma
