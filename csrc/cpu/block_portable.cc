// The kernels that run on every machine.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/block_kernels.h"
#include "cpu/number_formats.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tcgemm::host {
namespace {

#include "cpu/block.inc"
#include "cpu/convert.inc"
#include "cpu/dispatch.inc"
#include "cpu/micro_kernel.inc"
#include "cpu/simd_portable.inc"

}  // namespace

const BlockKernels* portable_kernels() {
  static constexpr BlockKernels kKernels{"portable", [] { return true; }, geometry, scratch_bytes, run};
  return &kKernels;
}

}  // namespace tcgemm::host
