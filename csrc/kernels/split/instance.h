// What the kernels of this family are called: the C++ expressions that instantiate them.
#pragma once

#include <string>

#include "core/split_problem.h"
#include "kernels/common/type_text.h"

namespace tcgemm::split {

// Whether rows of X are 16-byte aligned. XLA's arrays are, so that the length of a row decides.
inline bool has_vectors(const SplitProblem& p) { return p.columns * dtype_bytes(p.in) % 16 == 0; }

inline const char* text_of(SplitForm form) {
  return form == SplitForm::kReal ? "kReal" : form == SplitForm::kLeft ? "kLeft" : "kRight";
}

// Its target is the device's.
inline KernelSource kernel_source(const SplitProblem& p) {
  std::string name = std::string("tcgemm::split::kernel<") + element_text(p.out) +
                     ", tcgemm::split::Operand::" + text_of(p.form) + (has_vectors(p) ? ", true" : ", false");
  for (const int64_t term : p.terms) name += ", " + std::to_string(term);
  return {"kernels/split/kernel.cuh", name + ">", {}};
}

}  // namespace tcgemm::split
