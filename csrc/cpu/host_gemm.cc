#include "cpu/host_gemm.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>

#include "core/extent.h"
#include "cpu/block_kernels.h"
#include "cpu/executor.h"

namespace tcgemm {
namespace {

using host::Block;
using host::BlockKernels;
using host::Geometry;

constexpr int64_t round_up(int64_t x, int64_t y) { return ceil_div(x, y) * y; }

// Work, in multiply-adds, under which waking another thread costs more than it brings.
constexpr int64_t kMinTaskWork = int64_t{1} << 20;

const BlockKernels* named_kernels(std::string_view config) {
  for (const BlockKernels* kernels : {host::avx512_kernels(), host::avx2_kernels(), host::portable_kernels()}) {
    if (kernels != nullptr && config == kernels->name) return kernels;
  }
  return nullptr;
}

// The widest instruction set of this machine; the answer never changes, so it is found once.
const BlockKernels* best_kernels() {
  static const BlockKernels* const best = [] {
    for (const BlockKernels* kernels : {host::avx512_kernels(), host::avx2_kernels()}) {
      if (kernels != nullptr && kernels->runs_here()) return kernels;
    }
    return host::portable_kernels();
  }();
  return best;
}

// Memory that a thread keeps for its packed panels, grown to the largest block it has met.
// Kept because fresh pages cost as much as packing does.
class ThreadScratch {
 public:
  // Null when there is no memory.
  void* reserve(int64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      memory_.reset(static_cast<char*>(::operator new(bytes, kAlignment, std::nothrow)));
      bytes_ = memory_ != nullptr ? bytes : 0;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t bytes_ = 0;
};

// Part of one batch item's product.
struct ProductBlock {
  int64_t batch_idx;
  int64_t m_begin, m_count;
  int64_t n_begin, n_count;
};

// How one batch item's D is cut into blocks, and how many blocks one task takes.
struct Split {
  int64_t block_m, block_n;
  int64_t blocks_m, blocks_n;
  int64_t blocks_per_task;

  int64_t blocks() const { return blocks_m * blocks_n; }
};

Split split_blocks(const Problem& p, const Geometry& geometry, int num_threads) {
  Split split;
  split.blocks_m = ceil_div(p.m, geometry.max_rows);
  split.blocks_n = ceil_div(p.n, geometry.max_columns);
  const int64_t work = p.m * p.n * std::max<int64_t>(p.k, 1);
  // Two blocks a thread even out threads that the machine slows down.
  const int64_t wanted = std::min<int64_t>(2 * num_threads, std::max<int64_t>(1, p.batch * work / kMinTaskWork));
  const auto recompute = [&] {
    split.block_m = round_up(ceil_div(p.m, split.blocks_m), geometry.tile_rows);
    split.block_n = round_up(ceil_div(p.n, split.blocks_n), geometry.tile_columns);
  };
  for (recompute(); num_threads > 1 && p.batch * split.blocks() < wanted; recompute()) {
    // Halve the longer side: each block packs its rows of A and its columns of B.
    if (split.block_n >= split.block_m && split.block_n > geometry.tile_columns) {
      split.blocks_n = ceil_div(p.n, split.block_n / 2);
    } else if (split.block_m > geometry.tile_rows) {
      split.blocks_m = ceil_div(p.m, split.block_m / 2);
    } else {
      break;
    }
  }
  split.blocks_m = ceil_div(p.m, split.block_m);
  split.blocks_n = ceil_div(p.n, split.block_n);
  split.blocks_per_task = std::max<int64_t>(1, kMinTaskWork / std::max<int64_t>(1, work / split.blocks()));
  return split;
}

int64_t batch_offset(const Problem& p, const Operand& x, int64_t batch_idx) {
  return dtype_bytes(x.dtype) *
         (batch_idx / p.batch_inner * x.batch_outer_stride + batch_idx % p.batch_inner * x.batch_inner_stride);
}

class HostGemm : public Implementation {
 public:
  const char* name() const override { return "host"; }

  const std::vector<std::string>& configs() const override {
    static const std::vector<std::string> configs{"auto", "avx512", "avx2", "portable"};
    return configs;
  }

  Features features() const override { return {Feature::kAlpha, Feature::kBeta}; }

  std::string reject_rest(const Problem& p, const Device&, std::string_view config) const override {
    if (std::string error = reject_types(p); !error.empty()) return error;
    if (config == "auto") return "";
    const BlockKernels* kernels = named_kernels(config);
    if (kernels == nullptr || !kernels->runs_here()) {
      return "this machine's processor has no " + std::string(config) + " instructions";
    }
    return "";
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device&, std::string_view config,
                void* stream) const override {
    const Executor& executor = *static_cast<const Executor*>(stream);
    const BlockKernels& kernels = config == "auto" ? *best_kernels() : *named_kernels(config);
    const Split split = split_blocks(p, kernels.geometry(p), executor.num_threads());
    const int64_t num_blocks = p.batch * split.blocks();
    std::atomic<bool> out_of_memory{false};

    executor.parallel_for(ceil_div(num_blocks, split.blocks_per_task), [&](int64_t task_idx) {
      const int64_t first = task_idx * split.blocks_per_task;
      for (int64_t i = first; i < std::min(first + split.blocks_per_task, num_blocks); ++i) {
        const int64_t block_idx = i % split.blocks();
        ProductBlock block;
        block.batch_idx = i / split.blocks();
        // Blocks that follow each other share their columns of B, which stay in the cache.
        block.m_begin = block_idx % split.blocks_m * split.block_m;
        block.n_begin = block_idx / split.blocks_m * split.block_n;
        block.m_count = std::min(p.m - block.m_begin, split.block_m);
        block.n_count = std::min(p.n - block.n_begin, split.block_n);
        if (!run_block(p, buffers, kernels, block)) out_of_memory = true;
      }
    });
    if (out_of_memory) return Status::internal("no memory for a thread's packed panels");
    return Status::ok();
  }

 private:
  // False when there is no memory.
  static bool run_block(const Problem& p, const Buffers& buffers, const BlockKernels& kernels,
                        const ProductBlock& part) {
    thread_local ThreadScratch thread_scratch;
    void* scratch = thread_scratch.reserve(kernels.scratch_bytes(p, part.m_count, part.n_count));
    if (scratch == nullptr) return false;
    const int64_t d_offset = part.batch_idx * p.m * p.n * dtype_bytes(p.out);
    Block block;
    block.a = static_cast<const char*>(buffers.a) + batch_offset(p, p.a, part.batch_idx);
    block.b = static_cast<const char*>(buffers.b) + batch_offset(p, p.b, part.batch_idx);
    block.c = buffers.c == nullptr ? nullptr : static_cast<const char*>(buffers.c) + d_offset;
    block.d = static_cast<char*>(buffers.d) + d_offset;
    block.m_begin = part.m_begin;
    block.m_end = part.m_begin + part.m_count;
    block.n_begin = part.n_begin;
    block.n_end = part.n_begin + part.n_count;
    kernels.run(p, block, scratch);
    return true;
  }

  static std::string must(const char* what, const char* rule, const char* got) {
    return std::string(what) + " must be " + rule + ", got " + got;
  }

  static std::string reject_types(const Problem& p) {
    constexpr const char* kKnown = "f16, bf16, f32, f64, s8, u8, c64 or c128";
    const auto is_integer = [](DType t) { return t == DType::kS8 || t == DType::kU8; };
    for (const DType t : {p.a.dtype, p.b.dtype}) {
      if (t == DType::kS32 || t == DType::kF8E4M3FN || t == DType::kF8E5M2) {
        return must("the operands' dtype", kKnown, name_of(t));
      }
    }
    if (!(p.a.dtype == p.b.dtype || (is_integer(p.a.dtype) && is_integer(p.b.dtype)))) {
      return must("b's dtype", name_of(p.a.dtype), name_of(p.b.dtype));
    }
    switch (p.a.dtype) {
      case DType::kF16:
      case DType::kBF16:
      case DType::kF32: {
        const bool tf32 = p.a.dtype == DType::kF32 && p.compute == Compute::kTF32;
        if (p.compute != Compute::kF32 && !tf32) {
          return must("compute", p.a.dtype == DType::kF32 ? "f32 or tf32" : "f32", name_of(p.compute));
        }
        if (p.out != DType::kF16 && p.out != DType::kBF16 && p.out != DType::kF32) {
          return must("the output's dtype", "f16, bf16 or f32", name_of(p.out));
        }
        return "";
      }
      case DType::kF64: return exactly(p, DType::kF64, p.compute == Compute::kF64, "f64");
      case DType::kC64:
        return exactly(p, DType::kC64, p.compute == Compute::kF32 || p.compute == Compute::kTF32, "f32 or tf32");
      case DType::kC128: return exactly(p, DType::kC128, p.compute == Compute::kF64, "f64");
      case DType::kS8:
      case DType::kU8: {
        for (const auto& [name, value] : {std::pair{"alpha", p.alpha}, {"beta", p.beta}}) {
          if (std::trunc(value) != value || std::fabs(value) > 2147483647.0) {
            return must(name, "an int32 for integer operands", std::to_string(value).c_str());
          }
        }
        return exactly(p, DType::kS32, p.compute == Compute::kS32, "s32");
      }
      default: break;
    }
    return "the operands' dtype is unknown";
  }

  static std::string exactly(const Problem& p, DType out, bool compute_fits, const char* compute_rule) {
    if (!compute_fits) return must("compute", compute_rule, name_of(p.compute));
    if (p.out != out) return must("the output's dtype", name_of(out), name_of(p.out));
    return "";
  }
};

}  // namespace

const Implementation* host_gemm() {
  static const HostGemm implementation;
  return &implementation;
}

}  // namespace tcgemm
