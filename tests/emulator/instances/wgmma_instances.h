// Kernels that are compiled with the emulator, known by name.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/type_text.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/kernel.cuh"
#include "kernels/wgmma/ragged_kernel.cuh"

namespace tcgemm::wgmma_family {

template <typename Config, typename Mma, typename Operands>
Instance instance_of(bool is_ragged) {
  return {Config::kShape, text_of(Mma{}), text_of(Operands{}), kBareText, is_ragged};
}

template <typename Config, typename Mma, typename Operands>
bool add() {
  return add_kernel(kernel_source(instance_of<Config, Mma, Operands>(false)).name,
                    reinterpret_cast<const void*>(&kernel<Config, Mma, Operands, Bare>));
}

template <typename Config, typename Mma, typename Operands>
bool add_ragged() {
  return add_kernel(kernel_source(instance_of<Config, Mma, Operands>(true)).name,
                    reinterpret_cast<const void*>(&ragged_kernel<Config, Mma, Operands, Bare>));
}

}  // namespace tcgemm::wgmma_family
