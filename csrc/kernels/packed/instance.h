// What the kernels of this family are called: the C++ expressions that instantiate them.
#pragma once

#include <string>

#include "core/packed_problem.h"
#include "kernels/common/type_text.h"
#include "kernels/packed/geometry.h"

namespace tcgemm::packed {

// What a kernel is compiled for, beside its tile.
struct Types {
  Format format;
  int zero;  // of all integers, where there are no zero points
  DType scale, x;
  bool grouped;
};

inline std::string weight_text(const Types& types) {
  const Format& format = types.format;
  return "tcgemm::packed::Weight<" + numbers_text({format.bits, format.group}) +
         (format.zero_points ? "true, " : "false, ") + numbers_text({types.zero, static_cast<int>(format.code)}) +
         element_text(types.scale) + ">, " + element_text(types.x);
}

// The epilogue's type; Bare if there is no function.
inline std::string epilogue_text(const std::string& function) {
  if (function.empty()) return "tcgemm::packed::Bare>";
  return "tcgemm::packed::Function<tcgemm::elementwise::" + function + ">>";
}

// Their target is the device's, for copies and clusters take what it has. `function`: its name, empty for none.
inline KernelSource kernel_source(const Tile& tile, const Types& types, const std::string& function = "") {
  const std::string config = "tcgemm::packed::Config<" +
                             numbers_text({tile.columns, tile.warps_k, tile.cluster, tile.token_blocks}) +
                             (types.grouped ? "true>" : "false>");
  return {"kernels/packed/kernel.cuh",
          "tcgemm::packed::kernel<" + config + ", " + weight_text(types) + ", " + epilogue_text(function),
          {}};
}

inline KernelSource kernel_source(const WideTile& tile, const Types& types, const std::string& function = "") {
  const std::string config = "tcgemm::packed::WideConfig<" +
                             numbers_text({tile.columns, tile.rows(), tile.cluster, tile.multicast_size}) +
                             (tile.dequantizes ? "true, " : "false, ") + (types.grouped ? "true>" : "false>");
  const std::string name = tile.dequantizes ? "dequantizing_kernel" : "wide_kernel";
  return {"kernels/packed/" + name + ".cuh",
          "tcgemm::packed::" + name + "<" + config + ", " + weight_text(types) + ", " + epilogue_text(function),
          "sm_90a"};
}

// What orders rows of elements of so many bytes.
inline KernelSource order_source(int element_bytes) {
  return {"kernels/packed/order_kernel.cuh", "tcgemm::packed::order_rows<" + std::to_string(element_bytes) + ">",
          "sm_90a"};
}

// The kernel that writes a weight of this format as an array of `out`.
inline KernelSource weight_source(const Format& format, DType out, DType scale) {
  return {"kernels/packed/weight_kernel.cuh",
          "tcgemm::packed::write_weight<" + numbers_text({format.bits, static_cast<int>(format.code)}) +
              element_text(out) + ", " + element_text(scale) + ">",
          {}};
}

}  // namespace tcgemm::packed
