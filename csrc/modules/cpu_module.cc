// _cpu: the host implementation. Built everywhere.
#include <nanobind/nanobind.h>

#include "cpu/blas/host_blas.h"
#include "cpu/executor.h"
#include "cpu/host_gemm.h"
#include "cpu/host_ragged.h"
#include "cpu/host_rows.h"
#include "ffi/call.h"
#include "modules/queries.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace tcgemm {
namespace {

const Implementations& implementations() {
  static const Implementations all{host_gemm()};
  return all;
}

const RaggedImplementations& ragged_implementations() {
  static const RaggedImplementations all{host_ragged()};
  return all;
}

const RowsImplementations& rows_implementations() {
  static const RowsImplementations all{host_rows()};
  return all;
}

const blas::Implementations& blas_implementations() {
  static const blas::Implementations all{host_blas()};
  return all;
}

Executor executor_on(ffi::ThreadPool& pool) {
  return Executor(static_cast<int>(pool.num_threads()),
                  [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
}

template <const auto& (*kImplementations)()>
ffi::Error call(ffi::ThreadPool pool, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Executor executor = executor_on(pool);
  return run_call(kImplementations(), Device{}, &executor, attributes, operands, results);
}

auto binding(const char* attributes) {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<ffi::Dictionary>(attributes).RemainingArgs().RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(gemm_handler, call<implementations>, binding("gemm"));
XLA_FFI_DEFINE_HANDLER(ragged_handler, call<ragged_implementations>, binding("ragged"));
XLA_FFI_DEFINE_HANDLER(rows_handler, call<rows_implementations>, binding("rows"));
XLA_FFI_DEFINE_HANDLER(blas_handler, call<blas_implementations>, binding("blas"));

}  // namespace
}  // namespace tcgemm

NB_MODULE(_cpu, module) {
  module.def("registrations", [] {
    nb::dict targets;
    targets["tcgemm_gemm"] = nb::capsule(reinterpret_cast<void*>(tcgemm::gemm_handler));
    targets["tcgemm_ragged"] = nb::capsule(reinterpret_cast<void*>(tcgemm::ragged_handler));
    targets["tcgemm_rows"] = nb::capsule(reinterpret_cast<void*>(tcgemm::rows_handler));
    targets["tcgemm_blas"] = nb::capsule(reinterpret_cast<void*>(tcgemm::blas_handler));
    return targets;
  });
  module.attr("abi_version") = tcgemm::kAbiVersion;
  tcgemm::define_queries(module, tcgemm::implementations());
  nb::module_ ragged = module.def_submodule("ragged", "The same queries for grouped products.");
  tcgemm::define_queries(ragged, tcgemm::ragged_implementations());
  nb::module_ rows = module.def_submodule("rows", "The same queries for sums and products of rows.");
  tcgemm::define_queries(rows, tcgemm::rows_implementations());
  nb::module_ blas = module.def_submodule("blas", "The same queries for BLAS calls.");
  tcgemm::define_queries(blas, tcgemm::blas_implementations());
}
