// What the kernels of this family are called: the C++ expressions that instantiate them.
#pragma once

#include <string>

#include "core/packed_problem.h"
#include "kernels/packed/geometry.h"

namespace tcgemm::packed {

// What a kernel is compiled for.
struct Instance {
  Geometry geometry;
  int zero;  // of all integers, where there are no zero points
  DType scale, x;
  bool grouped;
};

inline const char* type_text(DType dtype) {
  return dtype == DType::kF16 ? "__half" : dtype == DType::kBF16 ? "__nv_bfloat16" : "float";
}

// Their target is the device's, for copies and clusters take what it has.
inline KernelSource kernel_source(const Instance& x) {
  const auto number = [](int value) { return std::to_string(value) + ", "; };
  const Tile& tile = x.geometry.tile;
  const Format& format = x.geometry.format;
  const auto flag = [](bool value) { return std::string(value ? "true, " : "false, "); };
  std::string name = "tcgemm::packed::kernel<tcgemm::packed::Config<";
  name += number(tile.columns) + number(tile.warps_k) + number(tile.cluster) + number(tile.token_blocks) +
          (x.grouped ? "true" : "false");
  name += ">, tcgemm::packed::Weight<" + number(format.bits) + number(format.group) + flag(format.zero_points) +
          number(x.zero) + flag(format.table) + type_text(x.scale);
  name += std::string(">, ") + type_text(x.x) + ">";
  return {"kernels/packed/kernel.cuh", name, {}};
}

}  // namespace tcgemm::packed
