// What the kernels of this family are called: the C++ expressions that instantiate them.
#pragma once

#include <string>

#include "core/quantize_problem.h"
#include "kernels/common/type_text.h"
#include "kernels/quantize/params.cuh"

namespace tcgemm::quantize {

// Warps that have a row together: as many as keep all of it in registers, if eight do.
inline int row_warps(int64_t columns) {
  int warps = 1;
  while (warps < kThreads / 32 && columns > int64_t{warps} * 32 * kHeld * kVector) warps *= 2;
  return warps;
}

// Whether rows are of whole vectors.
inline bool has_vectors(const QuantizeProblem& p) { return p.columns % kVector == 0; }

inline const char* text_of(QuantizeForm form) {
  return form == QuantizeForm::kLines ? "kLines" : form == QuantizeForm::kBlocks ? "kBlocks" : "kGiven";
}

// Its target is the device's.
inline KernelSource kernel_source(const QuantizeProblem& p) {
  const std::string types = std::string("<") + element_text(p.in) + ", " + element_text(p.out) + ", ";
  // Arrays begin on 16 bytes, as XLA's do, so that rows decide.
  const char* const aligned = has_vectors(p) ? "true>" : "false>";
  if (p.form == QuantizeForm::kRows) {
    return {"kernels/quantize/row_kernel.cuh",
            "tcgemm::quantize::row_kernel" + types + std::to_string(row_warps(p.columns)) + ", " + aligned,
            {}};
  }
  return {"kernels/quantize/tile_kernel.cuh",
          "tcgemm::quantize::tile_kernel" + types + "tcgemm::quantize::Scales::" + text_of(p.form) + ", " +
              (p.transposed ? "true, " : "false, ") + aligned,
          {}};
}

}  // namespace tcgemm::quantize
