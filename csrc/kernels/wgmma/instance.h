// What configs and kernels of this family are called: those by the names of their lists, these by the C++ expressions
// that instantiate them, from which any compiler makes the same code.
#pragma once

#include <string>
#include <string_view>

#include "core/implementation.h"
#include "kernels/common/type_text.h"
#include "kernels/wgmma/config.h"

namespace tcgemm::wgmma_family {

// A config as the lists have it.
struct NamedConfig {
  std::string_view name;
  Shape shape;
};

#define TCGEMM_ENTRY(name, ...) {name, {__VA_ARGS__}},
inline constexpr NamedConfig kConfigs[] = {TCGEMM_WGMMA_CONFIGS(TCGEMM_ENTRY)};
inline constexpr NamedConfig kRaggedConfigs[] = {TCGEMM_WGMMA_RAGGED_CONFIGS(TCGEMM_ENTRY)};
#undef TCGEMM_ENTRY

// What a kernel is compiled for, as C++ text. `epilogue`: a type of params.cuh.
struct Instance {
  Shape shape;
  std::string mma, operands, epilogue;
  bool is_ragged;
};

inline constexpr const char* kBareText = "Bare";
inline std::string function_text(const std::string& name) { return "Function<tcgemm::elementwise::" + name + ">"; }
inline std::string symmetric_text(const std::string& epilogue) {
  return "Symmetric<tcgemm::wgmma_family::" + epilogue + ">";
}

inline std::string config_text(const Shape& shape) {
  return "tcgemm::wgmma_family::Config<" +
         numbers_text({shape.tile_m, shape.tile_n, shape.cluster_m, shape.cluster_n, shape.cluster_k}) +
         (shape.ping_pong ? "true, " : "false, ") + (shape.swapped ? "true>" : "false>");
}

inline KernelSource kernel_source(const Instance& x) {
  const std::string name = x.is_ragged ? "ragged_kernel" : "kernel";
  return {"kernels/wgmma/" + name + ".cuh",
          "tcgemm::wgmma_family::" + name + "<" + config_text(x.shape) + ", " + x.mma + ", " + x.operands +
              ", tcgemm::wgmma_family::" + x.epilogue + ">",
          "sm_90a"};
}

}  // namespace tcgemm::wgmma_family
