#include "core/ragged_problem.h"

#include <algorithm>
#include <utility>

namespace tcgemm {

const char* ragged_form_name(RaggedForm form) { return form == RaggedForm::kRows ? "rows" : "contraction"; }

bool parse_ragged_form(std::string_view name, RaggedForm* out) {
  for (RaggedForm form : {RaggedForm::kRows, RaggedForm::kContraction}) {
    if (name == ragged_form_name(form)) {
      *out = form;
      return true;
    }
  }
  return false;
}

std::string check_problem(const RaggedProblem& p) {
  constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;
  for (const auto& [name, extent] : {std::pair{"m", p.m},
                                     {"n", p.n},
                                     {"k", p.k},
                                     {"batch", p.batch},
                                     {"groups", p.groups},
                                     {"num_sizes", p.num_sizes}}) {
    if (extent < 0 || extent > kMaxExtent) {
      return std::string(name) + " must be in [0, 2147483647], got " + std::to_string(extent);
    }
  }
  if (p.b_transposed && !p.is_rows()) return "b_transposed must be false when form is contraction, got true";
  const auto fits = [&](int64_t x, int64_t y, int64_t z) {
    int64_t product;
    return !__builtin_mul_overflow(x * y, z, &product) && !__builtin_mul_overflow(product, p.batch, &product);
  };
  if (!fits(p.m, p.k, 1) || !fits(p.k, p.n, p.is_rows() ? p.groups : 1) ||
      !fits(p.m, p.n, p.is_rows() ? 1 : p.groups)) {
    return "a, b and d must have fewer than 2^63 elements";
  }
  return "";
}

RaggedBuffers batch_entry(const RaggedProblem& p, const RaggedBuffers& buffers, int64_t batch_idx) {
  RaggedBuffers entry = buffers;
  const int64_t in_bytes = dtype_bytes(p.in);
  if (p.a_batched) entry.a = static_cast<const char*>(buffers.a) + batch_idx * p.a_elements() * in_bytes;
  if (p.b_batched) entry.b = static_cast<const char*>(buffers.b) + batch_idx * p.b_elements() * in_bytes;
  if (p.sizes_batched) {
    entry.group_sizes = buffers.group_sizes + batch_idx * p.num_sizes;
    entry.group_offset = buffers.group_offset + batch_idx;
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
