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

// clang-format off: each builds on those before it
#include "cpu/simd_portable.inc"
#include "cpu/convert.inc"
#include "cpu/micro_kernel.inc"
#include "cpu/block.inc"
#include "cpu/vector.inc"
#include "cpu/dispatch.inc"
// clang-format on

}  // namespace

const BlockKernels* portable_kernels() {
  static constexpr BlockKernels kKernels{"portable", [] { return true; }, geometry, scratch_bytes, run};
  return &kKernels;
}

}  // namespace tcgemm::host
