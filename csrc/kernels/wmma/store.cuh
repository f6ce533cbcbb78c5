// From fragments to what becomes of them: a warp's accumulators pass through shared memory, for where a fragment has
// which of them is WMMA's own affair.
#pragma once

#include <cstdint>
#include <type_traits>

#include "epilogue/function.cuh"
#include "epilogue/function_reads.cuh"
#include "kernels/wmma/shared_layout.cuh"
#include "tile/numeric.cuh"

namespace tcgemm::wmma {

template <typename Outputs>
inline constexpr bool kIsFunction = false;
template <typename Code>
inline constexpr bool kIsFunction<epilogue::Function<Code>> = true;

// By the outputs of epilogue/output.cuh.
template <typename Config, typename Acc, typename Outputs>
__device__ __forceinline__ void store_rows(const StagedRows<Config, Acc>& rows, const Outputs& outputs) {
  // float16 accumulators leave through a float32 epilogue: alpha and beta need not be float16.
  using EpilogueAcc = std::conditional_t<std::is_same_v<Acc, __half>, float, Acc>;
  constexpr int kVector = 16 / sizeof(Acc);
  constexpr int kChunksAcross = Config::kWarpN / kVector;
  static_assert(Config::kMmaM * kChunksAcross % 32 == 0, "every lane must store as many chunks");
  struct alignas(16) Pack {
    Acc values[kVector];
  };
  outputs.visit([&](const auto& output) {
#pragma unroll 2
    for (int chunk = threadIdx.x % 32; chunk < Config::kMmaM * kChunksAcross; chunk += 32) {
      const int row = chunk / kChunksAcross, column = chunk % kChunksAcross * kVector;
      const int64_t m_idx = rows.m_idx + row, n_idx = rows.n_idx + column;
      if (m_idx >= rows.m || n_idx >= rows.n) continue;
      const Pack pack = *reinterpret_cast<const Pack*>(rows.data + row * rows.kLd + column);
      EpilogueAcc values[kVector];
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[v] = convert<EpilogueAcc>(pack.values[v]);
      output.store(values, rows.batch_idx, m_idx, n_idx);
    }
  });
}

// By a function, which takes eight rows and 32 columns at a time.
template <typename Config, typename Acc, typename Code>
__device__ __forceinline__ void store_rows(const StagedRows<Config, Acc>& rows,
                                           const epilogue::Function<Code>& function) {
  constexpr int kGroups = 4;
  static_assert(Config::kMmaM % 8 == 0 && Config::kWarpN % (8 * kGroups) == 0, "parts cover the rows");
  using Pair = epilogue::PackOf<Acc, 2>;
  const int lane = threadIdx.x % 32;
  const epilogue::MatrixIndex batch(function, static_cast<int32_t>(rows.batch_idx));
#pragma unroll 1
  for (int row = 0; row < Config::kMmaM; row += 8) {
#pragma unroll 1
    for (int column = 0; column < Config::kWarpN; column += 8 * kGroups) {
      const int64_t m_idx = rows.m_idx + row, n_idx = rows.n_idx + column;
      if (m_idx >= rows.m || n_idx >= rows.n) continue;
      // mutant: the_first_eight_rows, padding_that_is_not_there, the_first_columns
      const Acc* own = rows.data + (row + lane / 4) * rows.kLd + column + lane % 4 * 2;
      epilogue::run_on_eight_rows<Code, kGroups>(function, batch, static_cast<int32_t>(m_idx),
                                                 static_cast<int32_t>(n_idx), [&](auto, auto& acc) {
#pragma unroll
                                                   for (int group = 0; group < kGroups; ++group) {
                                                     // mutant: the_first_group
                                                     const Pair pair = *reinterpret_cast<const Pair*>(own + 8 * group);
#pragma unroll
                                                     // mutant: half_of_what_is_staged
                                                     for (int e = 0; e < 2; ++e)
                                                       acc[0][2 * group + e] = convert<typename Code::Sum>(pair.x[e]);
                                                   }
                                                 });
    }
  }
}

}  // namespace tcgemm::wmma
