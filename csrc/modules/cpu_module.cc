// _cpu: the host implementation. Built everywhere.
#include <nanobind/nanobind.h>

#include "cpu/executor.h"
#include "cpu/host_gemm.h"
#include "ffi/gemm.h"
#include "modules/queries.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace tcgemm {
namespace {

const Implementations& implementations() {
  static const Implementations all{host_gemm()};
  return all;
}

ffi::Error gemm(ffi::ThreadPool pool, GemmAttributes attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Executor executor(static_cast<int>(pool.num_threads()),
                    [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return run_gemm(implementations(), Device{}, &executor, attributes, operands, results);
}

XLA_FFI_DEFINE_HANDLER(
    gemm_handler, gemm,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<GemmAttributes>("gemm").RemainingArgs().RemainingRets());

}  // namespace
}  // namespace tcgemm

NB_MODULE(_cpu, module) {
  module.def("registrations", [] {
    nb::dict targets;
    targets["tcgemm_gemm"] = nb::capsule(reinterpret_cast<void*>(tcgemm::gemm_handler));
    return targets;
  });
  module.attr("abi_version") = tcgemm::kAbiVersion;
  module.def("activations", &tcgemm::activation_names);
  tcgemm::define_queries(module, tcgemm::implementations(), &tcgemm::problem_from);
}
