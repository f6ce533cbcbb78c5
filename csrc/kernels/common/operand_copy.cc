#include "kernels/common/operand_copy.h"

#include <string>

#include "core/extent.h"
#include "kernels/common/kernel.h"
#include "kernels/common/launch_blocks.h"

namespace tcgemm {
namespace operand_copy {
namespace {

RowWalk make_walk(const CopyJob& job) {
  const int64_t chunks = ceil_div(job.columns * job.element_bytes, 16);
  RowWalk walk{static_cast<int32_t>(chunks), 0, 0, 0};
  while (walk.log2_lanes < 5 && (int64_t{1} << walk.log2_lanes) < chunks) ++walk.log2_lanes;
  walk.segments = static_cast<int32_t>(ceil_div(chunks, kSteps << walk.log2_lanes));
  walk.steps = static_cast<int32_t>(ceil_div(chunks, int64_t{walk.segments} << walk.log2_lanes));
  return walk;
}

Part make_part(const CopyJob& job) {
  Part part{};
  part.job = job;
  if (job.rows == 0) return part;
  const int64_t batches = job.outer * job.inner;
  part.inner = Divisor(job.inner);
  if (job.transpose) {
    const int64_t tiles_r = ceil_div(job.rows, kTile), tiles_c = ceil_div(job.columns, kTile);
    part.tiles_r = Divisor(tiles_r);
    part.tiles_c = Divisor(tiles_c);
    part.blocks = batches * tiles_r * tiles_c;
  } else {
    part.walk = make_walk(job);
    part.segments = Divisor(part.walk.segments);
    part.rows = Divisor(job.rows);
    const int64_t groups = ceil_div(batches * job.rows, 32 >> part.walk.log2_lanes);
    part.blocks = ceil_div(groups * part.walk.segments, kWarps);
  }
  return part;
}

// That for elements of so many bytes.
const KernelReference& reference_to(int element_bytes) {
  static KernelReferences<int>& references = *new KernelReferences<int>;
  return references.get(element_bytes, [&]() -> KernelSource {
    return {"kernels/common/operand_copy_kernel.cuh",
            "tcgemm::operand_copy::copy_operands<uint" + std::to_string(8 * element_bytes) + "_t>", "sm_90a"};
  });
}

// Those jobs whose elements have so many bytes.
Status launch(const CopyJob (&jobs)[2], int element_bytes, const Device& device, cudaStream_t stream) {
  Copies copies{};
  for (int i = 0; i < 2; ++i) {
    if (jobs[i].element_bytes == element_bytes) copies.parts[i] = make_part(jobs[i]);
  }
  for (const Part& part : copies.parts) {
    if (part.job.outer * part.job.inner * part.job.rows > INT32_MAX - 32 || part.blocks * kWarps > INT32_MAX) {
      return Status::invalid("an operand that needs a copy must have less than 2^31 rows and pieces of 2 KiB");
    }
  }
  const int64_t blocks = copies.parts[0].blocks + copies.parts[1].blocks;
  if (blocks == 0) return Status::ok();
  Kernel* kernel = nullptr;
  if (Status s = reference_to(element_bytes).find(device, &kernel); !s.is_ok()) return s;
  return launch_early("operand copy kernel", *kernel, blocks, kThreads, true, stream, copies);
}

}  // namespace
}  // namespace operand_copy

KernelSource copy_source(int element_bytes, const Device& device) {
  return operand_copy::reference_to(element_bytes).source_for(device);
}

Status launch_copies(const CopyJob (&jobs)[2], const Device& device, cudaStream_t stream) {
  for (const int element_bytes : {1, 2, 4}) {
    if (Status s = operand_copy::launch(jobs, element_bytes, device, stream); !s.is_ok()) return s;
  }
  return Status::ok();
}

}  // namespace tcgemm
