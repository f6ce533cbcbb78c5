#include "cpu/host_ragged.h"

#include <cstring>

#include "cpu/host_gemm.h"

namespace tcgemm {
namespace {

class HostRagged final : public RaggedImplementation {
 public:
  const char* name() const override { return "host"; }
  const std::vector<std::string>& configs() const override { return host_gemm()->configs(); }

  Features features() const override { return {Feature::kGathered}; }

  std::string reject_rest(const RaggedProblem& p, const Device& device, std::string_view config) const override {
    return host_gemm()->reject(group_problem(p, p.tokens()), device, config);
  }

  // A gathered A is copied into the order of the tokens first.
  int64_t workspace_bytes(const RaggedProblem& p, const Device&, std::string_view) const override {
    return p.gathered ? p.tokens() * p.a_columns() * dtype_bytes(p.in) : 0;
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
    if (p.gathered) gather(p, buffers);
    const auto* a = static_cast<const char*>(p.gathered ? buffers.workspace : buffers.a);
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
      group_buffers.a = a + starts[g] * p.a_columns() * in_bytes;
      group_buffers.b = b + (p.is_rows() ? g * p.k : starts[g]) * p.b_columns() * in_bytes;
      group_buffers.d = d + (p.is_rows() ? starts[g] : g * p.m) * p.n * out_bytes;
      if (Status s = host_gemm()->launch(group, group_buffers, device, config, stream); !s.is_ok()) return s;
    }
    return Status::ok();
  }

  static void gather(const RaggedProblem& p, const RaggedBuffers& buffers) {
    const int64_t row_bytes = p.a_columns() * dtype_bytes(p.in);
    if (row_bytes == 0) return;  // Then there is no workspace either.
    for (int64_t i = 0; i < p.tokens(); ++i) {
      char* target = static_cast<char*>(buffers.workspace) + i * row_bytes;
      const int64_t row = buffers.gather[i];
      if (row >= 0 && row < p.a_rows) {
        std::memcpy(target, static_cast<const char*>(buffers.a) + row * row_bytes, row_bytes);
      } else {
        std::memset(target, 0, row_bytes);
      }
    }
  }
};

}  // namespace

const RaggedImplementation* host_ragged() {
  static const HostRagged implementation;
  return &implementation;
}

}  // namespace tcgemm
