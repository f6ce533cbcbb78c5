// Definition of launch(); included by the instance_*.cu files only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/common/epilogue_launch.h"
#include "kernels/common/fused.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/mma_sync/instruction.cuh"
#include "kernels/mma_sync/kernel.cuh"
#include "kernels/mma_sync/launch.h"

namespace tcgemm::mma {

// The operand in bytes, and the largest copy (16, 8, 4, 2 or 1 bytes) that divides its address,
// every stride in use and the contiguous extent: such a copy is inside or outside as a whole.
inline BatchedMatrix<char> in_bytes(const Problem& problem, const Operand& operand, const void* data, int64_t rows,
                                    int64_t contiguous, int* granularity) {
  const int64_t bytes = dtype_bytes(operand.dtype);
  const BatchedMatrix<char> matrix{static_cast<const char*>(data), operand.ld * bytes,
                                   operand.batch_outer_stride * bytes, operand.batch_inner_stride * bytes,
                                   problem.batch_inner};
  uint64_t bits = 16 | reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(contiguous * bytes);
  if (rows > 1) bits |= static_cast<uint64_t>(matrix.ld);
  if (problem.batch_outer() > 1) bits |= static_cast<uint64_t>(matrix.batch_outer_stride);
  if (problem.batch_inner > 1) bits |= static_cast<uint64_t>(matrix.batch_inner_stride);
  *granularity = static_cast<int>(bits & (~bits + 1));
  return matrix;
}

// What TMA copies in boxes of `Tile`. Without elements there may be no address, and nothing is copied.
template <typename Tile>
Status encode_map(CUtensorMap* map, const BatchedMatrix<char>& matrix, int64_t contiguous, int64_t rows, int64_t batch,
                  int element_bytes) {
  if (contiguous == 0 || rows == 0) return Status::ok();
  const CUtensorMapDataType type = element_bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                        : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const TensorOperand operand{matrix.data,
                              contiguous,
                              rows,
                              matrix.batch_inner,
                              batch / matrix.batch_inner,
                              matrix.ld,
                              matrix.batch_inner_stride,
                              matrix.batch_outer_stride};
  return encode_operand_map(map, type, operand, {Tile::kBoxContiguous, Tile::kBoxRows}, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <typename Config, typename Instruction, typename Epilogue>
Status launch_kernel(const Problem& p, Params params, const Epilogue& epilogue, const Device& device,
                     cudaStream_t stream) {
  using Traits = KernelTraits<Config, Instruction>;
  // The kernel decides likewise.
  if (device.compute_capability >= 90 && Traits::kIsTensorLayout && params.a_granularity == kChunkBytes &&
      params.b_granularity == kChunkBytes) {
    const bool ta = Config::kATransposed, tb = Config::kBTransposed;
    Status s = encode_map<typename Traits::A>(&params.a_map, params.a, ta ? p.m : p.k, ta ? p.k : p.m, p.batch,
                                              Instruction::kElementBytes);
    if (!s.is_ok()) return s;
    s = encode_map<typename Traits::B>(&params.b_map, params.b, tb ? p.k : p.n, tb ? p.n : p.k, p.batch,
                                       Instruction::kElementBytes);
    if (!s.is_ok()) return s;
  }
  return launch_blocks("mma_sync", gemm_kernel<Config, Instruction, Epilogue>, params.num_works, Config::kThreads,
                       Config::kSharedBytes, stream, params, epilogue);
}

template <typename Tile, typename Instruction, typename Epilogue>
Status launch_layout(const Problem& problem, const Params& params, const Epilogue& epilogue, const Device& device,
                     cudaStream_t stream) {
  return visit_layouts(problem, [&](auto ta, auto tb) {
    return launch_kernel<Config<Tile, ta, tb>, Instruction>(problem, params, epilogue, device, stream);
  });
}

template <typename Tile, typename Instruction>
Status launch(const Problem& p, const Buffers& buffers, const Device& device, int splits, cudaStream_t stream) {
  using Partial = typename Instruction::Partial;
  constexpr int64_t kTileK = Tile::kTileKBytes / Instruction::kElementBytes;
  Params params{};
  params.a = in_bytes(p, p.a, buffers.a, p.a.transposed ? p.k : p.m, p.a.transposed ? p.m : p.k, &params.a_granularity);
  params.b = in_bytes(p, p.b, buffers.b, p.b.transposed ? p.n : p.k, p.b.transposed ? p.k : p.n, &params.b_granularity);
  params.batch = p.batch;
  params.m = p.m;
  params.n = p.n;
  params.k = p.k;
  const int64_t tiles_k = (p.k + kTileK - 1) / kTileK;
  params.k_per_split = std::max<int64_t>((tiles_k + splits - 1) / splits, 1) * kTileK;
  params.grid = TileGrid::make(p.batch, p.m, p.n, Tile::kTileM, Tile::kTileN);
  params.num_works = static_cast<uint32_t>(params.grid.num_tiles() * splits);

  params.d = buffers.d;
  params.out = epilogue::float_type(p.out);
  params.stores_vectors =
      (reinterpret_cast<uintptr_t>(params.d) | static_cast<uintptr_t>(p.n * dtype_bytes(p.out))) % 16 == 0;
  if constexpr (std::is_same_v<Partial, int32_t>) {
    const epilogue::AlphaBetaC<int32_t, int32_t> epilogue{static_cast<int32_t>(p.alpha), static_cast<int32_t>(p.beta),
                                                          static_cast<const int32_t*>(buffers.c), p.m, p.n};
    return launch_layout<Tile, Instruction>(p, params, epilogue, device, stream);
  } else {
    // The plain product is worth its own kernels where it is most of all use.
    if constexpr (Instruction::kHasIdentityEpilogue || !Tile::kHasEpilogue) {
      if (is_bare(p)) {
        return launch_layout<Tile, Instruction>(p, params, epilogue::Identity<Partial, void>{}, device, stream);
      }
    }
    if constexpr (Tile::kHasEpilogue) {
      return launch_layout<Tile, Instruction>(p, params, epilogue::make_fused(p, buffers), device, stream);
    }
    return Status::internal("this tile's kernel has no epilogue");
  }
}

}  // namespace tcgemm::mma
