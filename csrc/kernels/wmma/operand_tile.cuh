// Moves strips of an operand from global memory into the stages of a shared-memory pipeline.
//
// A strip is kStrip rows of A (or columns of B), walked along K in steps of kTileK. In shared
// memory it lies either along K (row r of the strip contiguous in k) or across (row k contiguous
// in the strip's index); "outer" is the index it does not lie along. Rows are padded, so that the
// accesses of a fragment load fall into different banks:
//   16- and 8-bit elements: 16 bytes; ldmatrix reads eight rows of 16 bytes each;
//   TF32, float64: lanes read elements (lane / 4, lane % 4) one by one; four elements along K
//   (or float64 across) put them 4 apart, TF32 across needs them 8 apart.
#pragma once

#include <cstdint>

#include "kernels/wmma/shared_layout.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace tcgemm::wmma {

// One block's reader of one operand. kAnyLayout: the layout in global memory is data and may
// differ from the tile's; then elements are gathered one by one.
template <typename Tile, int kThreads, bool kAnyLayout>
class OperandLoader {
  using T = typename Tile::T;
  static constexpr int kVector = Tile::kVector;
  static constexpr int kPasses = Tile::kChunks / kThreads;
  static constexpr int kOuterPerPass = kThreads / Tile::kChunksAcross;
  static_assert(kPasses * kThreads == Tile::kChunks, "every thread must move as many chunks");
  static_assert(kOuterPerPass * Tile::kChunksAcross == kThreads, "a thread's chunks must differ in one index only");

 public:
  // `along_k`: whether K is the contiguous index in global memory. The strip starts at `first`
  // of `extent` rows (columns).
  // mutant: one_layout_for_all
  __device__ __forceinline__ OperandLoader(const T* matrix, int64_t ld, bool along_k, bool aligned, int64_t first,
                                           int32_t extent, int32_t k)
      : ld_(ld), gathers_(kAnyLayout && along_k != Tile::kAlongK), aligned_(aligned) {
    const int32_t strip_left = static_cast<int32_t>(extent - first);
    outer_left_ = Tile::kAlongK ? strip_left : k;
    inner_left_ = Tile::kAlongK ? k : strip_left;
    source_ = matrix + (along_k ? first * ld : first);
  }

  // Starts copying the next step of K into `shared`, zeros outside the matrix. Copies are
  // complete after the cp.async group they are part of and a block barrier.
  __device__ __forceinline__ void load(T* shared) {
    const int outer = threadIdx.x / Tile::kChunksAcross;
    const int inner = threadIdx.x % Tile::kChunksAcross * kVector;
    if (gathers_) {
      gather(shared);
    } else if (aligned_) {
      const T* source = source_ + outer * ld_ + inner;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = outer + i * kOuterPerPass;
        const int valid = row < outer_left_ ? min(max(inner_left_ - inner, 0), kVector) : 0;
        ptx::cp_async_zfill_16(ptx::shared_address(shared + row * Tile::kLd + inner), valid > 0 ? source : source_,
                               valid * sizeof(T));
        source += kOuterPerPass * ld_;
      }
    } else {
      const T* source = source_ + outer * ld_ + inner;
#pragma unroll 2
      for (int i = 0; i < kPasses; ++i) {
        const int row = outer + i * kOuterPerPass;
        const int valid = row < outer_left_ ? inner_left_ - inner : 0;
        put(shared + row * Tile::kLd + inner, source, 1, valid);
        source += kOuterPerPass * ld_;
      }
    }
    const bool advances_by_ld = Tile::kAlongK == gathers_;
    source_ += advances_by_ld ? Tile::kStepAlongK * ld_ : Tile::kStepAlongK;
    (Tile::kAlongK ? inner_left_ : outer_left_) -= Tile::kStepAlongK;
  }

 private:
  struct alignas(16) Pack {
    T values[kVector];
  };

  // Neighboring lanes take neighboring outer indices, which are contiguous in global memory.
  __device__ __forceinline__ void gather(T* shared) const {
#pragma unroll 1
    for (int chunk = threadIdx.x; chunk < Tile::kChunks; chunk += kThreads) {
      const int row = chunk % Tile::kOuter, inner = chunk / Tile::kOuter * kVector;
      const int valid = row < outer_left_ ? inner_left_ - inner : 0;
      put(shared + row * Tile::kLd + inner, source_ + row + inner * ld_, ld_, valid);
    }
  }

  __device__ __forceinline__ static void put(T* shared, const T* source, int64_t stride, int valid) {
    Pack pack;
#pragma unroll
    for (int j = 0; j < kVector; ++j) pack.values[j] = j < valid ? source[j * stride] : T(0.0f);
    *reinterpret_cast<Pack*>(shared) = pack;
  }

  const T* source_;  // element (0, 0) of the next step
  int64_t ld_;
  int32_t outer_left_, inner_left_;  // extents from the next step on
  bool gathers_, aligned_;
};

}  // namespace tcgemm::wmma
