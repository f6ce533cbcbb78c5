// What the kernels of this family are called: the C++ expressions that instantiate them, from which any compiler makes
// the same code.
#pragma once

#include <string>

#include "core/implementation.h"
#include "kernels/common/type_text.h"
#include "kernels/mma_sync/geometry.h"

namespace tcgemm::mma {

// Kinds of epilogues, as in params.cuh.
enum class EpilogueKind { kBare, kScaled, kSymmetricBare, kSymmetricScaled, kFunction };

inline bool is_symmetric(EpilogueKind kind) {
  return kind == EpilogueKind::kSymmetricBare || kind == EpilogueKind::kSymmetricScaled;
}

// What a kernel is compiled for, as C++ text.
struct Instance {
  Tile tile;
  std::string mma, operands;
};

inline std::string arguments_text(const Instance& x) {
  const Tile& tile = x.tile;
  return "tcgemm::mma::Config<" + numbers_text({tile.m, tile.n, tile.k_bytes, tile.warp_m, tile.warp_n, tile.stages}) +
         std::to_string(tile.min_blocks_per_sm) + ">, " + x.mma + ", " + x.operands;
}

// Of a function, its name.
inline std::string epilogue_text(EpilogueKind kind, const std::string& function) {
  switch (kind) {
    case EpilogueKind::kBare: return "Bare";
    case EpilogueKind::kScaled: return "Scaled";
    case EpilogueKind::kSymmetricBare: return "Symmetric<tcgemm::mma::Bare>";
    case EpilogueKind::kSymmetricScaled: return "Symmetric<tcgemm::mma::Scaled>";
    case EpilogueKind::kFunction: return "Function<tcgemm::elementwise::" + function + ">";
  }
  return "";
}

// Their target is the device's, for copies and rounding take what it has.
inline KernelSource kernel_source(const Instance& x, EpilogueKind kind, const std::string& function = "") {
  const std::string epilogue = epilogue_text(kind, function);
  return {"kernels/mma_sync/kernel.cuh",
          "tcgemm::mma::gemm_kernel<" + arguments_text(x) + ", tcgemm::mma::" + epilogue + ">",
          {}};
}

inline KernelSource ragged_kernel_source(const Instance& x) {
  return {"kernels/mma_sync/ragged_kernel.cuh", "tcgemm::mma::ragged_kernel<" + arguments_text(x) + ">", {}};
}

}  // namespace tcgemm::mma
