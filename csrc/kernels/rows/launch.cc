#include "kernels/rows/launch.h"

#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/rows/params.cuh"

namespace tcgemm::rows {
namespace {

// How targets are spread over threads that have `each` packs: see SumsParams.
int32_t lanes_of(int64_t packs, int each) {
  if (each > 1) return kWideLanes;
  int32_t lanes = 1;
  while (lanes < kThreads && lanes < packs) lanes *= 2;
  return lanes;
}

int64_t sums_blocks(const RowsProblem& p, int64_t packs, int each) {
  const int32_t lanes = lanes_of(packs, each);
  return ceil_div(p.targets, kThreads / lanes) * ceil_div(packs, lanes * each);
}

Status launch_sums(const RowsProblem& p, const RowsBuffers& buffers, const Shape& shape, const Kernel& kernel,
                   cudaStream_t stream) {
  const int64_t packs = p.n / shape.count;
  const int32_t lanes = lanes_of(packs, shape.packs);
  const SumsParams params{buffers.a,
                          buffers.indices,
                          buffers.starts,
                          static_cast<const float*>(buffers.weights),
                          buffers.d,
                          static_cast<int32_t>(p.a_rows),
                          static_cast<int32_t>(p.targets),
                          static_cast<int32_t>(p.pairs),
                          static_cast<int32_t>(packs),
                          lanes,
                          static_cast<int32_t>(ceil_div(packs, lanes * shape.packs))};
  return launch_blocks("kernel of sums of rows", kernel, sums_blocks(p, packs, shape.packs), kThreads, 0, stream,
                       params);
}

Status launch_dots(const RowsProblem& p, const RowsBuffers& buffers, const Shape& shape, const Kernel& kernel,
                   cudaStream_t stream) {
  const DotsParams params{buffers.a,
                          buffers.b,
                          buffers.indices,
                          buffers.b_indices,
                          static_cast<float*>(buffers.d),
                          static_cast<int32_t>(p.a_rows),
                          static_cast<int32_t>(p.b_rows),
                          static_cast<int32_t>(p.pairs),
                          static_cast<int32_t>(p.n / shape.count)};
  return launch_blocks("kernel of products of rows", kernel, ceil_div(p.pairs, kThreads / 32), kThreads, 0, stream,
                       params);
}

}  // namespace

int64_t most_blocks(const RowsProblem& p) {
  return p.is_sums() ? sums_blocks(p, p.n, 1) : ceil_div(p.pairs, kThreads / 32);
}

Shape shape_of(const RowsProblem& p, const RowsBuffers& buffers) {
  const void* other = p.is_sums() ? buffers.d : buffers.b;
  const bool are_aligned = is_aligned(buffers.a, 16) && is_aligned(other, 16);
  return are_aligned ? Shape::aligned(p) : Shape::element_by_element();
}

Status launch(const RowsProblem& p, const RowsBuffers& buffers, const Shape& shape, const Kernel& kernel,
              cudaStream_t stream) {
  return p.is_sums() ? launch_sums(p, buffers, shape, kernel, stream) : launch_dots(p, buffers, shape, kernel, stream);
}

}  // namespace tcgemm::rows
