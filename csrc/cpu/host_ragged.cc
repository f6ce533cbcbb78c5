#include "cpu/host_ragged.h"

#include <cstring>

#include "cpu/host_gemm.h"

namespace tcgemm {
namespace {

// The product of one group of `rows` tokens, or with rows = p.tokens() the largest there may be.
Problem group_problem(const RaggedProblem& p, int64_t rows) {
  Problem group{};
  group.batch = group.batch_inner = 1;
  group.n = p.n;
  group.out = p.out;
  group.compute = p.compute;
  if (p.is_rows()) {
    group.m = rows;
    group.k = p.k;
    group.a = {p.in, false, p.k, 0, 0};
    group.b = {p.in, p.b_transposed, p.b_transposed ? p.k : p.n, 0, 0};
  } else {
    group.m = p.m;
    group.k = rows;
    group.a = {p.in, true, p.m, 0, 0};
    group.b = {p.in, false, p.n, 0, 0};
  }
  return group;
}

class HostRagged final : public RaggedImplementation {
 public:
  const char* name() const override { return "host"; }
  const std::vector<std::string>& configs() const override { return host_gemm()->configs(); }

  std::string reject(const RaggedProblem& p, const Device& device, std::string_view config) const override {
    return host_gemm()->reject(group_problem(p, p.tokens()), device, config);
  }

  Status launch(const RaggedProblem& p, const RaggedBuffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    for (int64_t i = 0; i < p.batch; ++i) {
      if (Status s = launch_entry(p, batch_entry(p, buffers, i), device, config, stream); !s.is_ok()) return s;
    }
    return Status::ok();
  }

 private:
  static Status launch_entry(const RaggedProblem& p, const RaggedBuffers& buffers, const Device& device,
                             std::string_view config, void* stream) {
    const std::vector<int64_t> starts = group_starts(p, buffers.group_sizes, *buffers.group_offset);
    const auto* a = static_cast<const char*>(buffers.a);
    const auto* b = static_cast<const char*>(buffers.b);
    auto* d = static_cast<char*>(buffers.d);
    const int64_t in_bytes = dtype_bytes(p.in), out_bytes = dtype_bytes(p.out);
    if (p.is_rows()) {
      std::memset(d, 0, starts.front() * p.n * out_bytes);
      std::memset(d + starts.back() * p.n * out_bytes, 0, (p.m - starts.back()) * p.n * out_bytes);
    }
    for (int64_t g = 0; g < p.groups; ++g) {
      const Problem group = group_problem(p, starts[g + 1] - starts[g]);
      if (group.is_empty()) continue;
      Buffers group_buffers;
      group_buffers.a = a + starts[g] * (p.is_rows() ? p.k : p.m) * in_bytes;
      group_buffers.b = b + (p.is_rows() ? g * p.k : starts[g]) * p.n * in_bytes;
      group_buffers.d = d + (p.is_rows() ? starts[g] : g * p.m) * p.n * out_bytes;
      if (Status s = host_gemm()->launch(group, group_buffers, device, config, stream); !s.is_ok()) return s;
    }
    return Status::ok();
  }
};

}  // namespace

const RaggedImplementation* host_ragged() {
  static const HostRagged implementation;
  return &implementation;
}

}  // namespace tcgemm
