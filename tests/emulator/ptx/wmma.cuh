// Stands in for csrc/ptx/wmma.cuh.
#pragma once

#include <mma.h>

namespace tcgemm::ptx {

template <typename Fragment, typename T>
void wmma_load_shared(Fragment& fragment, const T* shared, unsigned ld) {
  load_matrix_sync(fragment, shared, ld);
}

}  // namespace tcgemm::ptx
