// What the kernels of this family are called: the C++ expressions that instantiate them.
#pragma once

#include <string>

#include "core/implementation.h"
#include "kernels/batched/tiling.h"
#include "kernels/common/type_text.h"

namespace tcgemm::batched {

// Its target is the device's.
inline KernelSource kernel_source(const Problem& p, const Tiling& t) {
  std::string name = std::string("tcgemm::batched::kernel<tcgemm::batched::Config<") + element_text(p.a.dtype) + ", " +
                     element_text(p.out) + ", " + numbers_text({t.m, t.n, t.k});
  name += t.a_transposed ? "true, " : "false, ";
  name += t.b_transposed ? "true, " : "false, ";
  name += numbers_text(
      {t.lanes, t.matrices, t.m_threads, t.m_vector, t.n_threads, t.n_vector, t.a_pads, t.b_pads, t.d_pads});
  return {"kernels/batched/kernel.cuh", name + std::to_string(t.blocks) + ">>", {}};
}

}  // namespace tcgemm::batched
