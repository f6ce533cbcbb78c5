#include "libraries/cublas/pointer_array.h"

#include <algorithm>

#include "core/extent.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/pointers/params.cuh"

namespace tcgemm::cublas {
namespace {

const KernelReference& reference() {
  static const KernelReference& kernel =
      *new KernelReference({"kernels/pointers/kernel.cuh", "tcgemm::pointers::fill_kernel", {}});
  return kernel;
}

}  // namespace

KernelSource fill_pointers_source(const Device& device) { return reference().source_for(device); }

Status fill_pointers(const std::vector<const void*>& bases, int64_t stride_bytes, int64_t batch, const void** pointers,
                     const Device& device, cudaStream_t stream) {
  using pointers::kMaxBases;
  using pointers::kThreads;
  Kernel* kernel = nullptr;
  if (Status s = reference().find(device, &kernel); !s.is_ok()) return s;
  for (size_t first = 0; first < bases.size(); first += kMaxBases) {
    const auto num_bases = static_cast<int64_t>(std::min<size_t>(kMaxBases, bases.size() - first));
    pointers::Bases part{};
    for (int64_t i = 0; i < num_bases; ++i) part.address[i] = static_cast<const char*>(bases[first + i]);
    const int64_t count = num_bases * batch, blocks = std::min<int64_t>(1024, ceil_div(count, kThreads));
    const void** const target = pointers + static_cast<int64_t>(first) * batch;
    if (Status s = launch_blocks("kernel of addresses", *kernel, blocks, kThreads, 0, stream, part, stride_bytes, batch,
                                 count, target);
        !s.is_ok()) {
      return s;
    }
  }
  return Status::ok();
}

}  // namespace tcgemm::cublas
