// Reductions over one mode of an array: of tensors, and sums over the rows of products.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/implementation.h"

namespace tcgemm {

// out[o, i] = reduce over r of in[o, r, i], packed row-major: in (outer, reduced, inner).
//
// `in` is f16, bf16, f32 or f64; sums of all but f64 are kept in f32. `out` has in's dtype or f32 (f64
// for f64), rounded once. The order of the additions depends on the shape and the number of SMs only.
struct Reduction {
  DType in, out;
  std::string_view op;  // "add", "max", "min"
  int64_t outer, reduced, inner;
};

// See core/problem.h; the arrays of a call tell the dtypes.
template <typename Visit>
void visit_fields(Reduction& r, Visit&& visit) {
  visit("op", r.op);
  visit("outer", r.outer);
  visit("reduced", r.reduced);
  visit("inner", r.inner);
}

std::string reject_reduction(const Reduction& r);
// Partial results of a reduction that one pass of the grid cannot keep the device busy with.
int64_t reduction_workspace_bytes(const Reduction& r, int num_sms);
// What a program has to bring for it.
std::vector<KernelSource> reduction_sources(const Reduction& r, const Device& device);
Status launch_reduction(const Reduction& r, const Device& device, const void* in, void* out, void* workspace,
                        void* stream);

}  // namespace tcgemm
