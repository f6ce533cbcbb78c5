#include "core/packed_problem.h"

#include "core/extent.h"

namespace tcgemm {
namespace {

bool is_float(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32; }

int64_t d_elements(const PackedProblem& p) {
  if (!p.is_product()) return p.k * p.n;
  const Function& f = p.epilogue.function;
  return multiply_add(f.array_rows(0, p.m), f.array_columns(0, p.d_columns()), 0);
}

// A function by the rules of one of a product of arrays.
std::string check_epilogue(const PackedProblem& p) {
  if (p.epilogue.is_none()) return "";
  if (!p.is_product()) return "a function must be one of a product";
  if (p.epilogue.gated && p.n % (2 * PackedProblem::kTile) != 0) {
    return must("n", "be a multiple of 32 of a gated product", p.n);
  }
  const Function& f = p.epilogue.function;
  for (int64_t i = 0; p.is_grouped() && i < f.num_results(); ++i) {
    if (f.result(i).is_reduced()) return "results of a function must not be reduced in a grouped product";
  }
  Problem product{};
  product.batch = product.batch_inner = 1;
  product.m = p.m;
  product.n = p.d_columns();
  product.k = p.k;
  product.a = {DType::kBF16, false, p.k, 0, 0};
  product.b = {DType::kBF16, true, p.k, 0, 0};
  product.out = p.out;
  product.compute = Compute::kF32;
  product.epilogue = p.epilogue;
  return check_problem(product);
}

}  // namespace

const BufferTable<PackedProblem, PackedBuffers>& buffer_table(const PackedProblem&) {
  using P = const PackedProblem;
  const auto always = [](P&) -> int64_t { return 1; };
  const auto bytes = [](P&) { return DType::kU8; };
  const auto grouped = [](P& p) -> int64_t { return p.is_grouped(); };
  const auto integer = [](P&) { return DType::kS32; };
  static const BufferTable<PackedProblem, PackedBuffers> table{
      {"x", BufferRole::kOperand, [](P& p) -> int64_t { return p.is_product(); }, [](P& p) { return p.m * p.k; },
       [](P& p) { return p.in; }, put<&PackedBuffers::x>},
      {"row_scales", BufferRole::kOperand, [](P& p) -> int64_t { return p.row_scales; }, [](P& p) { return p.m; },
       [](P&) { return DType::kF32; }, put<&PackedBuffers::row_scales>},
      {"values", BufferRole::kOperand, always,
       [](P& p) { return multiply_add(p.all_tiles(), p.chunks() * P::kChunkBytes, 0); }, bytes,
       put<&PackedBuffers::values>},
      {"scales", BufferRole::kOperand, always,
       [](P& p) { return multiply_add(p.all_tiles(), p.groups() * P::kTile * dtype_bytes(p.scale), 0); }, bytes,
       put<&PackedBuffers::scales>},
      {"zero_points", BufferRole::kOperand, [](P& p) -> int64_t { return p.zero_points; },
       [](P& p) { return multiply_add(p.all_tiles(), p.groups() * P::kTile * 2, 0); }, bytes,
       put<&PackedBuffers::zero_points>},
      {"column_scales", BufferRole::kOperand, [](P& p) -> int64_t { return p.column_scales; },
       [](P& p) { return multiply_add(p.all_tiles(), P::kTile * 4, 0); }, bytes, put<&PackedBuffers::column_scales>},
      {"table", BufferRole::kOperand, [](P& p) -> int64_t { return p.code == PackedCode::kTable; },
       [](P&) -> int64_t { return 16; }, [](P&) { return DType::kF32; }, put<&PackedBuffers::table>},
      {"group_sizes", BufferRole::kOperand, grouped, [](P& p) { return p.num_sizes; }, integer,
       put<&PackedBuffers::group_sizes>},
      {"group_offset", BufferRole::kOperand, grouped, [](P&) -> int64_t { return 1; }, integer,
       put<&PackedBuffers::group_offset>},
      {"function operand", BufferRole::kOperand, [](P& p) { return p.epilogue.function.num_operands(); }, nullptr,
       nullptr,
       [](P&, PackedBuffers& buffers, void* x, int64_t bytes) { buffers.function_operands.push_back({x, bytes}); }},
      {"d", BufferRole::kResult, always, d_elements, [](P& p) { return p.out; }, put<&PackedBuffers::d>},
      {"function result", BufferRole::kResult, [](P& p) { return p.epilogue.function.num_more_arrays(); }, nullptr,
       nullptr, [](P&, PackedBuffers& buffers, void* x, int64_t bytes) { buffers.more_results.push_back({x, bytes}); }},
  };
  return table;
}

std::string check_problem(const PackedProblem& p) {
  if (std::string error = check_extents({{"m", p.m},
                                         {"n", p.n},
                                         {"k", p.k},
                                         {"group_size", p.group_size},
                                         {"experts", p.experts},
                                         {"num_sizes", p.num_sizes}});
      !error.empty()) {
    return error;
  }
  if (p.n % PackedProblem::kTile != 0) return must("n", "be a multiple of 16", p.n);
  if (!p.is_product() && p.m != 0) return must("m", "be 0 of a weight", p.m);
  if (p.is_grouped()) {
    if (p.experts < 1 || p.experts > p.num_sizes) {
      return must("experts", "be from 1 to num_sizes=" + std::to_string(p.num_sizes), p.experts);
    }
  } else if (p.experts != 1 || p.num_sizes != 0) {
    return "experts and num_sizes must be 1 and 0 where there are no groups of rows";
  }
  if (p.k == 0) return must("k", "be at least 1", p.k);
  if (p.group_size == 0 || p.k % p.group_size != 0) return must("group_size", "divide k", p.group_size);
  if (p.bits != 4 && p.bits != 8) return must("bits", "be 4 or 8", p.bits);
  if (p.zero < 0 || p.zero > int64_t{1} << p.bits) return must("zero", "be from 0 to 2^bits", p.zero);
  if (p.zero_points && p.zero != 0) return must("zero", "be 0 beside zero points", p.zero);
  const bool is_integer = p.code == PackedCode::kInteger;
  const bool is_float8_weight = p.code == PackedCode::kE4M3 || p.code == PackedCode::kE5M2;
  if (!is_integer && p.bits != (is_float8_weight ? 8 : 4)) {
    return must("bits", std::string(is_float8_weight ? "be 8 of " : "be 4 of ") + name_of(p.code), p.bits);
  }
  if (!is_integer && (p.zero != 0 || p.zero_points)) return "integers alone have zeros";
  if (!is_float(p.scale) && p.scale != DType::kF8E4M3FN && p.scale != DType::kF8E8M0FNU) {
    return std::string("scale must be f16, bf16, f32, f8e4m3fn or f8e8m0fnu, got ") + name_of(p.scale);
  }
  const bool is_float8 = p.in == DType::kF8E4M3FN && p.is_product();
  if (p.row_scales != is_float8) return "rows must have scales where x is f8e4m3fn, and nowhere else";
  // Of integers of 4 bits alone differences are exact in 8.
  if (is_float8 && (p.bits != 4 || !is_integer))
    return "x must be f16 or bf16 unless the weight has integers of 4 bits, got f8e4m3fn";
  if (!is_float8 && p.in != DType::kF16 && p.in != DType::kBF16) {
    return (p.is_product() ? "x must be f16, bf16 or f8e4m3fn, got " : "d must be f16 or bf16, got ") +
           std::string(name_of(p.in));
  }
  if (p.epilogue.function.is_none() && !is_float(p.out)) {
    return std::string("d must be f16, bf16 or f32, got ") + name_of(p.out);
  }
  return check_epilogue(p);
}

std::string check_buffers(const PackedProblem& p, const PackedBuffers& buffers) {
  return check_function_buffers(p.epilogue.function, {1, p.experts, p.m, p.d_columns()}, !p.is_empty(), 1,
                                buffers.function_operands, buffers.more_results);
}

}  // namespace tcgemm
