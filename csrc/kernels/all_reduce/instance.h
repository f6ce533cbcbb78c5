// The C++ expressions that instantiate the kernels of this family.
#pragma once

#include <string>

#include "core/all_reduce_problem.h"
#include "kernels/common/type_text.h"

namespace tcgemm::all_reduce {

// Its target is the device's.
inline KernelSource kernel_source(const AllReduceProblem& p) {
  return {"kernels/all_reduce/kernel.cuh",
          std::string("tcgemm::all_reduce::kernel<") + element_text(p.in) + ", " + std::to_string(p.devices) + ">",
          {}};
}

}  // namespace tcgemm::all_reduce
