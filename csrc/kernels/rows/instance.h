// What the kernels of rows are called: the C++ expressions that instantiate them.
#pragma once

#include <string>

#include "core/rows_problem.h"
#include "kernels/common/type_text.h"
#include "kernels/rows/params.cuh"

namespace tcgemm::rows {

// Elements that move in one access, and packs of them that a thread has of a target.
struct Shape {
  int count, packs;

  // Where rows begin on 16 bytes.
  static Shape aligned(const RowsProblem& p) {
    const int count = static_cast<int>(16 / dtype_bytes(p.in));
    if (p.n % count != 0) return element_by_element();
    const bool is_wide = p.is_sums() && p.n > kWideLanes * count && p.pairs < 4 * p.targets;
    return {count, is_wide ? 4 : 1};
  }
  static Shape element_by_element() { return {1, 1}; }
};

// Its target is the device's.
inline KernelSource kernel_source(const RowsProblem& p, const Shape& shape) {
  const std::string arguments = std::string(element_text(p.in)) + ", " + std::to_string(shape.count);
  return {"kernels/rows/kernel.cuh",
          p.is_sums() ? "tcgemm::rows::sum_rows<" + arguments + ", " + std::to_string(shape.packs) + ">"
                      : "tcgemm::rows::multiply_rows<" + arguments + ">",
          {}};
}

}  // namespace tcgemm::rows
