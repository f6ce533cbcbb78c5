// What the kernels of this family are called: the C++ expressions that instantiate them, from which any compiler makes
// the same code.
#pragma once

#include <string>
#include <string_view>

#include "core/problem.h"
#include "kernels/wgmma/geometry.h"

namespace tcgemm::wgmma_family {

inline std::string config_type(const Shape& shape) {
  std::string text = "Config<";
  for (int number : {shape.tile_m, shape.tile_n, shape.cluster_m, shape.cluster_n, shape.cluster_k}) {
    text += std::to_string(number) + ", ";
  }
  return text + (shape.ping_pong ? "true, " : "false, ") + (shape.swapped ? "true>" : "false>");
}

// Of the elements that are multiplied; float32 as TF32.
inline const char* element_type(DType dtype) {
  return dtype == DType::kBF16 ? "__nv_bfloat16" : dtype == DType::kF16 ? "__half" : "float";
}

inline std::string kernel_name(const Shape& shape, std::string_view element, bool trans_a, bool trans_b,
                               bool has_epilogue) {
  return "kernel<" + config_type(shape) + ", " + std::string(element) + (trans_a ? ", 1" : ", 0") +
         (trans_b ? ", 1" : ", 0") + (has_epilogue ? ", Fused>" : ", Bare>");
}

inline std::string ragged_kernel_name(const Shape& shape, std::string_view element, bool trans_a, bool has_epilogue) {
  return "ragged_kernel<" + config_type(shape) + ", " + std::string(element) + (trans_a ? ", 1" : ", 0") +
         (has_epilogue ? ", RaggedFused>" : ", Bare>");
}

}  // namespace tcgemm::wgmma_family
