// The wgmma family behind the common interface.
#include <algorithm>
#include <array>
#include <charconv>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/cuda_status.h"
#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/epilogue_launch.h"
#include "kernels/common/float_type.h"
#include "kernels/common/function_launch.h"
#include "kernels/common/limits.h"
#include "kernels/common/operand_copy.h"
#include "kernels/kernels.h"
#include "kernels/wgmma/instance.h"
#include "kernels/wgmma/instructions.h"
#include "kernels/wgmma/launch.h"

namespace tcgemm {

namespace wgmma_family {

namespace {

// Numbers of splits of K through the workspace: dense, for what is left of a wave is lost.
constexpr int kSplits[] = {2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
                           18, 20, 22, 24, 28, 32, 36, 40, 44, 48, 56, 64, 96, 128};

struct Parsed {
  int base_idx = 0;
  int num_splits = 1;
};

// "<base>" or "<base>_split<n>", n one of kSplits; nothing for any other name.
std::optional<Parsed> parse(std::string_view config) {
  constexpr std::string_view kSplit = "_split";
  Parsed parsed;
  const size_t split = config.find(kSplit);
  const auto base = std::find_if(std::begin(kConfigs), std::end(kConfigs),
                                 [&](const NamedConfig& known) { return known.name == config.substr(0, split); });
  if (base == std::end(kConfigs)) return std::nullopt;
  parsed.base_idx = static_cast<int>(base - kConfigs);
  if (split == std::string_view::npos) return parsed;
  const char* const end = config.data() + config.size();
  const auto [rest, error] = std::from_chars(config.data() + split + kSplit.size(), end, parsed.num_splits);
  const bool is_known = std::find(std::begin(kSplits), std::end(kSplits), parsed.num_splits) != std::end(kSplits);
  if (error != std::errc() || rest != end || !is_known) return std::nullopt;
  return parsed;
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

using tile::Major;

// A matrix of `rows` x `columns` as the kernel wants it, columns contiguous, and whether its
// operand must be copied to be that.
struct Source {
  const void* data;
  const Operand* operand;
  Major major;  // K-major: it has a row for each m or n, else for each k
  int64_t rows, columns;
  bool transpose;       // the operand is stored columns x rows and has to be transposed by the copy
  int scaled_rows = 0;  // as of OperandShape

  static Source make(const Instruction::Input& input, const void* data, const Operand& operand, int64_t extent,
                     int64_t k, Major stored) {
    const Major major = input.takes(stored) ? stored : Major::kK;
    const bool is_k_major = major == Major::kK;
    return {data, &operand, major, is_k_major ? extent : k, is_k_major ? k : extent, stored != major};
  }

  OperandShape shape() const { return {static_cast<int>(dtype_bytes(operand->dtype)), major, scaled_rows}; }
  bool needs_copy() const { return transpose || !rows_aligned(data, *operand, 16); }
  // A copy's rows start on 128-byte lines: a load of 128 bytes that straddles two costs about twice.
  int64_t padded_columns() const { return round_up(std::max<int64_t>(columns, 1), 128 / dtype_bytes(operand->dtype)); }
  int64_t outer(const Problem& p) const { return operand->batch_outer_stride == 0 ? 1 : p.batch_outer(); }
  int64_t inner(const Problem& p) const { return operand->batch_inner_stride == 0 ? 1 : p.batch_inner; }
  int64_t copy_bytes(const Problem& p) const {
    if (!needs_copy()) return 0;
    // Entries that overlap in memory do not overlap in a copy, which no workspace may be able to hold.
    constexpr int64_t kTooMany = int64_t{1} << 60;
    const int64_t elements =
        multiply_add(multiply_add(outer(p), inner(p), 0), multiply_add(rows, padded_columns(), 0), 0);
    return round_up(std::min(multiply_add(elements, dtype_bytes(operand->dtype), 0), kTooMany), 256);
  }
  // Whether a copy of the other is one of this, too.
  bool is_copied_as(const Source& other) const {
    const auto key = [](const Source& x) {
      return std::tuple(x.data, x.major, x.rows, x.columns, x.transpose, x.operand->dtype, x.operand->ld,
                        x.operand->batch_outer_stride, x.operand->batch_inner_stride);
    };
    return needs_copy() && key(*this) == key(other);
  }
};

// What multiplies a problem's operands; null: nothing does. Where a config is swapped A is the problem's B.
const Instruction* find_instruction(const Problem& p, bool swapped) {
  const DType a = swapped ? p.b.dtype : p.a.dtype, b = swapped ? p.a.dtype : p.b.dtype;
  for (const Instruction& x : instructions()) {
    if (x.a.dtype == a && x.b.dtype == b && x.compute == p.compute) return &x;
  }
  return nullptr;
}

// The same as rules.
const std::vector<TypeRule>& type_rules(bool swapped) {
  static const auto all = [] {
    const std::vector<DType> floats{DType::kF16, DType::kBF16, DType::kF32}, integers{DType::kS32};
    std::array<std::vector<TypeRule>, 2> rules;
    for (const Instruction& x : instructions()) {
      const std::vector<DType>& outs = x.compute == Compute::kS32 ? integers : floats;
      rules[0].emplace_back(x.a.dtype, x.b.dtype, x.compute, outs);
      rules[1].emplace_back(x.b.dtype, x.a.dtype, x.compute, outs);
    }
    return rules;
  }();
  return all[swapped];
}

// Whether the config's own kernel stores D. Else, as with split K, its products go through the workspace and a second
// kernel does.
bool runs_epilogue(const Problem& p, const Parsed& parsed) {
  if (parsed.num_splits > 1 || (p.has_two_b() && !kConfigs[parsed.base_idx].shape.runs_gated())) return false;
  return is_bare(p) || !p.epilogue.function.is_none();
}

// Whether the config's kernel computes a symmetric D by half. A function that it runs makes D alone, stored by rows.
bool runs_symmetric(const Problem& p, const Parsed& parsed) {
  const bool is_plain = p.symmetric && !p.has_two_b() && p.scales.is_none();
  if (!is_plain || kConfigs[parsed.base_idx].shape.symmetric_side() == 0) return false;
  const tcgemm::Function& function = p.epilogue.function;
  if (function.is_none() || !runs_epilogue(p, parsed)) return true;
  return function.num_results() == 1 && !function.result(0).is_reduced();
}

// The two operands in the kernel's terms.
struct Plan {
  const Instruction* instruction;
  Source a, b;

  static Plan make(const Problem& p, const void* a_data, const void* b_data, const Parsed& parsed) {
    const Shape& shape = kConfigs[parsed.base_idx].shape;
    const Instruction* const x = find_instruction(p, shape.swapped);
    const auto a = [&](const Instruction::Input& input) {
      return Source::make(input, a_data, p.a, p.m, p.k, p.a.transposed ? Major::kMN : Major::kK);
    };
    const auto b = [&](const Instruction::Input& input) {
      return Source::make(input, b_data, p.b, p.n, p.k, p.b.transposed ? Major::kK : Major::kMN);
    };
    Plan plan = shape.swapped ? Plan{x, b(x->a), a(x->b)} : Plan{x, a(x->a), b(x->b)};
    if (!p.scales.is_none()) {
      plan.a.scaled_rows = OperandScales::rows_of_a(scales(p, !shape.swapped));
      const bool gated = p.has_two_b() && runs_epilogue(p, parsed);
      plan.b.scaled_rows = OperandScales::rows_of_b(scales(p, shape.swapped), shape.tile_n, gated);
    }
    return plan;
  }

  static BlockScales scales(const Problem& p, bool of_a) { return of_a ? p.scales.a() : p.scales.b(); }
};

// Those of one operand.
OperandScales operand_scales(const Problem& p, const Buffers& buffers, bool of_a) {
  if (p.scales.is_none()) return {};
  if (of_a) return {buffers.a_scales, p.scales.a(), p.m};
  return {buffers.b_scales, p.scales.b(), p.n, buffers.b_up_scales};
}

int64_t sums_bytes(const Problem& p, const Parsed& parsed) {
  return runs_epilogue(p, parsed) ? 0 : SplitSums::bytes(p, parsed.num_splits);
}

// Of a gated product: what the second matrix B is, beside the plan's first one.
Source second_b(const Plan& plan, bool swapped, const void* data) {
  Source source = swapped ? plan.a : plan.b;
  source.data = data;
  return source;
}

}  // namespace

std::string reject_scales(const ProductScales& scales, int64_t m, int64_t n, int64_t k, bool promotes) {
  if (scales.is_none()) return "";
  if (!promotes) return "block scales need accumulators that are promoted every k block";
  for (const auto& [x, rows] : {std::pair{scales.a(), m}, std::pair{scales.b(), n}}) {
    if (x.depth % kScaledDepth != 0 && x.depth < k) {
      return "the depth of block scales must be a multiple of 128 of k, got " + std::to_string(x.depth);
    }
    if (multiply_add(ceil_div(rows, x.rows), x.row_stride, 0) > INT32_MAX) {
      return "block scales of a matrix must lie within 2^31 - 1 elements";
    }
  }
  return "";
}

namespace {

class Wgmma final : public Implementation {
 public:
  Wgmma() {
    for (const NamedConfig& base : kConfigs) names_.emplace_back(base.name);
    for (const NamedConfig& base : kConfigs) {
      for (int splits : kSplits) names_.push_back(std::string(base.name) + "_split" + std::to_string(splits));
    }
    for (const NamedConfig& base : kConfigs) {
      for (const Instruction& instruction : instructions()) {
        for (Major a : kMajors) {
          for (Major b : kMajors) {
            const bool is_taken = instruction.a.takes(a) && instruction.b.takes(b);
            const std::string operands = is_taken ? operands_text(instruction.a.text(a), instruction.b.text(b)) : "";
            kernels_.emplace_back(kernel_source({base.shape, instruction.mma, operands, kBareText, false}));
          }
        }
      }
    }
  }

  const char* name() const override { return "wgmma"; }
  const std::vector<std::string>& configs() const override { return names_; }
  bool has_config(std::string_view config) const override { return parse(config).has_value(); }

  Features features() const override {
    Features all = kEpilogueFeatures;
    all.add(Feature::kBlockScales);
    return all;
  }

  std::string reject_rest(const Problem& p, const Device& device, std::string_view config) const override {
    if (std::string rule = reject_other_devices(device, 90); !rule.empty()) return rule;
    const Parsed parsed = *parse(config);
    if (std::string rule = reject_types(p, type_rules(kConfigs[parsed.base_idx].shape.swapped)); !rule.empty()) {
      return rule;
    }
    if (p.batch > 0 && p.m > 0 && p.n > 0) {
      constexpr int64_t kMaxTiles = 1LL << 31;
      if (p.batch * parsed.num_splits * ((p.m + 63) / 64) * ((p.n + 15) / 16) >= kMaxTiles) {
        return "the output must be less than 2^31 tiles of 64x16";
      }
    }
    const Shape& shape = kConfigs[parsed.base_idx].shape;
    const Instruction& instruction = *find_instruction(p, shape.swapped);
    if (instruction.promotes && shape.promoted_parts() == 0) {
      return "config " + std::string(config) +
             " has too many accumulators for a second set in registers, to which those of " +
             "8-bit floats and of split-precision float32 are promoted; F8 presets with FAST_ACCUM leave them in the " +
             "tensor core";
    }
    const Plan plan = Plan::make(p, nullptr, nullptr, parsed);
    if (instruction.promotes && plan.b.major == Major::kMN && shape.promoted_column() != 0) {
      return "config " + std::string(config) + " promotes accumulators of half a tile's columns, for which B must be " +
             "K-major: descriptors of others leave too few registers";
    }
    if (!p.scales.is_none() && (p.alpha != 1.0 || p.beta != 0.0)) {
      return "a product with block scales must have alpha = 1 and beta = 0; pass them as an epilogue function";
    }
    return reject_scales(p.scales, p.m, p.n, p.k, instruction.promotes);
  }

  int64_t workspace_bytes(const Problem& p, const Device&, std::string_view config) const override {
    const Parsed parsed = *parse(config);
    if (find_instruction(p, kConfigs[parsed.base_idx].shape.swapped) == nullptr) return 0;
    return needed_bytes(p, parsed, Plan::make(p, nullptr, nullptr, parsed), expected_b_up(p));
  }

  std::vector<KernelSource> kernels(const Problem& p, const Device& device, std::string_view config) const override {
    const Parsed parsed = *parse(config);
    const Plan plan = Plan::make(p, nullptr, nullptr, parsed);
    std::vector<KernelSource> all =
        with_kernel_of(p, plan, parsed, [&](const KernelReference& x) { return std::vector{x.source_for(device)}; });
    if (!runs_epilogue(p, parsed)) {
      all.push_back(p.epilogue.function.is_none() ? split_reduction_source(p, parsed.num_splits, device)
                                                  : function_kernel_source(p, device));
    }
    for (const int element_bytes : copied_elements(p, plan, parsed)) all.push_back(copy_source(element_bytes, device));
    return all;
  }

  Status launch(const Problem& p, const Buffers& buffers, const Device& device, std::string_view config,
                void* stream) const override {
    const Parsed parsed = *parse(config);
    const NamedConfig& base = kConfigs[parsed.base_idx];
    const Plan plan = Plan::make(p, buffers.a, buffers.b, parsed);
    if (needed_bytes(p, parsed, plan, buffers.b_up) > buffers.workspace_bytes) {
      return Status::invalid("a and b must start on a 16-byte boundary where their strides are multiples of 16 bytes");
    }

    Call call{};
    call.batch = p.batch;
    call.batch_inner = p.batch_inner;
    call.m = base.shape.swapped ? p.n : p.m;
    call.n = base.shape.swapped ? p.m : p.n;
    call.k = p.k;
    call.geometry = {base.shape, plan.a.shape(), plan.b.shape()};
    const bool runs_function = !p.epilogue.function.is_none() && runs_epilogue(p, parsed);
    Status found =
        with_kernel_of(p, plan, parsed, [&](const KernelReference& x) { return x.find(device, &call.kernel); });
    if (!found.is_ok()) return found;
    call.out_type = float_type(p.out);
    call.d = buffers.d;
    call.num_splits = parsed.num_splits;
    call.symmetric = runs_symmetric(p, parsed);
    call.a_scales = operand_scales(p, buffers, !base.shape.swapped);
    call.b_scales = operand_scales(p, buffers, base.shape.swapped);
    call.stream = static_cast<cudaStream_t>(stream);

    char* workspace = static_cast<char*>(buffers.workspace);
    CopyJob copies[2] = {}, up_copies[2] = {};
    call.a = prepare(plan.a, p, &workspace, &copies[0]);
    call.b = plan.b.is_copied_as(plan.a) ? call.a : prepare(plan.b, p, &workspace, &copies[1]);
    if (p.has_two_b()) {
      call.b_up = prepare(second_b(plan, base.shape.swapped, buffers.b_up), p, &workspace, &up_copies[0]);
    }
    if (p.k == 0) {
      // Nothing to read, and addresses may be null: the kernel asks for zeros past the end of K only.
      call.a.data = call.b.data = call.b_up.data = buffers.d;
    } else {
      for (const auto& jobs : {&copies, &up_copies}) {
        if (Status s = launch_copies(*jobs, device, call.stream); !s.is_ok()) return s;
      }
    }

    if (runs_function) {
      call.problem = &p;
      call.buffers = &buffers;
    }
    if (runs_epilogue(p, parsed)) return launch_product(call);

    float* partials = reinterpret_cast<float*>(workspace);
    Call partial = call;
    partial.out_type = FloatType::kF32;
    for (int set = 0; set < SplitSums::num_sets(p); ++set) {
      if (set == 1) {
        (base.shape.swapped ? partial.a : partial.b) = call.b_up;
        OperandScales& scales = base.shape.swapped ? partial.a_scales : partial.b_scales;
        scales.data = scales.up_data;
      }
      partial.d = partials + set * SplitSums::set_elements(p, parsed.num_splits);
      if (Status s = launch_product(partial); !s.is_ok()) return s;
    }
    if (!p.epilogue.function.is_none()) {
      return launch_function(p, buffers, {partials, parsed.num_splits}, device, call.stream);
    }
    return launch_split_reduction(p, buffers, {partials, parsed.num_splits}, device, true, call.stream);
  }

 private:
  // Calls f with the kernel that multiplies, and runs the problem's function if the config's kernel does.
  template <typename Visitor>
  std::invoke_result_t<Visitor, const KernelReference&> with_kernel_of(const Problem& p, const Plan& plan,
                                                                       const Parsed& parsed, Visitor&& f) const {
    const bool runs_function = !p.epilogue.function.is_none() && runs_epilogue(p, parsed);
    const bool symmetric = runs_symmetric(p, parsed);
    if (!runs_function && !symmetric && p.scales.is_none()) return f(bare_kernel(plan, parsed));
    const Instruction& x = *plan.instruction;
    const std::string operands =
        operands_text(x.a.text(plan.a.major, plan.a.scaled_rows), x.b.text(plan.b.major, plan.b.scaled_rows));
    std::string epilogue = runs_function ? function_text(p.epilogue.function.name) : kBareText;
    if (symmetric) epilogue = symmetric_text(epilogue);
    return f(KernelReference(kernel_source({kConfigs[parsed.base_idx].shape, x.mma, operands, epilogue, false})));
  }

  const KernelReference& bare_kernel(const Plan& plan, const Parsed& parsed) const {
    const size_t row = parsed.base_idx * instructions().size() + (plan.instruction - instructions().data());
    const int majors = (plan.a.major == Major::kMN) * 2 + (plan.b.major == Major::kMN);
    return kernels_[row * 4 + majors];
  }

  // XLA's buffers are aligned, so that before a call only the strides decide, and where the second B begins.
  static const void* expected_b_up(const Problem& p) {
    return reinterpret_cast<const void*>(p.epilogue.up_offset * dtype_bytes(p.b.dtype));
  }

  // The sizes of elements of operands that a call copies.
  static std::set<int> copied_elements(const Problem& p, const Plan& plan, const Parsed& parsed) {
    std::set<int> sizes;
    const auto add = [&](const Source& source) {
      if (p.k > 0 && source.needs_copy()) sizes.insert(static_cast<int>(dtype_bytes(source.operand->dtype)));
    };
    add(plan.a);
    add(plan.b);
    if (p.has_two_b()) add(second_b(plan, kConfigs[parsed.base_idx].shape.swapped, expected_b_up(p)));
    return sizes;
  }

  static int64_t needed_bytes(const Problem& p, const Parsed& parsed, const Plan& plan, const void* b_up) {
    int64_t bytes = plan.a.copy_bytes(p) + plan.b.copy_bytes(p) + sums_bytes(p, parsed);
    if (p.has_two_b()) bytes += second_b(plan, kConfigs[parsed.base_idx].shape.swapped, b_up).copy_bytes(p);
    return round_up(bytes, 256);
  }

  // The operand itself where TMA can read it, else its copy at *workspace, which is advanced, and
  // the job that makes it.
  static AlignedOperand prepare(const Source& source, const Problem& p, char** workspace, CopyJob* job) {
    const Operand& x = *source.operand;
    if (!source.needs_copy()) return {source.data, x.dtype, x.ld, x.batch_outer_stride, x.batch_inner_stride};
    const int64_t ld = source.padded_columns(), inner = source.inner(p), outer = source.outer(p);
    *job = {source.data,
            *workspace,
            source.rows,
            source.columns,
            x.ld,
            x.batch_outer_stride,
            x.batch_inner_stride,
            ld,
            outer,
            inner,
            source.transpose,
            static_cast<int32_t>(dtype_bytes(x.dtype))};
    *workspace += source.copy_bytes(p);
    return {job->target, x.dtype, ld, outer == 1 ? 0 : inner * source.rows * ld, inner == 1 ? 0 : source.rows * ld};
  }

  std::vector<std::string> names_;
  static constexpr Major kMajors[] = {Major::kK, Major::kMN};

  std::deque<KernelReference> kernels_;  // [config][instruction][major of A][of B]
};

}  // namespace
}  // namespace wgmma_family

const Implementation* wgmma() {
  static const wgmma_family::Wgmma instance;
  return &instance;
}

}  // namespace tcgemm
