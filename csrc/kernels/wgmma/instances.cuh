// The kernels of this family, made known by name. Included by instance_*.cu and ragged_instance_*.cu, which compile
// side by side.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/type_text.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/kernel.cuh"
#include "kernels/wgmma/ragged_config.h"
#include "kernels/wgmma/ragged_kernel.cuh"

namespace tcgemm::wgmma_family {

template <typename Config, typename Mma, typename Operands, typename Epilogue>
bool add() {
  return add_kernel(kernel_source({Config::kShape, text_of(Mma{}), text_of(Operands{}), Epilogue::kFused}).name,
                    reinterpret_cast<const void*>(&kernel<Config, Mma, Operands, Epilogue>));
}

template <typename Config, typename Mma, typename Operands, bool kAnyEpilogue>
bool add_config() {
  if constexpr (kAnyEpilogue) add<Config, Mma, Operands, Fused>();
  return add<Config, Mma, Operands, Bare>();
}

// All configs for one instruction and its operands.
template <typename Mma, typename Operands>
bool add_configs() {
  bool is_new = true;
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped, any) \
  is_new &=                                                                                          \
      add_config<Config<tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped>, Mma, Operands, any>();
  TCGEMM_WGMMA_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  return is_new;
}

template <typename Config, typename Mma, typename Operands, typename Epilogue>
bool add_ragged() {
  return add_kernel(ragged_kernel_source({Config::kShape, text_of(Mma{}), text_of(Operands{}), Epilogue::kFused}).name,
                    reinterpret_cast<const void*>(&ragged_kernel<Config, Mma, Operands, Epilogue>));
}

// Tokens that are K-major are of form rows; only weights that are not have an epilogue.
template <typename Config, typename Mma, typename Operands, bool kIsFused>
bool add_ragged_config() {
  if constexpr (Config::kSwapped == Operands::B::kIsKMajor && !(kIsFused && Operands::A::kIsKMajor)) {
    return add_ragged<Config, Mma, Operands, std::conditional_t<kIsFused, RaggedFused, Bare>>();
  }
  return true;
}

template <typename Mma, typename Operands>
bool add_ragged_configs() {
  bool is_new = true;
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, swapped, fused) \
  is_new &= add_ragged_config<Config<tile_m, tile_n, cluster_m, cluster_n, 1, false, swapped>, Mma, Operands, fused>();
  TCGEMM_WGMMA_RAGGED_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  return is_new;
}

// For what the files that include this list.
template <typename Element>
using KMajor = tile::Operand<Element, tile::Major::kK, tile::Source::kShared>;
template <typename Element>
using MNMajor = tile::Operand<Element, tile::Major::kMN, tile::Source::kShared>;
template <typename Element>
using Transposed = tile::Operand<Element, tile::Major::kMN, tile::Source::kTransposed>;
using BF16 = tile::Mma<__nv_bfloat16, __nv_bfloat16, float>;
using F16 = tile::Mma<__half, __half, float>;
using TF32 = tile::Mma<ptx::TF32, ptx::TF32, float>;

}  // namespace tcgemm::wgmma_family
