// The kernels of this family that a compiler of whole libraries makes, known by name.
#pragma once

#include "kernels/common/kernel.h"
#include "kernels/common/type_text.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/kernel.cuh"
#include "kernels/wgmma/ragged_kernel.cuh"

namespace tcgemm::wgmma_family {

template <typename Config, typename Mma, typename Operands, typename Epilogue>
Instance instance_of(bool is_ragged) {
  return {Config::kShape, text_of(Mma{}), text_of(Operands{}), epilogue_text(Epilogue::kFused), is_ragged};
}

template <typename Config, typename Mma, typename Operands, typename Epilogue>
bool add() {
  return add_kernel(kernel_source(instance_of<Config, Mma, Operands, Epilogue>(false)).name,
                    reinterpret_cast<const void*>(&kernel<Config, Mma, Operands, Epilogue>));
}

template <typename Config, typename Mma, typename Operands, typename Epilogue>
bool add_ragged() {
  return add_kernel(kernel_source(instance_of<Config, Mma, Operands, Epilogue>(true)).name,
                    reinterpret_cast<const void*>(&ragged_kernel<Config, Mma, Operands, Epilogue>));
}

}  // namespace tcgemm::wgmma_family
