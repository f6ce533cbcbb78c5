// In the place of the header of csrc: runs a kernel on the emulator.
#pragma once

#include "kernels/common/kernel.h"

namespace tcgemm {

template <typename... Parameters>
cudaError_t launch_kernel(const cudaLaunchConfig_t& config, const Kernel& kernel, const Parameters&... arguments) {
  emulator::Launch launch{config.gridDim, config.blockDim, config.dynamicSmemBytes};
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) launch.cluster_size = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) launch.starts_early = true;
  }
  const auto function = reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(kernel.function()));
  return emulator::Machine::get().run(launch, [&] { function(arguments...); });
}

}  // namespace tcgemm
