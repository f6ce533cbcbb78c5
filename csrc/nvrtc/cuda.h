// All that kernels use of the driver's interface: the size and alignment of a tensor map, as of CUDA 13.
#pragma once

struct alignas(128) CUtensorMap {
  unsigned long opaque[16];
};
