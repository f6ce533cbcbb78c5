// The kernels for AVX-512 machines.
//
// The whole implementation is compiled for the instruction set by a pragma instead of a flag on
// this file. Standard headers come before it: their inline functions are shared with the rest
// of the program, which must not meet instructions it did not ask for.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/block_kernels.h"
#include "cpu/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace tcgemm::host {
namespace {

// clang-format off: each builds on those before it
#include "cpu/simd_avx512.inc"
#include "cpu/f16c.inc"
#include "cpu/convert.inc"
#include "cpu/micro_kernel.inc"
#include "cpu/block.inc"
#include "cpu/vector.inc"
#include "cpu/dispatch.inc"
// clang-format on

}  // namespace
}  // namespace tcgemm::host

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif
#endif  // __x86_64__

namespace tcgemm::host {

#if defined(__x86_64__)
namespace {
bool runs_here() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
}  // namespace

const BlockKernels* avx512_kernels() {
  static constexpr BlockKernels kKernels{"avx512", runs_here, geometry, scratch_bytes, run};
  return &kKernels;
}
#else
const BlockKernels* avx512_kernels() { return nullptr; }
#endif

}  // namespace tcgemm::host
