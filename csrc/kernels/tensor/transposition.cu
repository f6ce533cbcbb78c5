// Permutation of an array's modes: a tile of the two modes that are contiguous in the input and in the
// output goes through shared memory, so that both are read and written in whole lines.
//
// One block a tile, 256 threads, 4 to 33 KiB of shared memory.
#include <algorithm>
#include <limits>
#include <vector>

#include "core/extent.h"
#include "kernels/common/launch.cuh"
#include "kernels/tensor/transposition.h"
#include "tile/transpose.cuh"

namespace tcgemm {
namespace {

template <typename T>
__global__ void __launch_bounds__(TransposeTile<T>::kThreads)
    transpose_kernel(const T* __restrict__ in, T* __restrict__ out, const __grid_constant__ Transposition t,
                     int tiles_r, int tiles_c) {
  using Tile = TransposeTile<T>;
  __shared__ Tile tile;
  int64_t index = blockIdx.x;
  // Neighbouring blocks write neighbouring parts of the same lines of the output.
  const int tile_r_idx = static_cast<int>(index % tiles_r);
  index /= tiles_r;
  const int tile_c_idx = static_cast<int>(index % tiles_c);
  index /= tiles_c;
  int64_t in_offset = 0, out_offset = 0;
  for (int i = t.num_batch - 1; i >= 0; --i) {
    const int64_t position = index % t.batch[i].extent;
    index /= t.batch[i].extent;
    in_offset += position * t.batch[i].in_stride;
    out_offset += position * t.batch[i].out_stride;
  }
  const int64_t first_r = int64_t{tile_r_idx} * Tile::kTile, first_c = int64_t{tile_c_idx} * Tile::kTile;
  const int rows = static_cast<int>(min(int64_t{Tile::kTile}, t.rows - first_r));
  const int cols = static_cast<int>(min(int64_t{Tile::kTile}, t.cols - first_c));
  tile.load(in + in_offset + first_r * t.in_row_stride + first_c, t.in_row_stride, rows, cols);
  __syncthreads();
  tile.store(out + out_offset + first_c * t.out_col_stride + first_r, t.out_col_stride, rows, cols);
}

int64_t num_tiles(const Transposition& t) {
  const int64_t tile = transpose_tile_extent(t.element_bytes);
  return t.num_elements() / (t.rows * t.cols) * ((t.rows + tile - 1) / tile) * ((t.cols + tile - 1) / tile);
}

template <typename T>
Status launch_typed(const Transposition& t, const void* in, void* out, cudaStream_t stream) {
  constexpr int64_t kTile = TransposeTile<T>::kTile;
  const int tiles_r = static_cast<int>((t.rows + kTile - 1) / kTile);
  const int tiles_c = static_cast<int>((t.cols + kTile - 1) / kTile);
  return launch_blocks("transpose kernel", transpose_kernel<T>, num_tiles(t), TransposeTile<T>::kThreads, 0, stream,
                       static_cast<const T*>(in), static_cast<T*>(out), t, tiles_r, tiles_c);
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

Status launch_transposition(const Transposition& t, const void* in, void* out, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  switch (t.element_bytes) {
    case 1: return launch_typed<uint8_t>(t, in, out, stream);
    case 2: return launch_typed<uint16_t>(t, in, out, stream);
    case 4: return launch_typed<uint32_t>(t, in, out, stream);
    case 8: return launch_typed<uint2>(t, in, out, stream);
    default: return launch_typed<uint4>(t, in, out, stream);
  }
}

}  // namespace tcgemm
