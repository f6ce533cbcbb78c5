// How a kernel that runs most epilogues itself is launched for all of them: what it cannot do goes
// through the workspace and the second kernel of split K; column sums are taken of D as stored.
#pragma once

#include <vector>

#include "kernels/common/column_sums.h"
#include "kernels/common/function_launch.h"
#include "kernels/common/split_reduction.h"

namespace tcgemm {

// What epilogue/fused.cuh computes, sums of columns, and functions.
inline constexpr Features kEpilogueFeatures{
    Feature::kAlpha, Feature::kBeta,  Feature::kActivation, Feature::kDerivative, Feature::kGated,
    Feature::kBiasN, Feature::kBiasM, Feature::kAuxOut,     Feature::kColumnSums, Feature::kFunction};

inline bool is_bare(const Problem& p) { return p.epilogue.is_none() && p.alpha == 1.0 && p.beta == 0.0; }

struct EpilogueLaunch {
  int num_splits = 1;
  // Whether the kernel itself stores D: not for parts of K nor for the two products of a gated one.
  bool is_direct = true;
  bool starts_early = false;

  static EpilogueLaunch make(const Problem& p, int num_splits, bool kernel_has_epilogue) {
    const bool can_be_direct = kernel_has_epilogue && !p.has_two_b() && p.epilogue.function.is_none();
    return {num_splits, num_splits == 1 && (is_bare(p) || can_be_direct), false};
  }

  // Those that a program has to bring beside the product's own.
  static std::vector<KernelSource> kernels(const Problem& p, const Device& device) {
    if (p.epilogue.function.is_none()) return {};
    return {function_kernel_source(p, device)};
  }

  int64_t sums_bytes(const Problem& p) const { return is_direct ? 0 : SplitSums::bytes(p, num_splits); }
  int64_t workspace_bytes(const Problem& p, const Device& device) const {
    const int64_t column_sums = has_column_sums(p) ? reduction_workspace_bytes(sum_of_rows(p), device.num_sms) : 0;
    return aligned(sums_bytes(p)) + column_sums;
  }

  // `product(problem, buffers)` launches the kernel: for the problem itself, or for bare products
  // whose D is in the workspace and holds `num_splits` parts of K, one batch after another.
  template <typename Product>
  Status run(const Problem& p, const Buffers& buffers, const Device& device, cudaStream_t stream,
             const Product& product) const {
    Status status = is_direct ? product(p, buffers) : run_in_parts(p, buffers, device, stream, product);
    if (!status.is_ok() || !has_column_sums(p)) return status;
    void* workspace = static_cast<char*>(buffers.workspace) + aligned(sums_bytes(p));
    return launch_reduction(sum_of_rows(p), device.num_sms, buffers.d, buffers.column_sums, workspace, stream);
  }

 private:
  static int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

  template <typename Product>
  Status run_in_parts(const Problem& p, const Buffers& buffers, const Device& device, cudaStream_t stream,
                      const Product& product) const {
    Problem part = p;
    part.epilogue = {};
    part.alpha = 1.0;
    part.beta = 0.0;
    part.out = SplitSums::dtype(p);
    Buffers part_buffers = buffers;
    for (int set = 0; set < SplitSums::num_sets(p); ++set) {
      if (set == 1) part_buffers.b = buffers.b_up;
      part_buffers.d =
          static_cast<char*>(buffers.workspace) + dtype_bytes(part.out) * set * SplitSums::set_elements(p, num_splits);
      if (Status s = product(part, part_buffers); !s.is_ok()) return s;
    }
    const SplitSums sums{buffers.workspace, num_splits};
    if (!p.epilogue.function.is_none()) return launch_function(p, buffers, sums, device, stream);
    return launch_split_reduction(p, buffers, sums, starts_early, stream);
  }
};

}  // namespace tcgemm
