#include "kernels/common/reduction.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "core/extent.h"
#include "kernels/common/alignment.h"
#include "kernels/common/float_type.h"
#include "kernels/common/kernel.h"
#include "kernels/common/launch_blocks.h"
#include "kernels/common/reduction_params.cuh"
#include "kernels/common/type_text.h"

namespace tcgemm {
namespace {

using namespace reduction;

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

// Whether loads of 16 bytes serve every row of an array of so many elements each.
bool has_vectors(int64_t row_elements, DType dtype) { return row_elements * dtype_bytes(dtype) % 16 == 0; }

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

// The kernel for one pass; `count`: elements of a load.
const KernelReference& reference_to(DType in, bool is_rows, int count) {
  static KernelReferences<std::array<int, 3>>& references = *new KernelReferences<std::array<int, 3>>;
  return references.get({static_cast<int>(in), is_rows, count}, [&]() -> KernelSource {
    return {"kernels/common/reduction_kernel.cuh",
            std::string("tcgemm::reduction::") + (is_rows ? "rows_kernel<" : "columns_kernel<") + element_text(in) +
                ", " + std::to_string(count) + ">",
            {}};
  });
}

// Length of a contiguous row of the input: the reduced extent, or the inner one.
int64_t row_elements(const Pass& pass) { return pass.inner == 1 ? pass.reduced : pass.inner; }

Status launch_pass(DType in_type, Pass pass, const void* in, void* out, const Device& device, cudaStream_t stream) {
  const bool is_rows = pass.inner == 1, is_vector = is_aligned(in, 16) && has_vectors(row_elements(pass), in_type);
  const int count = is_vector ? static_cast<int>(16 / dtype_bytes(in_type)) : 1;
  Kernel* kernel = nullptr;
  if (Status s = reference_to(in_type, is_rows, count).find(device, &kernel); !s.is_ok()) return s;
  int64_t blocks = 0;
  if (is_rows) {
    constexpr int64_t kLongRowBytes = 8192;
    const bool is_long = pass.elements_per_split * dtype_bytes(in_type) >= kLongRowBytes;
    pass.warps_per_row = is_long ? kThreads / 32 : 1;
    blocks = ceil_div(pass.outer * pass.splits, is_long ? 1 : kThreads / 32);
  } else {
    const int64_t columns = ceil_div(pass.inner, count);
    pass.threads_inner = 1;
    while (pass.threads_inner < 32 && pass.threads_inner < columns) pass.threads_inner *= 2;
    pass.inner_tiles = ceil_div(columns, pass.threads_inner);
    blocks = pass.outer * pass.splits * pass.inner_tiles;
  }
  const auto launch = [&](auto infinity) {
    return launch_blocks("reduction kernel", *kernel, blocks, kThreads, 0, stream, in, out, pass, infinity);
  };
  if (in_type == DType::kF64) return launch(std::numeric_limits<double>::infinity());
  return launch(std::numeric_limits<float>::infinity());
}

// The launches of a reduction: one, or one for the splits and one that reduces their results, a small array (outer,
// splits, inner).
std::vector<Pass> passes_of(const Reduction& r, int num_sms) {
  Pass pass{};
  parse_op(r.op, &pass.op);
  pass.outer = r.outer;
  pass.reduced = r.reduced;
  pass.inner = r.inner;
  const int64_t splits = num_splits(r, num_sms);
  pass.elements_per_split = splits == 1 ? r.reduced : ceil_div(ceil_div(r.reduced, splits), 128) * 128;
  pass.splits = ceil_div(r.reduced, pass.elements_per_split);
  pass.out = float_type(r.out);
  if (pass.splits == 1) return {pass};
  Pass first = pass, second = pass;
  first.out = FloatType::kF32;
  second.reduced = second.elements_per_split = pass.splits;
  second.splits = 1;
  return {first, second};
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

// Where the operand begins is known to a call only.
std::vector<KernelSource> reduction_sources(const Reduction& r, const Device& device) {
  std::vector<KernelSource> all;
  DType in = r.in;
  for (const Pass& pass : passes_of(r, device.num_sms)) {
    const bool is_rows = pass.inner == 1;
    all.push_back(reference_to(in, is_rows, 1).source_for(device));
    if (has_vectors(row_elements(pass), in)) {
      all.push_back(reference_to(in, is_rows, static_cast<int>(16 / dtype_bytes(in))).source_for(device));
    }
    in = accumulator_dtype(r.in);
  }
  return all;
}

Status launch_reduction(const Reduction& r, const Device& device, const void* in, void* out, void* workspace,
                        void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const std::vector<Pass> passes = passes_of(r, device.num_sms);
  if (passes.size() == 1) return launch_pass(r.in, passes[0], in, out, device, stream);
  if (Status s = launch_pass(r.in, passes[0], in, workspace, device, stream); !s.is_ok()) return s;
  return launch_pass(accumulator_dtype(r.in), passes[1], workspace, out, device, stream);
}

}  // namespace tcgemm
