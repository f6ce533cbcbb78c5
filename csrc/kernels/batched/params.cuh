// What a launch tells the kernel.
#pragma once

#include <cstdint>

namespace tcgemm::batched {

// The arrays begin on 16 bytes.
struct Params {
  const void* a;
  const void* b;
  void* d;
  int32_t batch;
  int32_t matrices;  // of a group; the last one may have fewer
  int32_t num_groups;
};

}  // namespace tcgemm::batched
