// Host side of one instantiation: tensor maps, cluster launch. Included by the instances only.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "core/cuda_status.h"
#include "core/extent.h"
#include "kernels/common/column_sums.h"
#include "kernels/common/early_start.cuh"
#include "kernels/wgmma/config.h"
#include "kernels/wgmma/kernel.cuh"
#include "kernels/wgmma/launch.h"
#include "tile/alignment.h"

namespace tcgemm::wgmma_family {

template <typename In>
constexpr CUtensorMapDataType map_type() {
  if constexpr (std::is_same_v<In, __nv_bfloat16>) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if constexpr (std::is_same_v<In, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // Rounds float32 to TF32 while loading; the tensor core itself would truncate.
  return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
}

// Clusters of a kernel that a device runs at once, by the device's ordinal; 0 where that is not known yet.
// Fewer than fit by number of SMs, for a cluster lies inside a GPC: 132 SMs took 30 of four and 15 of eight.
using ResidentClusters = std::array<std::atomic<int>, 64>;

// Raises a kernel's shared-memory limit on the current device, `ordinal`, once, and finds how many
// clusters of `launch` run there at once.
template <typename Kernel>
Status prepare_kernel(Kernel kernel, const cudaLaunchConfig_t& launch, int ordinal, ResidentClusters& resident,
                      int* num_clusters) {
  std::atomic<int>& known = resident[ordinal % resident.size()];
  *num_clusters = known.load(std::memory_order_relaxed);
  if (*num_clusters > 0) return Status::ok();
  if (Status s = cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(launch.dynamicSmemBytes)),
                             "cudaFuncSetAttribute");
      !s.is_ok()) {
    return s;
  }
  const cudaError_t error = cudaOccupancyMaxActiveClusters(num_clusters, kernel, &launch);
  if (Status s = cuda_status(error, "cudaOccupancyMaxActiveClusters"); !s.is_ok()) return s;
  if (*num_clusters < 1) return Status::internal("the device has no room for a cluster of the kernel");
  known.store(*num_clusters, std::memory_order_relaxed);
  return Status::ok();
}

// Whether this process runs these kernels on several devices. Then collectives hold SMs now and again, and
// blocks that would have run there start when others have ended.
inline bool uses_several_devices(int ordinal) {
  static std::atomic<uint64_t> seen{0};
  const uint64_t own = uint64_t{1} << (ordinal % 64);
  return ((seen.fetch_or(own, std::memory_order_relaxed) | own) & ~own) != 0;
}

// Launches a kernel with a cluster for each of `num_tiles`, or as many as the device runs at once. Where SMs
// may be missing there are more, each for `tiles_at_least` tiles or a little more, so that those that run take
// over from those that cannot start.
template <auto kKernel, typename Config, int kSharedBytes, typename Parameters>
Status launch_clusters(const Parameters& params, int64_t num_tiles, int64_t tiles_at_least, cudaStream_t stream,
                       const char* what) {
  cudaLaunchAttribute attributes[2] = {programmatic_launch(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = Config::kClusterSize;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(Config::kClusterSize);
  launch.blockDim = dim3(Config::kThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = 2;
  static ResidentClusters resident{};
  int ordinal = 0, num_resident = 0;
  if (Status s = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice"); !s.is_ok()) return s;
  if (Status s = prepare_kernel(kKernel, launch, ordinal, resident, &num_resident); !s.is_ok()) return s;
  int64_t num_clusters = std::min<int64_t>(num_tiles, num_resident);
  if (uses_several_devices(ordinal)) num_clusters = std::max(num_clusters, num_tiles / tiles_at_least);
  launch.gridDim.x *= static_cast<unsigned>(num_clusters);
  // Blocks without clusters are placed as the walk expects them only by a launch that knows of none.
  if (Config::kClusterSize == 1) launch.numAttrs = 1;
  return cuda_status(cudaLaunchKernelEx(&launch, kKernel, params), what);
}

template <typename Config>
Grid make_grid(const Call& call, int64_t tile_n, int64_t tiles_m, int64_t tiles_n, bool may_overlap) {
  constexpr int64_t kAlong = kTilesAlongLonger<Config>;
  Grid grid{};
  grid.n_is_longer = call.n > call.m;
  const int64_t longer = grid.n_is_longer ? tiles_n : tiles_m, shorter = grid.n_is_longer ? tiles_m : tiles_n;
  grid.longer = static_cast<int32_t>(longer);
  grid.shorter = static_cast<int32_t>(shorter);
  grid.num_tiles = static_cast<int32_t>(tiles_m * tiles_n * call.batch * call.num_splits);
  const auto last = [&](int64_t extent, int64_t tile) {
    constexpr int64_t kAlignment = 8;  // of elements that TMA loads and stores at their best
    if (!may_overlap || extent < tile) return INT32_MAX;
    return static_cast<int32_t>(ceil_div(extent - tile, kAlignment) * kAlignment);
  };
  grid.last_m = last(call.m, Config::kTileM);
  grid.last_n = last(call.n, tile_n);
  grid.per_batch = Divisor(tiles_m * tiles_n);
  // Past the tiles of a batch entry, as it may be, it divides to 0, as it must.
  grid.per_group = Divisor(std::min<int64_t>(kAlong * shorter, INT32_MAX));
  grid.last_group = Divisor(longer - (longer - 1) / kAlong * kAlong);
  grid.batch = Divisor(call.batch);
  grid.batch_inner = Divisor(call.batch_inner);
  return grid;
}

template <typename Config, typename In, int kTransA, int kTransB, typename Epilogue>
Status launch_kernel(const Call& call) {
  using T = Traits<Config, In, kTransA, kTransB>;
  Params<Epilogue> params{};
  params.m = static_cast<int32_t>(call.m);
  params.n = static_cast<int32_t>(call.n);
  params.k = static_cast<int32_t>(call.k);
  params.batch = static_cast<int32_t>(call.batch);
  params.batch_inner = static_cast<int32_t>(call.batch_inner);
  params.a_outer = call.a.outer_stride != 0;
  params.a_inner = call.a.inner_stride != 0;
  params.b_outer = call.b.outer_stride != 0;
  params.b_inner = call.b.inner_stride != 0;
  params.num_splits = call.num_splits;
  const int64_t k_blocks = ceil_div(ceil_div(call.k, T::kTileK), int64_t{call.num_splits} * Config::kClusterK);
  params.k_blocks = static_cast<int32_t>(std::max<int64_t>(k_blocks, 1));
  params.first_k_block = call.k == 0;  // a map of K = 0 is one of a little more
  params.out_type = call.out_type;
  params.d = call.d;
  params.ldd = Config::kSwapped ? call.m : call.n;

  // Boxes as the producer asks for them: see the loads in kernel.cuh.
  const int a_box[2] = {kTransA ? T::kChunk : T::kTileK,
                        kTransA ? T::kTileK / Config::kClusterN : Config::kTileM / Config::kClusterN};
  const int b_box[2] = {kTransB ? T::kChunk : T::kTileK,
                        kTransB ? T::kTileK / Config::kClusterM : Config::kTileN / Config::kClusterM};
  const OperandExtent a_extent{kTransA ? call.m : call.k, kTransA ? call.k : call.m};
  const OperandExtent b_extent{kTransB ? call.n : call.k, kTransB ? call.k : call.n};
  if (Status s = encode_operand_map(&params.a_map, map_type<In>(), call, call.a, a_extent, a_box); !s.is_ok()) return s;
  if (Status s = encode_operand_map(&params.b_map, map_type<In>(), call, call.b, b_extent, b_box); !s.is_ok()) return s;

  int64_t tile_n = Config::kTileN;
  if constexpr (Epilogue::kFused) {
    const epilogue::Fused& fused = *call.epilogue;
    Fused& target = params.epilogue;
    target.values = fused;
    target.column_sums = call.column_sums;
    target.sum_blocks = static_cast<int32_t>((call.m + kSumRows - 1) / kSumRows);
    tile_n = target.template tile_columns<Config>();
    params.store_with_tma = fused.vectors;
    if (fused.has_two_z()) {
      if (Status s = encode_operand_map(&target.b_up_map, map_type<In>(), call, call.b_up, b_extent, b_box); !s.is_ok())
        return s;
    }
    if (fused.vectors) {
      if (Status s = encode_fused_map(&target.d_map, call, fused.d, fused.has_two_d() ? 2 : 1); !s.is_ok()) return s;
      if (fused.aux_out != nullptr) {
        if (Status s = encode_fused_map(&target.aux_map, call, fused.aux_out, fused.gated ? 2 : 1); !s.is_ok())
          return s;
      }
    }
  } else {
    const int64_t out_bytes = call.out_type == FloatType::kF32 ? 4 : 2;
    params.store_with_tma = is_aligned(call.d, 16) && params.ldd * out_bytes % 16 == 0;
    if (params.store_with_tma) {
      const auto box = [](auto shape) { return OutputBox{shape.kBoxColumns, shape.kBoxRows, shape.kRowBytes}; };
      const OutputBox d_box =
          out_bytes == 4 ? box(StoreShape<typename T::Share, 4>{}) : box(StoreShape<typename T::Share, 2>{});
      if (Status s = encode_output_map(&params.d_map, call, Config::kSwapped, d_box); !s.is_ok()) return s;
    }
  }

  params.stages = params.store_with_tma ? T::kStagesForTma : T::kStages;

  const int64_t tiles_m = ceil_div(call.m, Config::kTileM * Config::kClusterM);
  const int64_t tiles_n = ceil_div(call.n, tile_n * Config::kClusterN);
  const int64_t num_tiles = tiles_m * tiles_n * call.batch * call.num_splits;
  if (num_tiles > INT32_MAX) return Status::invalid("the output must be at most 2^31 - 1 tiles");
  // An epilogue must see each element once: it adds up columns, and may read what is stored in its place. Of fewer
  // k blocks, and where threads store, storing twice takes longer than loads from outside. The cost
  // model knows the same bounds.
  constexpr int32_t kWorthOverlap = 5;
  const bool may_overlap = !Epilogue::kFused && params.store_with_tma && params.k_blocks >= kWorthOverlap;
  params.grid = make_grid<Config>(call, tile_n, tiles_m, tiles_n, may_overlap);

  // What a block loads and stores alone is then 3 % of its time; ping-pong needs two tiles to hide any of it.
  constexpr int64_t kEnoughWork = int64_t{128} * 128 * 256;
  const int64_t tile_work = int64_t{params.k_blocks} * Config::kTileM * Config::kTileN;
  const int64_t tiles_at_least = std::max<int64_t>(ceil_div(kEnoughWork, tile_work), Config::kPingPong ? 2 : 1);
  return launch_clusters<kernel<Config, In, kTransA, kTransB, Epilogue>, Config, T::kSharedBytes>(
      params, num_tiles, tiles_at_least, call.stream, "wgmma kernel");
}

template <typename Config, typename In, int kTransA, int kTransB, bool kAnyEpilogue>
Status launch_config(const Call& call) {
  if (call.epilogue == nullptr) return launch_kernel<Config, In, kTransA, kTransB, Bare>(call);
  if constexpr (kAnyEpilogue) {
    return launch_kernel<Config, In, kTransA, kTransB, Fused>(call);
  } else {
    return Status::internal("this config's kernel has no epilogue");
  }
}

// The configs in the order of TCGEMM_WGMMA_CONFIGS.
template <typename In, int kTransA, int kTransB>
std::vector<LaunchFunction> launch_table() {
  return {
#define TCGEMM_ENTRY(name, tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped, any) \
  launch_config<Config<tile_m, tile_n, cluster_m, cluster_n, cluster_k, ping_pong, swapped>, In, kTransA, kTransB, any>,
      TCGEMM_WGMMA_CONFIGS(TCGEMM_ENTRY)
#undef TCGEMM_ENTRY
  };
}

}  // namespace tcgemm::wgmma_family
