#include "cpu/host_epilogue.h"

#include <algorithm>

#include "cpu/number_formats.h"
#include "epilogue/activations.h"

namespace tcgemm::host {
namespace {

// Columns that are worked on together, in arrays on the stack.
constexpr int64_t kRun = 512;

// out[j] = base[offset + j] as Acc.
template <typename Acc>
void read_row(const void* base, DType dtype, int64_t offset, int64_t count, Acc* out) {
  const auto read = [&](auto element) {
    const auto* source = static_cast<const decltype(element)*>(base) + offset;
    for (int64_t j = 0; j < count; ++j) out[j] = static_cast<Acc>(to_real(source[j]));
  };
  switch (dtype) {
    case DType::kF16: return read(F16{});
    case DType::kBF16: return read(BF16{});
    case DType::kF64: return read(double{});
    default: return read(float{});
  }
}

template <typename Acc>
void write_row(const Acc* row, int64_t count, void* base, DType dtype, int64_t offset) {
  const auto write = [&](auto element, auto convert) {
    auto* target = static_cast<decltype(element)*>(base) + offset;
    for (int64_t j = 0; j < count; ++j) target[j] = convert(row[j]);
  };
  switch (dtype) {
    case DType::kF16: return write(F16{}, [](Acc x) { return to_f16(static_cast<float>(x)); });
    case DType::kBF16: return write(BF16{}, [](Acc x) { return to_bf16(static_cast<float>(x)); });
    case DType::kF64: return write(double{}, [](Acc x) { return static_cast<double>(x); });
    default: return write(float{}, [](Acc x) { return static_cast<float>(x); });
  }
}

// One run of one row: elements [j, j + count) of row m_idx.
template <typename Acc>
class Run {
 public:
  Run(const Problem& problem, const Buffers& buffers, int64_t batch_idx, int64_t m_idx, int64_t j, int64_t count)
      : p_(problem),
        e_(problem.epilogue),
        buffers_(buffers),
        batch_idx_(batch_idx),
        m_idx_(m_idx),
        j_(j),
        count_(count) {}

  void apply(const Acc* sums, const Acc* sums_up) {
    Acc z[kRun], up[kRun], d[kRun], saved[kRun];
    scale(sums, 0, z);
    if (e_.derivative) {
      read_row(buffers_.aux_in, p_.out, row(p_.aux_columns()), count_, saved);
      if (e_.gated) {
        read_row(buffers_.aux_in, p_.out, row(p_.aux_columns()) + p_.n, count_, up);
        activation::visit(e_.activation, [&](auto f) {
          for (int64_t j = 0; j < count_; ++j) {
            d[j] = f.gradient(saved[j], up[j] * z[j]);
            up[j] = f.value(saved[j]) * z[j];
          }
        });
        store(up, p_.n);
      } else {
        activation::visit(e_.activation, [&](auto f) {
          for (int64_t j = 0; j < count_; ++j) d[j] = f.gradient(saved[j], z[j]);
        });
      }
      return store(d, 0);
    }
    if (e_.gated) scale(sums_up, p_.n, up);
    if (e_.aux_out) {
      write_row(z, count_, buffers_.aux_out, p_.out, row(p_.aux_columns()));
      if (e_.gated) write_row(up, count_, buffers_.aux_out, p_.out, row(p_.aux_columns()) + p_.n);
    }
    activation::visit(e_.activation, [&](auto f) {
      for (int64_t j = 0; j < count_; ++j) d[j] = f.value(z[j]);
    });
    if (e_.gated) {
      for (int64_t j = 0; j < count_; ++j) d[j] *= up[j];
    }
    store(d, 0);
  }

 private:
  // Position of the run in a packed result of so many columns.
  int64_t row(int64_t columns) const { return (batch_idx_ * p_.m + m_idx_) * columns + j_; }

  // out = alpha * sums + bias, whose columns for these sums begin at `first`.
  void scale(const Acc* sums, int64_t first, Acc* out) const {
    const Acc alpha = static_cast<Acc>(p_.alpha);
    for (int64_t j = 0; j < count_; ++j) out[j] = alpha * sums[j];
    const int64_t offset = batch_idx_ * e_.bias_batch_stride;
    Acc bias[kRun];
    if (e_.bias == Bias::kN) {
      read_row(buffers_.bias, e_.bias_dtype, offset + first + j_, count_, bias);
      for (int64_t j = 0; j < count_; ++j) out[j] += bias[j];
    } else if (e_.bias == Bias::kM) {
      read_row(buffers_.bias, e_.bias_dtype, offset + m_idx_, 1, bias);
      for (int64_t j = 0; j < count_; ++j) out[j] += bias[0];
    }
  }

  // D = values + beta * C, `first` columns to the right.
  void store(Acc* values, int64_t first) const {
    const int64_t offset = row(p_.d_columns()) + first;
    if (p_.beta != 0.0) {
      Acc c[kRun];
      const Acc beta = static_cast<Acc>(p_.beta);
      read_row(buffers_.c, p_.out, offset, count_, c);
      for (int64_t j = 0; j < count_; ++j) values[j] += beta * c[j];
    }
    write_row(values, count_, buffers_.d, p_.out, offset);
  }

  const Problem& p_;
  const Epilogue& e_;
  const Buffers& buffers_;
  const int64_t batch_idx_, m_idx_, j_, count_;
};

template <typename Acc>
void apply_typed(const Problem& p, const Buffers& buffers, const ProductBlock& block, const Acc* sums,
                 const Acc* sums_up) {
  for (int64_t i = 0; i < block.m_count; ++i) {
    for (int64_t j = 0; j < block.n_count; j += kRun) {
      const int64_t offset = i * block.n_count + j;
      Run<Acc>(p, buffers, block.batch_idx, block.m_begin + i, block.n_begin + j, std::min(kRun, block.n_count - j))
          .apply(sums + offset, sums_up == nullptr ? nullptr : sums_up + offset);
    }
  }
}

template <typename Acc>
void sum_typed(const Problem& p, const Buffers& buffers, int64_t batch_idx, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += kRun) {
    const int64_t count = std::min(kRun, end - j);
    Acc sums[kRun] = {}, row[kRun];
    for (int64_t i = 0; i < p.m; ++i) {
      read_row(buffers.d, p.out, (batch_idx * p.m + i) * p.d_columns() + j, count, row);
      for (int64_t x = 0; x < count; ++x) sums[x] += row[x];
    }
    write_row(sums, count, buffers.column_sums, sum_dtype(p), batch_idx * p.d_columns() + j);
  }
}

}  // namespace

void apply_epilogue(const Problem& p, const Buffers& buffers, const ProductBlock& block, const void* sums,
                    const void* sums_up) {
  if (sum_dtype(p) == DType::kF64) {
    apply_typed(p, buffers, block, static_cast<const double*>(sums), static_cast<const double*>(sums_up));
  } else {
    apply_typed(p, buffers, block, static_cast<const float*>(sums), static_cast<const float*>(sums_up));
  }
}

void sum_columns(const Problem& p, const Buffers& buffers, int64_t batch_idx, int64_t begin, int64_t end) {
  if (sum_dtype(p) == DType::kF64) {
    sum_typed<double>(p, buffers, batch_idx, begin, end);
  } else {
    sum_typed<float>(p, buffers, batch_idx, begin, end);
  }
}

}  // namespace tcgemm::host
