// The kernels of this family, made known by name. Included by instance_*.cu and ragged_instance_*.cu, which compile
// side by side.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/kernel.cuh"
#include "kernels/wgmma/ragged_kernel.cuh"

namespace tcgemm::wgmma_family {

template <typename Config, typename In, int kTransA, int kTransB, typename Epilogue>
bool add(std::string_view element) {
  return add_kernel(kernel_name(Config::kShape, element, kTransA, kTransB, Epilogue::kFused),
                    reinterpret_cast<const void*>(&kernel<Config, In, kTransA, kTransB, Epilogue>));
}

template <typename Config, typename In, int kTransA, int kTransB, bool kAnyEpilogue>
bool add_config(std::string_view element) {
  if constexpr (kAnyEpilogue) add<Config, In, kTransA, kTransB, Fused>(element);
  return add<Config, In, kTransA, kTransB, Bare>(element);
}

// All configs for one element type and layout.
template <typename In, int kTransA, int kTransB>
bool add_configs(std::string_view element) {
  bool is_new = true;
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped, any)             \
  is_new &= add_config<Config<tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped>, In, kTransA, \
                       kTransB, any>(element);
  TCGEMM_WGMMA_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  return is_new;
}

template <typename Config, typename In, int kTransA, typename Epilogue>
bool add_ragged(std::string_view element) {
  return add_kernel(ragged_kernel_name(Config::kShape, element, kTransA, Epilogue::kFused),
                    reinterpret_cast<const void*>(&ragged_kernel<Config, In, kTransA, Epilogue>));
}

// Weights that are K-major are of form rows, without an epilogue.
template <typename Config, typename In, int kTransA, bool kIsFused>
bool add_ragged_config(std::string_view element) {
  if constexpr (kIsFused) {
    if constexpr (kTransA) return add_ragged<Config, In, kTransA, RaggedFused>(element);
  } else if constexpr (kTransA || Config::kSwapped) {
    return add_ragged<Config, In, kTransA, Bare>(element);
  }
  return true;
}

template <typename In, int kTransA>
bool add_ragged_configs(std::string_view element) {
  bool is_new = true;
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, swapped, fused) \
  is_new &=                                                                      \
      add_ragged_config<Config<tile_m, tile_n, cluster_m, cluster_n, 1, false, swapped>, In, kTransA, fused>(element);
  TCGEMM_WGMMA_RAGGED_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  return is_new;
}

}  // namespace tcgemm::wgmma_family
