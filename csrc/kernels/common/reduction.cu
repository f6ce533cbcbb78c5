// Reductions over one mode of a packed array (outer, reduced, inner).
//
//   inner == 1   rows_kernel: a warp for each row, or a block for each where rows are long
//   inner > 1    columns_kernel: lanes side by side on the contiguous inner mode, the others of the
//                block below them, and their partial results added through shared memory
//
// Where outer * inner is too small to fill the device, the reduced mode is split: each part is reduced
// into the workspace, in float32 (float64 for float64), and the parts by a second launch. 256 threads a
// block; 16-byte loads where every row is aligned to them. Nothing is atomic.
#include <algorithm>
#include <limits>

#include "core/extent.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/reduction.h"
#include "tile/numeric.cuh"
#include "tile/reduction.cuh"

namespace tcgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // loads in flight for each thread

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

// One launch: `splits` parts of `part` reduced indices each; out is (outer, splits, inner).
struct Pass {
  ReduceOp op;
  int64_t outer, reduced, inner;
  int64_t splits, part;
  FloatType out;  // unless the operand is float64: then so is the result
  int64_t tiles;  // rows_kernel: warps a row; columns_kernel: blocks side by side
  int lanes;      // columns_kernel: threads side by side, a power of two
};

template <typename In, int kCount>
struct alignas(kCount * sizeof(In)) Pack {
  In values[kCount];
};

template <typename In, typename Acc, int kCount>
__device__ __forceinline__ void accumulate(Acc (&acc)[kCount], const Pack<In, kCount>& pack, const Reducer<Acc>& op) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = op(acc[i], convert<Acc>(pack.values[i]));
}

__device__ __forceinline__ void store(void* out, int64_t index, double value, FloatType) {
  static_cast<double*>(out)[index] = value;
}
__device__ __forceinline__ void store(void* out, int64_t index, float value, FloatType type) {
  switch (type) {
    case FloatType::kF16: static_cast<__half*>(out)[index] = convert<__half>(value); break;
    case FloatType::kBF16: static_cast<__nv_bfloat16*>(out)[index] = convert<__nv_bfloat16>(value); break;
    case FloatType::kF32: static_cast<float*>(out)[index] = value; break;
  }
}

// Adds every `step`th of the packs [first, last), which lie `stride` packs apart, to `acc`.
template <typename In, typename Acc, int kCount>
__device__ __forceinline__ void accumulate_strided(Acc (&acc)[kCount], const Pack<In, kCount>* in, int64_t first,
                                                   int64_t last, int64_t step, int64_t stride, const Reducer<Acc>& op) {
  int64_t i = first;
  for (; i + (kUnroll - 1) * step < last; i += kUnroll * step) {
    Pack<In, kCount> packs[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) packs[u] = in[(i + u * step) * stride];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) accumulate<In>(acc, packs[u], op);
  }
  for (; i < last; i += step) accumulate<In>(acc, in[i * stride], op);
}

template <typename In, int kCount>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const In* __restrict__ in, void* __restrict__ out, const __grid_constant__ Pass pass,
                typename Accumulator<In>::type infinity) {
  using Acc = typename Accumulator<In>::type;
  __shared__ Acc partials[kThreads / 32];
  const Reducer<Acc> op{pass.op};
  const int threads_a_row = static_cast<int>(pass.tiles) * 32;
  const int64_t index = int64_t{blockIdx.x} * (kThreads / threads_a_row) + threadIdx.x / threads_a_row;
  // Whole warps fall out, and no thread of a block that reduces together.
  if (index >= pass.outer * pass.splits) return;
  const int64_t row = index / pass.splits, split = index % pass.splits;
  const int64_t first = split * pass.part;
  const int64_t last = min(first + pass.part, pass.reduced);
  Acc acc[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = op.identity(infinity);
  const auto* packs = reinterpret_cast<const Pack<In, kCount>*>(in + row * pass.reduced + first);
  accumulate_strided<In>(acc, packs, threadIdx.x % threads_a_row, (last - first) / kCount, threads_a_row, 1, op);
  Acc total = acc[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) total = op(total, acc[i]);
  total =
      threads_a_row == 32 ? warp_reduce(total, op) : block_reduce<kThreads>(total, op.identity(infinity), op, partials);
  if (threadIdx.x % threads_a_row == 0) store(out, index, total, pass.out);
}

template <typename In, int kCount>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const In* __restrict__ in, void* __restrict__ out, const __grid_constant__ Pass pass,
                   typename Accumulator<In>::type infinity) {
  using Acc = typename Accumulator<In>::type;
  __shared__ Acc partials[kThreads][kCount];
  const Reducer<Acc> op{pass.op};
  int64_t index = blockIdx.x;
  const int64_t tile_idx = index % pass.tiles;
  index /= pass.tiles;
  const int64_t outer_idx = index / pass.splits, split = index % pass.splits;
  const int column_idx = static_cast<int>(threadIdx.x) % pass.lanes;
  const int row_idx = static_cast<int>(threadIdx.x) / pass.lanes, rows = kThreads / pass.lanes;
  const int64_t column = (tile_idx * pass.lanes + column_idx) * kCount;
  const bool inside = column < pass.inner;
  Acc acc[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = op.identity(infinity);
  if (inside) {
    const int64_t first = split * pass.part;
    const int64_t last = min(first + pass.part, pass.reduced);
    const auto* packs =
        reinterpret_cast<const Pack<In, kCount>*>(in + (outer_idx * pass.reduced + first) * pass.inner + column);
    accumulate_strided<In>(acc, packs, row_idx, last - first, rows, pass.inner / kCount, op);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) partials[threadIdx.x][i] = acc[i];
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row_idx < half) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        acc[i] = op(acc[i], partials[threadIdx.x + half * pass.lanes][i]);
        partials[threadIdx.x][i] = acc[i];
      }
    }
  }
  if (inside && row_idx == 0) {
    const int64_t target = (outer_idx * pass.splits + split) * pass.inner + column;
#pragma unroll
    for (int i = 0; i < kCount; ++i) store(out, target + i, acc[i], pass.out);
  }
}

bool parse_op(std::string_view name, ReduceOp* op) {
  if (name == "add")
    *op = ReduceOp::kAdd;
  else if (name == "max")
    *op = ReduceOp::kMax;
  else if (name == "min")
    *op = ReduceOp::kMin;
  else
    return false;
  return true;
}

// The widest load that every row of the array allows, in elements.
int vector_elements(const void* in, int64_t row_elements, int64_t element_bytes) {
  const bool aligned = reinterpret_cast<uintptr_t>(in) % 16 == 0 && row_elements * element_bytes % 16 == 0;
  return aligned ? static_cast<int>(16 / element_bytes) : 1;
}

// Parts of the reduced mode, so that about four blocks run on each SM, each with work for all of its
// threads; a multiple of 128 elements each, which keeps loads aligned.
int64_t num_splits(const Reduction& r, int num_sms) {
  const int64_t wanted = int64_t{4} * num_sms;
  const bool is_rows = r.inner == 1;
  const int64_t blocks = is_rows ? r.outer : r.outer * ceil_div(r.inner * dtype_bytes(r.in), 512);
  if (blocks * 2 > wanted) return 1;
  const int64_t least = is_rows ? 32768 / dtype_bytes(r.in) : 64;  // reduced indices in a part
  return std::clamp<int64_t>(std::min(wanted / blocks, r.reduced / least), 1, 1024);
}

DType accumulator_dtype(DType in) { return in == DType::kF64 ? DType::kF64 : DType::kF32; }

template <typename In>
Status launch_pass(Pass pass, const void* in, void* out, cudaStream_t stream) {
  using Acc = typename Accumulator<In>::type;
  const Acc infinity = std::numeric_limits<Acc>::infinity();
  const auto* typed = static_cast<const In*>(in);
  if (pass.inner == 1) {
    constexpr int64_t kLongRowBytes = 8192;
    const bool is_long = pass.part * static_cast<int64_t>(sizeof(In)) >= kLongRowBytes;
    pass.tiles = is_long ? kThreads / 32 : 1;
    const int64_t rows_a_block = is_long ? 1 : kThreads / 32;
    const int64_t blocks = ceil_div(pass.outer * pass.splits, rows_a_block);
    const bool is_vector = vector_elements(in, pass.reduced, sizeof(In)) > 1;
    const auto kernel = is_vector ? &rows_kernel<In, 16 / sizeof(In)> : &rows_kernel<In, 1>;
    return launch_blocks("row reduction kernel", kernel, blocks, kThreads, 0, stream, typed, out, pass, infinity);
  }
  const int count = vector_elements(in, pass.inner, sizeof(In));
  const int64_t columns = ceil_div(pass.inner, count);
  pass.lanes = 1;
  while (pass.lanes < 32 && pass.lanes < columns) pass.lanes *= 2;
  pass.tiles = ceil_div(columns, pass.lanes);
  const int64_t blocks = pass.outer * pass.splits * pass.tiles;
  const auto kernel = count > 1 ? &columns_kernel<In, 16 / sizeof(In)> : &columns_kernel<In, 1>;
  return launch_blocks("column reduction kernel", kernel, blocks, kThreads, 0, stream, typed, out, pass, infinity);
}

Status launch_pass(DType in_type, const Pass& pass, const void* in, void* out, cudaStream_t stream) {
  switch (in_type) {
    case DType::kF16: return launch_pass<__half>(pass, in, out, stream);
    case DType::kBF16: return launch_pass<__nv_bfloat16>(pass, in, out, stream);
    case DType::kF32: return launch_pass<float>(pass, in, out, stream);
    default: return launch_pass<double>(pass, in, out, stream);
  }
}

}  // namespace

std::string reject_reduction(const Reduction& r) {
  if (r.in != DType::kF16 && r.in != DType::kBF16 && r.in != DType::kF32 && r.in != DType::kF64) {
    return std::string("the operand must be f16, bf16, f32 or f64, got ") + name_of(r.in);
  }
  if (r.out != r.in && r.out != accumulator_dtype(r.in)) {
    return std::string("the result must have the operand's dtype or ") + name_of(accumulator_dtype(r.in)) + ", got " +
           name_of(r.out);
  }
  ReduceOp op;
  if (!parse_op(r.op, &op)) return "op must be add, max or min, got " + std::string(r.op);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (r.outer < 1 || r.reduced < 1 || r.inner < 1) return "every extent must be at least 1";
  if (r.outer > kMax || r.reduced > kMax || r.inner > kMax) return "every folded extent must be at most 2^31 - 1";
  int64_t count;
  if (__builtin_mul_overflow(r.outer * r.inner, r.reduced, &count)) return "the operand must have under 2^63 elements";
  if (r.outer > kMax / ceil_div(r.inner, 32)) return "the grid must have at most 2^31 - 1 blocks";
  return "";
}

int64_t reduction_workspace_bytes(const Reduction& r, int num_sms) {
  const int64_t splits = num_splits(r, num_sms);
  return splits > 1 ? splits * r.outer * r.inner * dtype_bytes(accumulator_dtype(r.in)) : 0;
}

Status launch_reduction(const Reduction& r, int num_sms, const void* in, void* out, void* workspace,
                        void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  Pass pass{};
  parse_op(r.op, &pass.op);
  pass.outer = r.outer;
  pass.reduced = r.reduced;
  pass.inner = r.inner;
  const int64_t splits = num_splits(r, num_sms);
  pass.part = splits == 1 ? r.reduced : ceil_div(ceil_div(r.reduced, splits), 128) * 128;
  pass.splits = ceil_div(r.reduced, pass.part);
  pass.out = r.out == DType::kF16 ? FloatType::kF16 : r.out == DType::kBF16 ? FloatType::kBF16 : FloatType::kF32;
  if (pass.splits == 1) return launch_pass(r.in, pass, in, out, stream);

  Pass first = pass;
  first.out = FloatType::kF32;
  if (Status s = launch_pass(r.in, first, in, workspace, stream); !s.is_ok()) return s;
  // The parts are rows of an array (outer, splits, inner), and small.
  Pass second = pass;
  second.reduced = second.part = pass.splits;
  second.splits = 1;
  return launch_pass(accumulator_dtype(r.in), second, workspace, out, stream);
}

}  // namespace tcgemm
