// _cutensor: tensor operations by cuTENSOR. Links the static CUDA runtime only and opens cuTENSOR at run
// time, so it imports without a GPU, a driver and cuTENSOR.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/fields.h"
#include "ffi/checks.h"
#include "ffi/cutensor.h"
#include "libraries/cutensor/library.h"
#include "modules/queries.h"
#include "modules/state_type.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace tcgemm::cutensor {
namespace {

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate, ffi::Ffi::BindInstantiate().Attrs<ffi::Dictionary>());

XLA_FFI_DEFINE_HANDLER(execute_handler, execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::State<PlannedCall>>()
                           .Attrs<ffi::Dictionary>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

// The operation that a query describes, by the attributes of the FFI call; its workspace is what is asked for.
Operation operation_from(const nb::dict& fields) {
  Operation o;
  const Query query(fields);
  FieldReader<Query> reader(query);
  visit_fields(o, reader);
  const std::string error = reader.error().empty() ? check_operation(o) : reader.error();
  if (!error.empty()) throw nb::value_error(error.c_str());
  return o;
}

}  // namespace
}  // namespace tcgemm::cutensor

NB_MODULE(_cutensor, module) {
  using namespace tcgemm;
  using namespace tcgemm::cutensor;
  module.def("registrations", [] {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(instantiate_handler));
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute_handler));
    nb::dict targets;
    targets["tcgemm_tensor"] = stages;
    return targets;
  });
  define_state_type<PlannedCall>(module, "tcgemm_planned_call");
  module.attr("abi_version") = kAbiVersion;
  module.attr("max_plans") = kMaxPlans;
  module.attr("workspace_alignment") = kWorkspaceAlignment;
  module.def("unary_operators", &unary_operators);
  module.def("binary_operators", &binary_operators);
  module.def("load_cutensor", &load, nb::arg("path"),
             "Opens cuTENSOR from `path` (or finds it already loaded); returns the reason when that fails, else ''.");
  module.def(
      "version",
      [] {
        const Api* found = api();
        return found == nullptr ? 0 : static_cast<int64_t>(found->cutensorGetVersion());
      },
      "10000 * major + 100 * minor + patch of the library that is open; 0 when none is.");
  module.def(
      "check", [](nb::dict operation) { operation_from(operation); }, nb::arg("operation"),
      "ValueError when the dictionary does not describe an operation.");
  module.def(
      "estimate_workspace",
      [](nb::dict operation) {
        int64_t bytes = 0;
        const Status status = estimate_workspace(operation_from(operation), &bytes);
        return nb::make_tuple(status.message, bytes);
      },
      nb::arg("operation"), "Why cuTENSOR cannot run the operation on this device, or ''; and the workspace it likes.");
  module.def("plan_cache", [] {
    const PlanCacheCounts counts = plan_cache_counts();
    nb::dict dict;
    dict["hits"] = counts.hits;
    dict["misses"] = counts.misses;
    dict["evictions"] = counts.evictions;
    dict["size"] = counts.size;
    return dict;
  });
  module.def("clear_plan_cache", &clear_plan_cache);
}
