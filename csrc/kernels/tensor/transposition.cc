#include "kernels/tensor/transposition.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "core/extent.h"
#include "kernels/common/kernel.h"
#include "kernels/common/launch_blocks.h"

namespace tcgemm {
namespace {

int64_t tiles(int64_t extent, const Transposition& t) {
  return ceil_div(extent, transposition::tile_extent(t.element_bytes));
}

int64_t num_tiles(const Transposition& t) {
  return t.num_elements() / (t.rows * t.cols) * tiles(t.rows, t) * tiles(t.cols, t);
}

const KernelReference& reference_to(int64_t element_bytes) {
  static KernelReferences<int64_t>& references = *new KernelReferences<int64_t>;
  return references.get(element_bytes, [&]() -> KernelSource {
    const char* const type = element_bytes == 1   ? "uint8_t"
                             : element_bytes == 2 ? "uint16_t"
                             : element_bytes == 4 ? "uint32_t"
                             : element_bytes == 8 ? "uint2"
                                                  : "uint4";
    return {"kernels/tensor/transposition_kernel.cuh",
            std::string("tcgemm::transposition::transpose_kernel<") + type + ">",
            {}};
  });
}

// Whether the modes, by their strides in one of the arrays, cover it without a gap and without an overlap.
bool is_packed(std::vector<Transposition::Mode> modes, int64_t Transposition::Mode::* stride) {
  std::sort(modes.begin(), modes.end(), [&](const auto& x, const auto& y) { return x.*stride < y.*stride; });
  int64_t count = 1;
  for (const Transposition::Mode& mode : modes) {
    if (mode.extent == 1) continue;  // its stride is never used
    if (mode.*stride != count || __builtin_mul_overflow(count, mode.extent, &count)) return false;
  }
  return true;
}

}  // namespace

std::string reject_transposition(const Transposition& t) {
  if (t.element_bytes < 1 || t.element_bytes > 16 || (t.element_bytes & (t.element_bytes - 1)) != 0) {
    return "elements must have 1, 2, 4, 8 or 16 bytes, got " + std::to_string(t.element_bytes);
  }
  if (t.num_batch < 0) return "batch_extents, batch_in_strides and batch_out_strides must be equally long";
  if (t.num_batch > Transposition::kMaxBatchModes) return "there must be at most 4 batch modes after folding";
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  std::vector<Transposition::Mode> modes(t.batch, t.batch + t.num_batch);
  modes.push_back({t.rows, t.in_row_stride, 1});
  modes.push_back({t.cols, 1, t.out_col_stride});
  for (const Transposition::Mode& mode : modes) {
    if (mode.extent < 1 || mode.extent > kMax) return must("every extent", "be in [1, 2147483647]", mode.extent);
  }
  for (const auto stride : {&Transposition::Mode::in_stride, &Transposition::Mode::out_stride}) {
    if (!is_packed(modes, stride)) return "extents and strides must permute one packed array";
  }
  if (num_tiles(t) > kMax) return "there must be at most 2^31 - 1 tiles";
  return "";
}

KernelSource transposition_source(const Transposition& t, const Device& device) {
  return reference_to(t.element_bytes).source_for(device);
}

Status launch_transposition(const Transposition& t, const Device& device, const void* in, void* out, void* stream) {
  Kernel* kernel = nullptr;
  if (Status s = reference_to(t.element_bytes).find(device, &kernel); !s.is_ok()) return s;
  transposition::Params params{t.rows,
                               t.cols,
                               t.in_row_stride,
                               t.out_col_stride,
                               static_cast<int32_t>(tiles(t.rows, t)),
                               static_cast<int32_t>(tiles(t.cols, t)),
                               t.num_batch,
                               {}};
  std::copy(std::begin(t.batch), std::end(t.batch), params.batch);
  return launch_blocks("transpose kernel", *kernel, num_tiles(t), transposition::kThreads, 0,
                       static_cast<cudaStream_t>(stream), in, out, params);
}

}  // namespace tcgemm
