#include "cpu/host_rows.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/executor.h"
#include "cpu/number_formats.h"

namespace tcgemm {
namespace {

using namespace host;

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
T rounded(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, F16>) return to_f16(x);
  if constexpr (std::is_same_v<T, BF16>) return to_bf16(x);
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) return x;
}

bool is_inside(int32_t index, int64_t rows) { return index >= 0 && index < rows; }

template <typename T>
void sum_rows(const RowsProblem& p, const RowsBuffers& buffers, int64_t first, int64_t last) {
  using Real = Accumulator<T>;
  const T* a = static_cast<const T*>(buffers.a);
  const Real* weights = static_cast<const Real*>(buffers.weights);
  std::vector<Real> sum(p.n);
  for (int64_t t = first; t < last; ++t) {
    const int64_t begin = std::clamp<int64_t>(buffers.starts[t], 0, p.pairs);
    const int64_t end = std::clamp<int64_t>(buffers.starts[t + 1], begin, p.pairs);
    std::fill(sum.begin(), sum.end(), Real(0));
    for (int64_t pair = begin; pair < end; ++pair) {
      if (!is_inside(buffers.indices[pair], p.a_rows)) continue;
      const T* row = a + buffers.indices[pair] * p.n;
      const Real weight = weights == nullptr ? Real(1) : weights[pair];
      for (int64_t i = 0; i < p.n; ++i) sum[i] += weight * to_real(row[i]);
    }
    T* d = static_cast<T*>(buffers.d) + t * p.n;
    for (int64_t i = 0; i < p.n; ++i) d[i] = rounded<T>(sum[i]);
  }
}

template <typename T>
void multiply_rows(const RowsProblem& p, const RowsBuffers& buffers, int64_t first, int64_t last) {
  using Real = Accumulator<T>;
  for (int64_t pair = first; pair < last; ++pair) {
    const int32_t i = buffers.indices[pair], j = buffers.b_indices[pair];
    // Partial sums that do not wait for each other.
    constexpr int kSums = 8;
    Real sums[kSums] = {};
    if (is_inside(i, p.a_rows) && is_inside(j, p.b_rows)) {
      const T* x = static_cast<const T*>(buffers.a) + i * p.n;
      const T* y = static_cast<const T*>(buffers.b) + j * p.n;
      for (int64_t c = 0; c < p.n; ++c) sums[c % kSums] += to_real(x[c]) * to_real(y[c]);
    }
    Real total = 0;
    for (Real sum : sums) total += sum;
    static_cast<Real*>(buffers.d)[pair] = total;
  }
}

template <typename T>
void run(const RowsProblem& p, const RowsBuffers& buffers, const Executor& executor) {
  // Parts of about 64k elements, whatever a row has.
  const int64_t count = p.is_sums() ? p.targets : p.pairs;
  const int64_t part = std::max<int64_t>(1, 65536 / std::max<int64_t>(p.n, 1));
  executor.parallel_for((count + part - 1) / part, [&](int64_t i) {
    (p.is_sums() ? sum_rows<T> : multiply_rows<T>)(p, buffers, i * part, std::min(count, (i + 1) * part));
  });
}

class HostRows final : public RowsImplementation {
 public:
  const char* name() const override { return "host"; }
  const std::vector<std::string>& configs() const override { return configs_; }

  Features features() const override { return {Feature::kWeighted}; }

  std::string reject_rest(const RowsProblem&, const Device& device, std::string_view) const override {
    return device.compute_capability == 0 ? "" : "it runs on the host only";
  }

  Status launch(const RowsProblem& p, const RowsBuffers& buffers, const Device&, std::string_view,
                void* stream) const override {
    const Executor& executor = *static_cast<const Executor*>(stream);
    switch (p.in) {
      case DType::kF16: run<F16>(p, buffers, executor); break;
      case DType::kBF16: run<BF16>(p, buffers, executor); break;
      case DType::kF32: run<float>(p, buffers, executor); break;
      default: run<double>(p, buffers, executor);
    }
    return Status::ok();
  }

 private:
  const std::vector<std::string> configs_{"default"};
};

}  // namespace

const RowsImplementation* host_rows() {
  static const HostRows implementation;
  return &implementation;
}

}  // namespace tcgemm
