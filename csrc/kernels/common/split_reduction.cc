#include "kernels/common/split_reduction.h"

#include <array>

#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/float_type.h"
#include "kernels/common/kernel.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/common/split_reduction_params.cuh"

namespace tcgemm {
namespace {

// How much of D a thread has, and how many threads share it.
struct Share {
  int groups, count;

  static Share of(const Problem& p, int num_splits) {
    // Where few threads would be too few for the device, a thread has less to do.
    constexpr int64_t kMany = 1 << 20;
    if (num_splits >= 8) return {8, 4};
    return {1, p.batch * p.m * p.n >= kMany ? 8 : 4};
  }

  int64_t elements_per_block() const { return int64_t{split_reduction::kThreads} / groups * count; }
};

const KernelReference& reference_to(const Problem& p, const Share& shape) {
  static KernelReferences<std::array<int, 3>>& references = *new KernelReferences<std::array<int, 3>>;
  const bool is_integer = p.out == DType::kS32;
  return references.get({is_integer, shape.groups, shape.count}, [&]() -> KernelSource {
    const std::string types =
        is_integer ? "int32_t, tcgemm::split_reduction::Integers, " : "float, tcgemm::split_reduction::Floats, ";
    return {"kernels/common/split_reduction_kernel.cuh",
            "tcgemm::split_reduction::reduce<" + types + std::to_string(shape.groups) + ", " +
                std::to_string(shape.count) + ">",
            {}};
  });
}

}  // namespace

KernelSource split_reduction_source(const Problem& p, int num_splits, const Device& device) {
  return reference_to(p, Share::of(p, num_splits)).source_for(device);
}

Status launch_split_reduction(const Problem& p, const Buffers& buffers, const SplitSums& sums, const Device& device,
                              bool starts_early, cudaStream_t stream) {
  const Share shape = Share::of(p, sums.num_splits);
  Kernel* kernel = nullptr;
  if (Status s = reference_to(p, shape).find(device, &kernel); !s.is_ok()) return s;
  const int64_t elements = p.batch * p.m * p.n, num_blocks = ceil_div(elements, shape.elements_per_block());
  const bool are_splits_aligned = is_aligned(sums.data, 16) && elements * 4 % 16 == 0;
  const bool vectors = is_aligned(buffers.d, 16) && is_aligned(buffers.c, 16);
  const auto launch = [&](const auto& epilogue) {
    return launch_early("split reduction kernel", *kernel, num_blocks, split_reduction::kThreads, starts_early, stream,
                        sums.data, elements, sums.num_splits, are_splits_aligned, epilogue);
  };
  if (p.out == DType::kS32) {
    return launch(split_reduction::Integers{static_cast<int32_t>(p.alpha), static_cast<int32_t>(p.beta),
                                            static_cast<const int32_t*>(buffers.c), static_cast<int32_t*>(buffers.d),
                                            vectors});
  }
  return launch(split_reduction::Floats{float_type(p.out), static_cast<float>(p.alpha), static_cast<float>(p.beta),
                                        buffers.c, buffers.d, vectors});
}

}  // namespace tcgemm
