// What the kernels of this family are called: the C++ expressions that instantiate them, from which any compiler makes
// the same code.
#pragma once

#include <string>

#include "core/implementation.h"
#include "kernels/wgmma/geometry.h"

namespace tcgemm::wgmma_family {

// What a kernel is compiled for, as C++ text.
struct Instance {
  Shape shape;
  std::string mma, operands;
  bool has_epilogue;
};

inline std::string config_text(const Shape& shape) {
  std::string text = "tcgemm::wgmma_family::Config<";
  for (int number : {shape.tile_m, shape.tile_n, shape.cluster_m, shape.cluster_n, shape.cluster_k}) {
    text += std::to_string(number) + ", ";
  }
  return text + (shape.ping_pong ? "true, " : "false, ") + (shape.swapped ? "true>" : "false>");
}

inline KernelSource kernel_source(const Instance& x) {
  return {"kernels/wgmma/kernel.cuh",
          "tcgemm::wgmma_family::kernel<" + config_text(x.shape) + ", " + x.mma + ", " + x.operands +
              ", tcgemm::wgmma_family::" + (x.has_epilogue ? "Fused>" : "Bare>"),
          "sm_90a"};
}

inline KernelSource ragged_kernel_source(const Instance& x) {
  return {"kernels/wgmma/ragged_kernel.cuh",
          "tcgemm::wgmma_family::ragged_kernel<" + config_text(x.shape) + ", " + x.mma + ", " + x.operands +
              ", tcgemm::wgmma_family::" + (x.has_epilogue ? "Fused>" : "Bare>"),
          "sm_90a"};
}

}  // namespace tcgemm::wgmma_family
