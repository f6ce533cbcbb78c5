// One launch of the kernel that splits.
#include "kernels/split/launch.h"

#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/split/params.cuh"

namespace tcgemm::split {
namespace {

int64_t row_vectors(const SplitProblem& p) { return p.pitch * dtype_bytes(p.out) / SplitProblem::kAlignment; }

// Strides of D by the order of its dimensions (core/split_problem.h).
void set_strides(Params* params, const SplitProblem& p) {
  const int64_t terms = p.num_terms();
  params->d_inner = p.pitch;
  if (p.form == SplitForm::kRightFirst) {
    params->d_term = p.depth * p.pitch;
    params->d_middle = terms * params->d_term;
    params->d_component = p.middle * params->d_middle;
    params->d_outer = 2 * params->d_component;
  } else {
    params->d_component = p.inner * p.pitch;
    params->d_middle = (p.has_component() ? 2 : 1) * params->d_component;
    params->d_term = p.depth * params->d_middle;
    params->d_outer = terms * params->d_term;
  }
}

}  // namespace

int64_t num_vectors(const SplitProblem& p) { return multiply_add(p.stored_rows(), row_vectors(p), 0); }

Status launch(const SplitProblem& p, const SplitBuffers& buffers, const Kernel& kernel, cudaStream_t stream) {
  for (const void* array : {buffers.x, static_cast<const void*>(buffers.d)}) {
    if (!is_aligned(array, SplitProblem::kAlignment)) return Status::invalid("arrays must begin on 16 bytes");
  }
  Params params{};
  params.x = buffers.x;
  params.d = buffers.d;
  params.num_vectors = static_cast<int32_t>(num_vectors(p));
  params.row_vectors = static_cast<int32_t>(row_vectors(p));
  params.num_inner = static_cast<int32_t>(p.stored_inner());
  params.num_middle = static_cast<int32_t>(p.stored_middle());
  params.vectors = Divisor(params.row_vectors);
  params.inner = Divisor(params.num_inner);
  params.middle = Divisor(params.num_middle);
  params.x_inner = static_cast<int32_t>(p.inner);
  params.x_middle = static_cast<int32_t>(p.middle);
  params.columns = static_cast<int32_t>(p.columns);
  set_strides(&params, p);
  return launch_blocks("splitting kernel", kernel, ceil_div(params.num_vectors, kThreads), kThreads, 0, stream, params);
}

}  // namespace tcgemm::split
