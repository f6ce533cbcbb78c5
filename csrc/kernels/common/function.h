// The arguments of epilogue/function.cuh from a problem.
#pragma once

#include <algorithm>
#include <vector>

#include "core/problem.h"
#include "core/ragged_problem.h"
#include "epilogue/function_params.h"
#include "kernels/common/alignment.h"

namespace tcgemm {

static_assert(Function::kMostReads == epilogue::FunctionParams::kMostReads &&
                  Function::kMostResults == epilogue::FunctionParams::kMostResults &&
                  Function::kMostIndices == epilogue::FunctionParams::kMostIndices,
              "what is checked fits");

inline bool is_matrix(const Function::Read& x) { return x.n != 0 && (x.m_outer != 0 || x.m_inner != 0); }

// A read that TMA may bring, and how far its rows are apart; 0 where not all are as far.
struct BoxedRead {
  int64_t number, row_stride;
};
// Those that kernels are compiled to read so.
inline std::vector<BoxedRead> boxed_reads(const Function& f, int64_t m) {
  std::vector<BoxedRead> found;
  for (int64_t i = 0; i < f.num_reads() && found.size() < epilogue::FunctionParams::kMostBoxed; ++i) {
    const Function::Read x = f.read(i);
    if (!is_matrix(x) || (x.bytes != 2 && x.bytes != 4)) continue;
    const bool is_even = x.period >= m || x.m_outer == x.period * x.m_inner;
    found.push_back({i, x.period == 1 ? x.m_outer : is_even ? x.m_inner : 0});
  }
  return found;
}

// The arguments of a function of any m x n product. `batch_inner`: extent of the inner batch level.
template <typename Buffers>
epilogue::FunctionParams make_function(const Function& f, int64_t m, int64_t n, const Buffers& buffers,
                                       int64_t batch_inner) {
  epilogue::FunctionParams params{};
  params.m = static_cast<int32_t>(m);
  params.n = static_cast<int32_t>(n);
  params.batch_inner = static_cast<int32_t>(batch_inner);
  params.per_batch_inner = Divisor(batch_inner);
  params.in_eights = n % 8 == 0 && is_aligned(buffers.d, 16);
  for (int64_t i = 0; i < f.num_reads(); ++i) {
    const Function::Read x = f.read(i);
    const char* data = static_cast<const char*>(buffers.function_operands[x.operand].data) + x.offset * x.bytes;
    params.reads[i] = {data,      x.batch_outer, x.batch_inner,     x.m_outer,
                       x.m_inner, x.n,           Divisor(x.period), static_cast<int32_t>(x.period)};
    const int64_t strides = x.batch_outer | x.batch_inner | x.m_outer | x.m_inner;
    if (is_matrix(x) && x.bytes < 8) {
      params.in_eights &= x.n == 1 && strides % 8 == 0 && is_aligned(data, std::min<int64_t>(8 * x.bytes, 16));
    } else if (x.n != 0 && x.bytes < 8) {
      params.in_eights &= x.n == 1 && strides % 2 == 0 && is_aligned(data, 2 * x.bytes);
    }
  }
  for (int64_t i = 0; i < f.num_indices(); ++i) {
    const Function::Index x = f.index(i);
    params.indices[i] = {Divisor(x.divisor), Divisor(x.extent), static_cast<int32_t>(x.level),
                         static_cast<int32_t>(x.extent)};
  }
  params.results[0] = buffers.d;
  params.row_lengths[0] = static_cast<int32_t>(f.row_length(0, n));
  auto array = buffers.more_results.begin();
  for (int64_t i = 1; i < f.num_results(); ++i) {
    const Function::Result x = f.result(i);
    params.results[i] = f.is_beside(i) ? static_cast<char*>(params.results[i - 1]) + n * x.bytes : array++->data;
    params.row_lengths[i] = static_cast<int32_t>(f.row_length(i, n));
    if (x.is_reduced()) continue;
    params.in_eights &= is_aligned(params.results[i], std::min<int64_t>(8 * x.bytes, 16));
  }
  params.in_boxes = params.in_eights;
  for (const BoxedRead& x : boxed_reads(f, m)) params.in_boxes &= x.row_stride > 0;
  return params;
}

inline epilogue::FunctionParams make_function(const Problem& p, const Buffers& buffers) {
  return make_function(p.epilogue.function, p.m, p.n, buffers, p.batch_inner);
}

// The inner level is the group.
inline epilogue::FunctionParams make_function(const RaggedProblem& p, const RaggedBuffers& buffers) {
  return make_function(p.epilogue.function, p.m, p.n, buffers, std::max<int64_t>(p.groups, 1));
}

}  // namespace tcgemm
