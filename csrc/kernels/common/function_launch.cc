#include "kernels/common/function_launch.h"

#include "core/extent.h"
#include "epilogue/function_sums.cuh"
#include "kernels/common/function.h"
#include "kernels/common/kernel.h"
#include "kernels/common/launch_blocks.h"

namespace tcgemm {

KernelSource function_kernel_source(const Problem& p, const Device& device) {
  return {"epilogue/function_kernel.cuh",
          "tcgemm::epilogue::function_kernel<tcgemm::elementwise::" + p.epilogue.function.name + ">",
          target_of(device)};
}

Status launch_function(const Problem& p, const Buffers& buffers, const SplitSums& sums, const Device& device,
                       cudaStream_t stream) {
  Kernel* kernel = nullptr;
  if (Status s = KernelReference(function_kernel_source(p, device)).find(device, &kernel); !s.is_ok()) return s;
  const int64_t columns = ceil_div(p.n, epilogue::kFunctionColumns), rows = ceil_div(p.m, epilogue::kFunctionRows);
  const int64_t num_warps = p.batch * rows * columns;
  if (num_warps > INT32_MAX) return Status::invalid("d must have fewer than 2^39 elements");
  const epilogue::FunctionSums given{sums.data,
                                     sums.num_splits,
                                     p.batch * p.m * p.n,
                                     Divisor(columns),
                                     Divisor(rows),
                                     static_cast<int32_t>(columns),
                                     static_cast<int32_t>(rows),
                                     num_warps};
  const int64_t num_blocks = ceil_div(num_warps, epilogue::kFunctionThreads / 32);
  return launch_blocks("function kernel", *kernel, num_blocks, epilogue::kFunctionThreads, 0, stream, given,
                       make_function(p, buffers));
}

}  // namespace tcgemm
