// What tensor-core fragments hold, asked of the hardware. Behind the tests of
// jax_tcgemm/inspect/fragments.py, whose words (shape, dtype, operand) these functions take.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/implementation.h"

namespace tcgemm::wmma {

// Loads a matrix whose elements are numbered row by row into a WMMA fragment and writes, for each
// of 32 lanes, the numbers of the elements it then holds. `out_elements` must be 32 times the
// fragment's size. `column_major` is how the matrix lies in memory.
Status launch_fragment_probe(std::string_view shape, std::string_view dtype, std::string_view operand,
                             bool column_major, int32_t* out, int64_t out_elements, const Device& device, void* stream);

// Runs one mma.sync, D = A * B, on fragments given lane by lane as integers (exact in `dtype`);
// `accumulator` is the dtype of D.
struct FragmentBuffers {
  const int32_t* a;
  const int32_t* b;
  int32_t* d;
  int64_t a_elements, b_elements, d_elements;
};
Status launch_fragment_mma(std::string_view shape, std::string_view dtype, std::string_view accumulator,
                           const FragmentBuffers& buffers, const Device& device, void* stream);

// What a program has to bring for either: `operand` is that of a WMMA fragment, or the accumulator's dtype of an
// mma.sync. Nothing where there is no such fragment or instruction.
std::vector<KernelSource> fragment_kernels(std::string_view shape, std::string_view dtype, std::string_view operand,
                                           const Device& device);

}  // namespace tcgemm::wmma
