// One launch of the quantizer.
#include "kernels/quantize/launch.h"

#include "kernels/common/alignment.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/quantize/instance.h"
#include "kernels/quantize/params.cuh"

namespace tcgemm::quantize {
namespace {

// Rows of one form lie side by side, whatever they are of.
int64_t all_rows(const QuantizeProblem& p) { return p.batch * p.rows; }

}  // namespace

int64_t num_blocks(const QuantizeProblem& p) {
  if (p.form == QuantizeForm::kRows) return ceil_div(all_rows(p), kThreads / 32 / row_warps(p.columns));
  return multiply_add(multiply_add(p.batch, ceil_div(p.rows, kBlock), 0), ceil_div(p.columns, kBlock), 0);
}

Status launch(const QuantizeProblem& p, const QuantizeBuffers& buffers, const Kernel& kernel, cudaStream_t stream) {
  for (const void* array :
       {buffers.x, static_cast<const void*>(buffers.values), static_cast<const void*>(buffers.transposed_values)}) {
    if (!tcgemm::is_aligned(array, 16)) return Status::invalid("arrays must begin on 16 bytes");
  }
  Params params{};
  params.x = buffers.x;
  params.given = buffers.given;
  params.values = buffers.values;
  params.scales = buffers.scales;
  params.transposed_values = buffers.transposed_values;
  params.transposed_scales = buffers.transposed_scales;
  params.rows = static_cast<int32_t>(p.form == QuantizeForm::kRows ? all_rows(p) : p.rows);
  params.columns = static_cast<int32_t>(p.columns);
  params.tile_rows = static_cast<int32_t>(ceil_div(p.rows, kBlock));
  params.tile_columns = static_cast<int32_t>(ceil_div(p.columns, kBlock));
  params.transposed_aligned = p.rows % 16 == 0;
  return launch_blocks("quantizing kernel", kernel, num_blocks(p), kThreads, shared_bytes(p.transposed), stream,
                       params);
}

}  // namespace tcgemm::quantize
