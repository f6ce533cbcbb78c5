// A generated function of grouped products of form rows, in the registers of the swapped product: its elements are
// those of the tile's tokens, which end with their group.
#pragma once

#include <cstdint>

#include "epilogue/function_prefetch.cuh"
#include "epilogue/function_reads.cuh"
#include "kernels/wgmma/function_store.cuh"
#include "kernels/wgmma/ragged_store.cuh"
#include "ptx/special_registers.cuh"
#include "tile/work_ring.cuh"

namespace tcgemm::wgmma_family {

// What a function gives of rows of no group in 64 columns: zeros, by a warpgroup. kStoresRows: D leaves it with the
// accumulators.
template <bool kStoresRows>
struct ZeroRows {
  const epilogue::FunctionParams& params;
  const int32_t entry, begin, end, column;
  const int thread_idx;

  template <int i, typename T>
  __device__ __forceinline__ void store() const {
    if constexpr (i == 0 && kStoresRows) return;
    using Bits = elementwise::Bits<T>;
    Bits* const matrix = static_cast<Bits*>(params.results[i]) + int64_t{entry} * params.m * params.n;
    const int32_t n = column + thread_idx % 64;
    if (n >= params.n) return;
    // mutant: zeros_in_a_row_of_the_next_group, zeros_in_every_other_row
    for (int32_t m = begin + thread_idx / 64; m < end; m += 2) matrix[int64_t{m} * params.n + n] = Bits{0};
  }
};

// Epilogue function of a consumer warpgroup's tile; empty if the kernel has none. Constructed before the accumulators
// are complete.
template <typename T, typename Epilogue>
struct FunctionOfTokens {
  __device__ __forceinline__ FunctionOfTokens(const Epilogue&, int32_t, int32_t, const RaggedWork&) {}
};

template <typename T, typename F>
class FunctionOfTokens<T, Function<F>> {
  using Config = typename T::Config;
  static constexpr int kBlocksM = T::kBlocksM, kAccs = F::kIsGated ? Config::kTileN : Config::kTileN / 2;
  // Of more than one tile each is made when it is due.
  static constexpr bool kHasOne = F::kIsGated || kBlocksM == 1;
  using Tile = WarpgroupFunction<F, true, 1, kAccs>;

 public:
  // (column, work): where D's part begins. Rows of no group are given nothing.
  // mutant: operands_of_the_first_group
  __device__ __forceinline__ FunctionOfTokens(const Function<F>& epilogue, int32_t entry, int32_t column,
                                              const RaggedWork& work)
      : params_(epilogue.values),
        place_(entry, max(work.tokens.group, 0), work.tokens.group < 0 ? work.n_idx : work.tokens.token_end),
        first_(params_, column, work.n_idx, kHasOne ? place_ : epilogue::MatrixIndex(entry, 0, work.n_idx)) {}

  // All of a warpgroup's accumulators, the first of which is that of D's column `column`. Those of a gated product's
  // second matrix follow the others, which become what is stored by rows.
  __device__ __forceinline__ void store(float (&acc)[kBlocksM][Config::kTileN / 2], const Params<Function<F>>& params,
                                        uint32_t buffers, int& buffer_idx, int32_t column, const RaggedWork& work,
                                        uint32_t barrier_id) {
    static_assert(Config::kSwapped && (!F::kIsGated || kBlocksM == 2), "a block of 64 columns of each matrix");
    const auto store_block = [&](int32_t begin) {
      if (work.tokens.group < 0) {
        ZeroRows<F::kStoresRows> zeros{params_, place_.idx,        work.tokens.token_begin, work.tokens.token_end,
                                       begin,   ptx::tid_x() % 128};
        F::store(zeros);  // mutant: no_zeros
      } else {
        epilogue::NoMatrices no_boxes;
        auto& accs = reinterpret_cast<float (&)[1][kAccs]>(acc);
        if constexpr (kHasOne) {
          first_.apply(accs, no_boxes);
        } else {
          Tile(params_, begin, work.n_idx, place_).apply(accs, no_boxes);
        }
      }
      if constexpr (F::kStoresRows) {
        store_tokens<Config>(acc[0], params, buffers, buffer_idx, begin, work, barrier_id);
      }
    };
    if constexpr (F::kIsGated) {
      store_block(column);
    } else {
      for_blocks_of_columns(acc, column, store_block);
    }
  }

 private:
  const epilogue::FunctionParams& params_;
  const epilogue::MatrixIndex place_;
  Tile first_;
};

// Brings what the function reads of a warpgroup's part of the tile to L2 while the product is being multiplied.
template <typename F>
__device__ __forceinline__ void prefetch_function_of_tokens(const epilogue::FunctionParams& params, int32_t entry,
                                                            int32_t column, int32_t columns, const RaggedWork& work) {
  if (work.tokens.group < 0) return;
  const epilogue::MatrixIndex place(entry, work.tokens.group, work.tokens.token_end);
  epilogue::FunctionPrefetch<F>{
      params, place, work.n_idx, column, work.num_tokens(), columns, static_cast<int>(ptx::tid_x() % 128), 128}
      .run();
}

}  // namespace tcgemm::wgmma_family
