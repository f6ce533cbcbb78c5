#include "core/ragged_problem.h"

#include <algorithm>

#include "core/extent.h"

namespace tcgemm {

namespace {

constexpr int64_t kMaxElements = int64_t{1} << 59;

int64_t scale_elements(const RaggedProblem& p, const BlockScales& x, int64_t matrices, int64_t rows) {
  return p.is_empty() ? 0 : scale_elements(x, p.batch, matrices, rows, p.k);
}

// Of an operand with an entry for each batch index, or of one that all share.
int64_t entries(const RaggedProblem& p, bool is_batched) { return is_batched ? p.batch : 1; }

}  // namespace

const BufferTable<RaggedProblem, RaggedBuffers>& buffer_table(const RaggedProblem&) {
  using P = const RaggedProblem;
  const auto always = [](P&) -> int64_t { return 1; };
  const auto in = [](P& p) { return p.in; };
  const auto integer = [](P&) { return DType::kS32; };
  const auto f32 = [](P&) { return DType::kF32; };
  const auto is_scaled = [](P& p) -> int64_t { return !p.scales.is_none(); };
  static const BufferTable<RaggedProblem, RaggedBuffers> table{
      {"a", BufferRole::kOperand, always, [](P& p) { return entries(p, p.a_batched) * p.a_elements(); }, in,
       put<&RaggedBuffers::a>},
      {"b", BufferRole::kOperand, always, [](P& p) { return entries(p, p.b_batched) * p.b_elements(); }, in,
       put<&RaggedBuffers::b>},
      {"group_sizes", BufferRole::kOperand, always, [](P& p) { return entries(p, p.sizes_batched) * p.num_sizes; },
       integer, put<&RaggedBuffers::group_sizes>},
      {"group_offset", BufferRole::kOperand, always, [](P& p) { return entries(p, p.sizes_batched); }, integer,
       put<&RaggedBuffers::group_offset>},
      {"a_scales", BufferRole::kOperand, is_scaled, [](P& p) { return scale_elements(p, p.scales.a(), p.groups, p.m); },
       f32, put<&RaggedBuffers::a_scales>},
      {"b_scales", BufferRole::kOperand, is_scaled,
       [](P& p) { return scale_elements(p, p.scales.b(), p.num_b() * p.groups, p.n); }, f32,
       put<&RaggedBuffers::b_scales>},
      {"gather", BufferRole::kOperand, [](P& p) -> int64_t { return p.gathered; },
       [](P& p) { return entries(p, p.sizes_batched) * p.tokens(); }, integer, put<&RaggedBuffers::gather>},
      {"function operand", BufferRole::kOperand, [](P& p) { return p.epilogue.function.num_operands(); }, nullptr,
       nullptr,
       [](P&, RaggedBuffers& buffers, void* x, int64_t bytes) { buffers.function_operands.push_back({x, bytes}); }},
      {"d", BufferRole::kResult, always, [](P& p) { return p.batch * p.d_elements(); }, [](P& p) { return p.out; },
       put<&RaggedBuffers::d>},
      {"function result", BufferRole::kResult, [](P& p) { return p.epilogue.function.num_more_arrays(); }, nullptr,
       nullptr, [](P&, RaggedBuffers& buffers, void* x, int64_t bytes) { buffers.more_results.push_back({x, bytes}); }},
  };
  return table;
}

std::string check_problem(const RaggedProblem& p) {
  if (std::string error = check_extents({{"m", p.m},
                                         {"n", p.n},
                                         {"k", p.k},
                                         {"batch", p.batch},
                                         {"groups", p.groups},
                                         {"a_rows", p.a_rows},
                                         {"num_sizes", p.num_sizes}});
      !error.empty()) {
    return error;
  }
  if (p.groups > p.num_sizes) return must("groups", "be at most num_sizes=" + std::to_string(p.num_sizes), p.groups);
  if (p.b_transposed && !p.is_rows()) return "b_transposed must be false when form is contraction, got true";
  if (std::string error = check_scales(p.scales); !error.empty()) return error;
  if (p.tokens_last && p.is_rows()) return "tokens_last must be false when form is rows, got true";
  if (!p.scales.is_none() && !p.is_rows() && !p.tokens_last) {
    return "scales must be empty when form is contraction and tokens_last is false";
  }
  if (!p.epilogue.is_none()) {
    const Epilogue& e = p.epilogue;
    if (!p.is_rows()) return "epilogue must be empty when form is contraction";
    if (std::string error = check_problem(group_problem(p, p.tokens())); !error.empty()) return error;
    for (int64_t i = 0; i < e.function.num_results(); ++i) {
      if (e.function.result(i).form != Function::Form::kWhole) {
        return "results of a function must be whole in a grouped product";
      }
    }
  }
  // Elements of up to 16 bytes, so that sizes in bytes fit too: those of the gathered rows of A as well.
  const auto fits = [&](int64_t x, int64_t y, int64_t z) {
    return multiply_add(multiply_add(x, y, 0), z, 0) < kMaxElements / std::max<int64_t>(p.batch, 1);
  };
  if (!fits(p.m, p.k, 1) || !fits(p.a_rows, p.a_columns(), 1) ||
      !fits(std::max<int64_t>(p.k, 1), p.b_columns(), p.is_rows() ? p.groups : 1) ||
      !fits(p.m, p.n, p.is_rows() ? 1 : p.groups)) {
    return "a, b and d must have fewer than 2^59 elements";
  }
  return "";
}

std::string check_buffers(const RaggedProblem& p, const RaggedBuffers& buffers) {
  // Rows of no group are given no operand.
  const bool reads = !p.is_empty() && p.groups > 0;
  return check_function_buffers(p.epilogue.function, {p.batch, p.groups, p.m, p.n}, reads, p.batch,
                                buffers.function_operands, buffers.more_results);
}

int64_t max_ragged_tiles(const RaggedProblem& p, int64_t tile_m, int64_t tile_n) {
  const int64_t rows = ceil_div(p.m, tile_m), columns = ceil_div(p.n, tile_n);
  // Each group, and the rows before the first and after the last, may end in a tile that is not full.
  return p.is_rows() ? (rows + p.groups + 2) * columns : p.groups * rows * columns;
}

std::string reject_ragged_tiles(const RaggedProblem& p, int64_t tile_m, int64_t tile_n) {
  constexpr int64_t kMaxTiles = (int64_t{1} << 31) - 1;
  // In floating point, where a product of three extents cannot overflow.
  const double rows = static_cast<double>((p.m + tile_m - 1) / tile_m), groups = static_cast<double>(p.groups);
  const double columns = static_cast<double>((p.n + tile_n - 1) / tile_n);
  if ((p.is_rows() ? (rows + groups + 2) * columns : groups * rows * columns) <= kMaxTiles) return "";
  return "the output must be at most 2^31 - 1 tiles of " + std::to_string(tile_m) + "x" + std::to_string(tile_n);
}

Problem group_problem(const RaggedProblem& p, int64_t rows) {
  Problem group{};
  group.batch = group.batch_inner = 1;
  group.m = p.is_rows() ? rows : p.m;
  group.n = p.n;
  group.k = p.is_rows() ? p.k : rows;
  group.a = {p.in, !p.is_rows(), p.a_columns(), 0, 0};
  group.b = {p.in, p.b_transposed, p.b_transposed ? p.k : p.b_columns(), 0, 0};
  group.out = p.out;
  group.compute = p.compute;
  group.epilogue = p.epilogue;
  if (p.epilogue.gated) group.epilogue.up_offset = p.up_offset();
  return group;
}

RaggedBuffers batch_entry(const RaggedProblem& p, const RaggedBuffers& buffers, int64_t batch_idx) {
  RaggedBuffers entry = buffers;
  const int64_t in_bytes = dtype_bytes(p.in);
  if (p.a_batched) entry.a = static_cast<const char*>(buffers.a) + batch_idx * p.a_elements() * in_bytes;
  if (p.b_batched) entry.b = static_cast<const char*>(buffers.b) + batch_idx * p.b_elements() * in_bytes;
  if (p.sizes_batched) {
    entry.group_sizes = buffers.group_sizes + batch_idx * p.num_sizes;
    entry.group_offset = buffers.group_offset + batch_idx;
    if (p.gathered) entry.gather = buffers.gather + batch_idx * p.tokens();
  }
  entry.d = static_cast<char*>(buffers.d) + batch_idx * p.d_elements() * dtype_bytes(p.out);
  return entry;
}

std::vector<int64_t> group_starts(const RaggedProblem& p, const int32_t* group_sizes, int32_t group_offset) {
  const int64_t first = std::clamp<int64_t>(group_offset, 0, p.num_sizes);
  std::vector<int64_t> starts;
  int64_t row = 0;
  for (int64_t s = 0; s <= first + p.groups; ++s) {
    if (s >= first) starts.push_back(row);
    if (s < p.num_sizes) row = std::min(row + std::max<int64_t>(group_sizes[s], 0), p.tokens());
  }
  return starts;
}

}  // namespace tcgemm
