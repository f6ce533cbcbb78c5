// All kernels of rows.
#include "instances/named.h"
#include "kernels/rows/kernel.cuh"

#define EMULATED_ROWS(type, count)                                                                                    \
  EMULATED_KERNEL(tcgemm::rows::sum_rows<type, 1, 1>), EMULATED_KERNEL(tcgemm::rows::sum_rows<type, count, 1>),       \
      EMULATED_KERNEL(tcgemm::rows::sum_rows<type, count, 4>), EMULATED_KERNEL(tcgemm::rows::multiply_rows<type, 1>), \
      EMULATED_KERNEL(tcgemm::rows::multiply_rows<type, count>)

static const bool added[] = {EMULATED_ROWS(__half, 8), EMULATED_ROWS(__nv_bfloat16, 8), EMULATED_ROWS(float, 4)};
