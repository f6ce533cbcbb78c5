// D[b] = op(A[b]) op(B[b]) for batches of tiny matrices, packed one after the other. Bound by memory: everything is
// read and written once, 16 bytes at a time.
//
// A block has groups of matrices, whose bytes are neighbors in each array. While it multiplies one group, the next one
// is on its way to the other of two stages in shared memory (cp.async). A thread has a small tile of one matrix in
// registers; sizes are template arguments, so that its loops unroll. D goes through shared memory, too, so that it is
// written in whole chunks.
//
// Barriers of a group: (1) its A and B have arrived, and D of the group before has been read; (2) D is complete, and
// the stage may be filled again.
#pragma once

#include <cstdint>

#include "kernels/batched/geometry.h"
#include "kernels/batched/params.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global_memory.cuh"
#include "tile/multiply_add.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::batched {

template <typename T>
struct Accumulator {
  using Type = T;
};
template <>
struct Accumulator<__half> {
  using Type = float;
};
template <>
struct Accumulator<__nv_bfloat16> {
  using Type = float;
};

template <typename In_, typename Out_, int kM, int kN, int kK, bool kATransposed, bool kBTransposed, int kLanes,
          int kMatrices, int kMThreads, int kMVector, int kNThreads, int kNVector, int kAPads, int kBPads, int kDPads,
          int kBlocks>
struct Config {
  using In = In_;
  using Out = Out_;
  using Acc = typename Accumulator<In>::Type;
  static constexpr Tiling kTiling{kM,          kN,     kK,        kATransposed, kBTransposed, sizeof(In),
                                  sizeof(Out), kLanes, kMatrices, kMThreads,    kMVector,     kNThreads,
                                  kNVector,    kAPads, kBPads,    kDPads,       kBlocks};
  static_assert(kMatrices % kTiling.alignment() == 0, "groups must begin on 16 bytes");
  static_assert(kMatrices % kLanes == 0, "neighboring lanes must have a matrix each");
  static_assert(kM % kMVector == 0 && kN % kNVector == 0, "a side must be of whole vectors");
};

// The two operands, and D: their matrices in shared memory, and how threads walk along M or N.
template <typename Config>
struct OfA {
  static constexpr Stored kStored = Config::kTiling.a();
  static constexpr Side kSide = Config::kTiling.m_side();
  static constexpr bool kAlongK = !Config::kTiling.a_transposed;
};
template <typename Config>
struct OfB {
  static constexpr Stored kStored = Config::kTiling.b();
  static constexpr Side kSide = Config::kTiling.n_side();
  static constexpr bool kAlongK = Config::kTiling.b_transposed;
};
template <typename Config>
struct OfD {
  static constexpr Stored kStored = Config::kTiling.d();
};

// Elements that one instruction loads or stores.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
  T values[kCount];
};

// Where a chunk of a group lies in shared memory, in chunks.
template <typename Array>
__device__ __forceinline__ uint32_t place_of(uint32_t chunk) {
  constexpr Stored kStored = Array::kStored;
  // mutant: padding_of_rows_is_forgotten
  if constexpr (kStored.pads_rows) return chunk + chunk / (kStored.columns * kStored.bytes / kChunk);
  // mutant: padding_of_matrices_is_forgotten
  if constexpr (kStored.pads_matrices) return chunk + chunk / (kStored.matrix_bytes() / kChunk);
  return chunk;
}

// Begins to copy the matrices from `first` on to shared memory.
template <typename Array>
__device__ __forceinline__ void load(uint8_t* to, const void* array, int64_t first, int32_t count) {
  const auto destination = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const uint8_t* from = static_cast<const uint8_t*>(array) + first * Array::kStored.matrix_bytes();
  const int32_t num_bytes = count * Array::kStored.matrix_bytes();
#pragma unroll 4
  for (int32_t at = threadIdx.x * kChunk; at < num_bytes; at += kThreads * kChunk) {
    const uint32_t place = place_of<Array>(static_cast<uint32_t>(at) / kChunk);
    ptx::cp_async_zfill_16(destination + place * kChunk, from + at, min(num_bytes - at, kChunk));
  }
}

// Writes the matrices of D from `first` on; the last elements of the last group may be no whole chunk.
template <typename Config>
__device__ __forceinline__ void store(void* array, const uint8_t* from, int64_t first, int32_t count) {
  using D = OfD<Config>;
  using Out = typename Config::Out;
  uint8_t* to = static_cast<uint8_t*>(array) + first * D::kStored.matrix_bytes();
  // mutant: one_matrix_more_is_stored, last_bytes_are_a_chunk
  const int32_t num_bytes = count * D::kStored.matrix_bytes(), whole_bytes = num_bytes / kChunk * kChunk;
#pragma unroll 4
  for (int32_t at = threadIdx.x * kChunk; at < whole_bytes; at += kThreads * kChunk) {
    const uint8_t* chunk = from + place_of<D>(static_cast<uint32_t>(at) / kChunk) * kChunk;
    const uint4 x = *reinterpret_cast<const uint4*>(chunk);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    ptx::st_global_v4_u32(to + at, words);
  }
  const auto at = static_cast<int32_t>(threadIdx.x * sizeof(Out));
  if (at >= num_bytes - whole_bytes) return;  // mutant: last_bytes_are_not_stored
  const uint8_t* chunk = from + place_of<D>(static_cast<uint32_t>(whole_bytes) / kChunk) * kChunk;
  *reinterpret_cast<Out*>(to + whole_bytes + at) = *reinterpret_cast<const Out*>(chunk + at);
}

// What a thread multiplies of one matrix of an operand. Where threads do not divide the side, the last vector of some
// is another thread's; it is multiplied, but not stored.
template <typename Config, typename Operand>
class Fragment {
 public:
  using In = typename Config::In;
  using Acc = typename Config::Acc;
  static constexpr Side kSide = Operand::kSide;
  static constexpr int kStride = Operand::kStored.row_stride();
  static constexpr int kAcross = Operand::kAlongK ? kStride : 1;  // between neighbors along M or N
  static constexpr int kVectors = kSide.vectors_per_thread(), kStep = Config::kTiling.k_step();

  Acc values[kSide.per_thread()][kStep];

  __device__ __forceinline__ Fragment(const In* matrix, int thread) {
    constexpr int kVectorStride = kSide.vector * kAcross;
    first_ = matrix + thread * kVectorStride;
    last_ = first_ + (kVectors - 1) * kSide.threads * kVectorStride;
    if constexpr (!kSide.is_even()) {
      // mutant: last_vector_is_anothers
      last_ = matrix + min((kVectors - 1) * kSide.threads + thread, kSide.vectors() - 1) * kVectorStride;
    }
  }

  // The step that begins at k.
  __device__ __forceinline__ void load(int k) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const In* from = i == kVectors - 1 ? last_ : first_ + i * kSide.threads * kSide.vector * kAcross;
      if constexpr (Operand::kAlongK) {
        constexpr int kCount = Config::kTiling.k_vector();
#pragma unroll
        for (int j = 0; j < kSide.vector; ++j) {
#pragma unroll
          for (int step = 0; step < kStep; step += kCount) {
            const auto x = *reinterpret_cast<const Vector<In, kCount>*>(from + j * kStride + k + step);
#pragma unroll
            for (int l = 0; l < kCount; ++l) values[i * kSide.vector + j][step + l] = convert<Acc>(x.values[l]);
          }
        }
      } else {
#pragma unroll
        for (int step = 0; step < kStep; ++step) {
          const auto x = *reinterpret_cast<const Vector<In, kSide.vector>*>(from + (k + step) * kStride);
#pragma unroll
          for (int j = 0; j < kSide.vector; ++j) values[i * kSide.vector + j][step] = convert<Acc>(x.values[j]);
        }
      }
    }
  }

 private:
  const In* first_;
  const In* last_;
};

// One thread's tile of D, from shared memory to shared memory.
template <typename Config>
__device__ __forceinline__ void multiply_tile(const typename Config::In* a, const typename Config::In* b,
                                              typename Config::Out* d, int m_thread, int n_thread) {
  using Out = typename Config::Out;
  constexpr Tiling kTiling = Config::kTiling;
  constexpr Side kMSide = kTiling.m_side(), kNSide = kTiling.n_side();
  Fragment<Config, OfA<Config>> rows(a, m_thread);
  Fragment<Config, OfB<Config>> columns(b, n_thread);
  typename Config::Acc acc[kMSide.per_thread()][kNSide.per_thread()] = {};
#pragma unroll
  for (int k = 0; k < kTiling.k; k += kTiling.k_step()) {
    rows.load(k);
    columns.load(k);
#pragma unroll
    for (int step = 0; step < kTiling.k_step(); ++step) {
#pragma unroll
      for (int i = 0; i < kMSide.per_thread(); ++i) {
#pragma unroll
        for (int j = 0; j < kNSide.per_thread(); ++j) {
          tile::multiply_add(acc[i][j], rows.values[i][step], columns.values[j][step]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kMSide.per_thread(); ++i) {
    const int m_vector = i / kMSide.vector * kMSide.threads + m_thread;
    if (!kMSide.is_even() && m_vector >= kMSide.vectors()) continue;  // mutant: rows_of_the_next_matrix
    Out* const row = d + (m_vector * kMSide.vector + i % kMSide.vector) * kTiling.d().row_stride();
#pragma unroll
    for (int j = 0; j < kNSide.vectors_per_thread(); ++j) {
      const int n_vector = j * kNSide.threads + n_thread;
      if (!kNSide.is_even() && n_vector >= kNSide.vectors()) continue;  // mutant: columns_of_the_next_row
      Vector<Out, kNSide.vector> x;
#pragma unroll
      for (int l = 0; l < kNSide.vector; ++l) x.values[l] = convert<Out>(acc[i][j * kNSide.vector + l]);
      *reinterpret_cast<Vector<Out, kNSide.vector>*>(row + n_vector * kNSide.vector) = x;
    }
  }
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, Config::kTiling.blocks) kernel(const __grid_constant__ Params params) {
  using In = typename Config::In;
  using Out = typename Config::Out;
  constexpr Tiling kTiling = Config::kTiling;
  constexpr int kA = kTiling.a().matrix_stride(), kB = kTiling.b().matrix_stride(), kD = kTiling.d().matrix_stride();
  extern __shared__ __align__(16) uint8_t shared_memory[];
  uint8_t* const result = shared_memory + kTiling.d_offset();

  const auto matrices_of = [&](int32_t group) { return min(params.matrices, params.batch - group * params.matrices); };
  // A copy of nothing where there are no more groups.
  const auto fill = [&](int stage, int32_t group) {
    if (group < params.num_groups) {
      uint8_t* const to = shared_memory + stage * kTiling.stage_bytes();
      const int64_t first = static_cast<int64_t>(group) * params.matrices;
      load<OfA<Config>>(to, params.a, first, matrices_of(group));
      load<OfB<Config>>(to + kTiling.b_offset(), params.b, first, matrices_of(group));
    }
    ptx::cp_async_commit_group();
  };

  const auto num_blocks = static_cast<int32_t>(gridDim.x);
  auto group = static_cast<int32_t>(blockIdx.x);
  for (int stage = 0; stage < kStages; ++stage) fill(stage, group + stage * num_blocks);
  // mutant: stage_of_the_group_before
  for (int stage = 0; group < params.num_groups; group += num_blocks, stage = (stage + 1) % kStages) {
    const int32_t count = matrices_of(group);
    const auto* const a = reinterpret_cast<const In*>(shared_memory + stage * kTiling.stage_bytes());
    const auto* const b =
        reinterpret_cast<const In*>(shared_memory + stage * kTiling.stage_bytes() + kTiling.b_offset());
    ptx::cp_async_wait_group<kStages - 1>();  // mutant: group_is_not_waited_for
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kTiling.matrices * kTiling.tiles(); i += kThreads) {
      const int others = i / kTiling.lanes, tile = others % kTiling.tiles();
      const int matrix = others / kTiling.tiles() * kTiling.lanes + i % kTiling.lanes;
      if (matrix >= count) continue;
      multiply_tile<Config>(a + matrix * kA, b + matrix * kB, reinterpret_cast<Out*>(result) + matrix * kD,
                            tile / kTiling.n_threads, tile % kTiling.n_threads);
    }
    __syncthreads();  // mutant: result_is_read_early
    fill(stage, group + kStages * num_blocks);
    store<Config>(params.d, result, static_cast<int64_t>(group) * params.matrices, count);
  }
}

}  // namespace tcgemm::batched
