// How a kernel of bare products is launched for others: what it cannot do goes through the workspace and a second
// kernel, that of split K or a function's.
#pragma once

#include <vector>

#include "kernels/common/function_launch.h"
#include "kernels/common/split_reduction.h"

namespace tcgemm {

inline constexpr Features kEpilogueFeatures{Feature::kAlpha, Feature::kBeta, Feature::kGated, Feature::kFunction};

inline bool is_bare(const Problem& p) { return p.epilogue.is_none() && p.alpha == 1.0 && p.beta == 0.0; }

// Whether a kernel that runs functions of its own sums runs this problem's. Of a gated product the sums of both
// matrices meet in the workspace only.
inline bool is_function_of_sums(const Problem& p) { return !p.epilogue.function.is_none() && !p.epilogue.gated; }

struct EpilogueLaunch {
  int num_splits = 1;
  // Whether the kernel itself stores D: not of splits of K, nor what a function makes of it.
  bool is_direct = true;
  bool starts_early = false;

  // `kernel_stores`: whether the kernel has more than the bare product, and does all of this one.
  static EpilogueLaunch make(const Problem& p, int num_splits, bool kernel_stores) {
    return {num_splits, num_splits == 1 && (is_bare(p) || kernel_stores), false};
  }

  // Those that a program has to bring beside the product's own.
  std::vector<KernelSource> kernels(const Problem& p, const Device& device) const {
    if (is_direct) return {};
    return {p.epilogue.function.is_none() ? split_reduction_source(p, num_splits, device)
                                          : function_kernel_source(p, device)};
  }

  int64_t workspace_bytes(const Problem& p) const { return is_direct ? 0 : SplitSums::bytes(p, num_splits); }

  // The problem that the product's own kernel has, which is bare where others come after it.
  Problem product_of(const Problem& p) const {
    if (is_direct) return p;
    Problem partial = p;
    partial.epilogue = {};
    partial.alpha = 1.0;
    partial.beta = 0.0;
    partial.out = SplitSums::dtype(p);
    return partial;
  }

  // `product(problem, buffers)` launches the kernel: for the problem itself, or for bare products
  // whose D is in the workspace and holds the partial products of `num_splits` splits of K, one batch after another.
  template <typename Product>
  Status run(const Problem& p, const Buffers& buffers, const Device& device, cudaStream_t stream,
             const Product& product) const {
    return is_direct ? product(p, buffers) : run_in_splits(p, buffers, device, stream, product);
  }

 private:
  template <typename Product>
  Status run_in_splits(const Problem& p, const Buffers& buffers, const Device& device, cudaStream_t stream,
                       const Product& product) const {
    const Problem partial = product_of(p);
    Buffers partial_buffers = buffers;
    for (int set = 0; set < SplitSums::num_sets(p); ++set) {
      if (set == 1) partial_buffers.b = buffers.b_up;
      partial_buffers.d = static_cast<char*>(buffers.workspace) +
                          dtype_bytes(partial.out) * set * SplitSums::set_elements(p, num_splits);
      if (Status s = product(partial, partial_buffers); !s.is_ok()) return s;
    }
    const SplitSums sums{buffers.workspace, num_splits};
    if (!p.epilogue.function.is_none()) return launch_function(p, buffers, sums, device, stream);
    return launch_split_reduction(p, buffers, sums, device, starts_early, stream);
  }
};

}  // namespace tcgemm
