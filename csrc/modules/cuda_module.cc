// _cuda: the host side of the hand-written kernels, and the vendor libraries. Links the static CUDA runtime only,
// so it imports on a machine with no GPU and no driver.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include "core/cuda_status.h"
#include "core/device_headers_hash.h"
#include "ffi/call.h"
#include "ffi/device.h"
#include "ffi/fragment_probe.h"
#include "ffi/kernel.h"
#include "ffi/tensor_kernels.h"
#include "kernels/all_reduce/group.h"
#include "kernels/common/kernel.h"
#include "kernels/kernels.h"
#include "libraries/cublas/cublas.h"
#include "libraries/cublaslt/cublaslt.h"
#include "modules/queries.h"
#include "modules/state_type.h"
#include "modules/tensor_queries.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace tcgemm {
namespace {

const Implementations& implementations() {
  static const Implementations all{simt_naive(), simt_tiled(), simt_batched(), wmma_naive(),
                                   wmma_tiled(), mma_sync(),   wgmma(),        cublaslt()};
  return all;
}

const RaggedImplementations& ragged_implementations() {
  static const RaggedImplementations all{mma_sync_ragged(), wgmma_ragged()};
  return all;
}

const RowsImplementations& rows_implementations() {
  static const RowsImplementations all{simt_rows()};
  return all;
}

const PackedImplementations& packed_implementations() {
  static const PackedImplementations all{packed_products()};
  return all;
}

const QuantizeImplementations& quantize_implementations() {
  static const QuantizeImplementations all{quantizer()};
  return all;
}

const SplitImplementations& split_implementations() {
  static const SplitImplementations all{splitter()};
  return all;
}

const AllReduceImplementations& all_reduce_implementations() {
  static const AllReduceImplementations all{peer_memory_all_reduce()};
  return all;
}

const blas::Implementations& blas_implementations() {
  static const blas::Implementations all{cublas_blas()};
  return all;
}

// Runs one call on the current device.
template <typename Problem, typename Buffers>
ffi::Error run_here(const ImplementationsOf<Problem, Buffers>& implementations, cudaStream_t stream,
                    const ffi::Dictionary& attributes, const ffi::RemainingArgs& operands,
                    const ffi::RemainingRets& results, const Buffers& initial = {}) {
  Device device;
  if (Status s = current_device(&device); !s.is_ok()) return ffi::Error::Internal("jax_tcgemm: " + s.message);
  return run_call(implementations, device, stream, attributes, operands, results, initial);
}

template <const auto& (*kImplementations)()>
ffi::Error call(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  return run_here(kImplementations(), stream, attributes, operands, results);
}

auto binding(const char* attributes) {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Attr<ffi::Dictionary>(attributes)
      .RemainingArgs()
      .RemainingRets();
}

XLA_FFI_DEFINE_HANDLER(gemm_handler, call<implementations>, binding("gemm"), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(ragged_handler, call<ragged_implementations>, binding("ragged"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(rows_handler, call<rows_implementations>, binding("rows"), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(packed_handler, call<packed_implementations>, binding("packed"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(quantize_handler, call<quantize_implementations>, binding("quantize"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(split_handler, call<split_implementations>, binding("split"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(blas_handler, call<blas_implementations>, binding("blas"), {ffi::Traits::kCmdBufferCompatible});

// Before the first execution, so that no handle need be created while a graph is captured.
ffi::Error blas_initialize(ffi::Dictionary) {
  const Status status = prepare_cublas();
  return status.is_ok() ? ffi::Error::Success() : ffi::Error::Internal("jax_tcgemm: " + status.message);
}

XLA_FFI_DEFINE_HANDLER(blas_initialize_handler, guarded(blas_initialize),
                       ffi::Ffi::BindInitialize().Attr<ffi::Dictionary>("blas"));

// The state of an all-reduce, which the devices of a program share.
struct AllReduceState {
  static ffi::TypeId id;

  explicit AllReduceState(int64_t num_devices) : call(num_devices) {}

  all_reduce::CallState call;
};
ffi::TypeId AllReduceState::id{};

ffi::ErrorOr<std::unique_ptr<AllReduceState>> all_reduce_instantiate(ffi::Dictionary attributes) {
  try {
    const auto devices = attributes.get<int64_t>("devices");
    if (devices.has_error() || *devices < 1) {
      return ffi::Unexpected(invalid("all_reduce: devices must be a positive 64-bit integer"));
    }
    return std::make_unique<AllReduceState>(*devices);
  } catch (const std::exception& error) {
    return ffi::Unexpected(ffi::Error::Internal(std::string("jax_tcgemm: ") + error.what()));
  }
}

XLA_FFI_DEFINE_HANDLER(all_reduce_instantiate_handler, all_reduce_instantiate,
                       ffi::Ffi::BindInstantiate().Attr<ffi::Dictionary>("all_reduce"));

ffi::Error all_reduce_initialize(cudaStream_t stream, AllReduceState* state, ffi::RunId run) {
  int ordinal = 0;
  Status status = cuda_status(cudaGetDevice(&ordinal), "cudaGetDevice");
  if (status.is_ok()) status = state->call.begin(ordinal, run.run_id, stream);
  return to_ffi_error("all_reduce", status);
}

XLA_FFI_DEFINE_HANDLER(all_reduce_initialize_handler, guarded(all_reduce_initialize),
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::State<AllReduceState>>()
                           .Ctx<ffi::RunId>());

ffi::Error all_reduce_execute(cudaStream_t stream, AllReduceState* state, ffi::Dictionary attributes,
                              ffi::RemainingArgs operands, ffi::RemainingRets results) {
  AllReduceBuffers initial;
  initial.state = &state->call;
  return run_here(all_reduce_implementations(), stream, attributes, operands, results, initial);
}

XLA_FFI_DEFINE_HANDLER(all_reduce_handler, all_reduce_execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::State<AllReduceState>>()
                           .Attr<ffi::Dictionary>("all_reduce")
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

// What is wrong with operands that are not `count` and kernels after them; "" for nothing.
std::string check_count(const ffi::RemainingArgs& operands, size_t count) {
  const size_t given = count_operands(operands);
  return given == count ? "" : "operands must be " + std::to_string(count) + ", got " + std::to_string(given);
}

ffi::Error transpose_here(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                          ffi::Result<ffi::AnyBuffer> out) {
  if (std::string error = check_count(operands, 1); !error.empty()) return invalid("transpose: " + error);
  return transpose(stream, attributes, *operands.get<ffi::AnyBuffer>(0), out);
}

XLA_FFI_DEFINE_HANDLER(transpose_handler, guarded(transpose_here),
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attrs<ffi::Dictionary>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

ffi::Error reduce_here(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                       ffi::RemainingRets results) {
  if (std::string error = check_count(operands, 1); !error.empty()) return invalid("reduce: " + error);
  return reduce(stream, attributes, *operands.get<ffi::AnyBuffer>(0), results);
}

XLA_FFI_DEFINE_HANDLER(
    reduce_handler, guarded(reduce_here),
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Attrs<ffi::Dictionary>().RemainingArgs().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});

ffi::Error kernel_initialize(ffi::Dictionary attributes) {
  return initialize_kernel(attributes, kDeviceHeadersHash, &load_known_kernel, &load_kernel);
}

XLA_FFI_DEFINE_HANDLER(kernel_initialize_handler, guarded(kernel_initialize),
                       ffi::Ffi::BindInitialize().Attr<ffi::Dictionary>("kernel"));

ffi::Error kernel_execute(ffi::Dictionary, ffi::Result<ffi::AnyBuffer> kernel) {
  return kernel->element_type() == ffi::DataType::PRED ? ffi::Error::Success()
                                                       : invalid("kernel: the result must be of type pred");
}

XLA_FFI_DEFINE_HANDLER(kernel_handler, kernel_execute,
                       ffi::Ffi::Bind().Attr<ffi::Dictionary>("kernel").Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

ffi::Error fragment_probe_here(cudaStream_t stream, std::string_view shape, std::string_view dtype,
                               std::string_view operand, bool column_major, ffi::RemainingArgs operands,
                               ffi::Result<ffi::AnyBuffer> out) {
  if (std::string error = check_count(operands, 0); !error.empty()) return invalid("fragment_probe: " + error);
  return fragment_probe(stream, shape, dtype, operand, column_major, out);
}

XLA_FFI_DEFINE_HANDLER(fragment_probe_handler, guarded(fragment_probe_here),
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<std::string_view>("shape")
                           .Attr<std::string_view>("dtype")
                           .Attr<std::string_view>("operand")
                           .Attr<bool>("column_major")
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>());

ffi::Error fragment_mma_here(cudaStream_t stream, std::string_view shape, std::string_view dtype,
                             std::string_view accumulator, ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> d) {
  if (std::string error = check_count(operands, 2); !error.empty()) return invalid("fragment_mma: " + error);
  return fragment_mma(stream, shape, dtype, accumulator, *operands.get<ffi::AnyBuffer>(0),
                      *operands.get<ffi::AnyBuffer>(1), d);
}

XLA_FFI_DEFINE_HANDLER(fragment_mma_handler, guarded(fragment_mma_here),
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attr<std::string_view>("shape")
                           .Attr<std::string_view>("dtype")
                           .Attr<std::string_view>("accumulator")
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>());

}  // namespace
}  // namespace tcgemm

NB_MODULE(_cuda, module) {
  using namespace tcgemm;
  module.def("registrations", [] {
    nb::dict targets;
    targets["tcgemm_gemm"] = nb::capsule(reinterpret_cast<void*>(gemm_handler));
    targets["tcgemm_ragged"] = nb::capsule(reinterpret_cast<void*>(ragged_handler));
    targets["tcgemm_rows"] = nb::capsule(reinterpret_cast<void*>(rows_handler));
    targets["tcgemm_packed"] = nb::capsule(reinterpret_cast<void*>(packed_handler));
    targets["tcgemm_quantize"] = nb::capsule(reinterpret_cast<void*>(quantize_handler));
    targets["tcgemm_split"] = nb::capsule(reinterpret_cast<void*>(split_handler));
    targets["tcgemm_transpose"] = nb::capsule(reinterpret_cast<void*>(transpose_handler));
    targets["tcgemm_reduce"] = nb::capsule(reinterpret_cast<void*>(reduce_handler));
    nb::dict blas_stages;
    blas_stages["initialize"] = nb::capsule(reinterpret_cast<void*>(blas_initialize_handler));
    blas_stages["execute"] = nb::capsule(reinterpret_cast<void*>(blas_handler));
    targets["tcgemm_blas"] = blas_stages;
    nb::dict all_reduce_stages;
    all_reduce_stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(all_reduce_instantiate_handler));
    all_reduce_stages["initialize"] = nb::capsule(reinterpret_cast<void*>(all_reduce_initialize_handler));
    all_reduce_stages["execute"] = nb::capsule(reinterpret_cast<void*>(all_reduce_handler));
    targets["tcgemm_all_reduce"] = all_reduce_stages;
    nb::dict kernel_stages;
    kernel_stages["initialize"] = nb::capsule(reinterpret_cast<void*>(kernel_initialize_handler));
    kernel_stages["execute"] = nb::capsule(reinterpret_cast<void*>(kernel_handler));
    targets["tcgemm_kernel"] = kernel_stages;
    targets["tcgemm_fragment_probe"] = nb::capsule(reinterpret_cast<void*>(fragment_probe_handler));
    targets["tcgemm_fragment_mma"] = nb::capsule(reinterpret_cast<void*>(fragment_mma_handler));
    return targets;
  });
  define_state_type<AllReduceState>(module, "tcgemm_all_reduce_state");
  module.attr("abi_version") = kAbiVersion;
  module.attr("device_headers_hash") = kDeviceHeadersHash;
  define_queries(module, implementations());
  nb::module_ ragged_queries = module.def_submodule("ragged", "The same queries for grouped products.");
  define_queries(ragged_queries, ragged_implementations());
  nb::module_ rows_queries = module.def_submodule("rows", "The same queries for sums and products of rows.");
  define_queries(rows_queries, rows_implementations());
  nb::module_ packed_queries = module.def_submodule("packed", "The same queries for products with packed weights.");
  define_queries(packed_queries, packed_implementations());
  nb::module_ quantize_queries = module.def_submodule("quantize", "The same queries for arrays of 8 bits.");
  define_queries(quantize_queries, quantize_implementations());
  nb::module_ split_queries = module.def_submodule("split", "The same queries for terms of operands.");
  define_queries(split_queries, split_implementations());
  nb::module_ all_reduce_queries = module.def_submodule("all_reduce", "The same queries for sums over devices.");
  define_queries(all_reduce_queries, all_reduce_implementations());
  all_reduce_queries.def(
      "peer_access_reason", [] { return all_reduce::check_peer_access().message; },
      "Why some GPU of this process cannot access another one's memory; empty where all can.");
  define_tensor_queries(module);
  module.def(
      "fragment_kernels",
      [](const std::string& shape, const std::string& dtype, const std::string& operand, nb::dict device) {
        return as_tuples(wmma::fragment_kernels(shape, dtype, operand, device_from(device)));
      },
      nb::arg("shape"), nb::arg("dtype"), nb::arg("operand"), nb::arg("device"),
      "What a program brings for tcgemm_fragment_probe and, with the accumulator's dtype, tcgemm_fragment_mma.");
  nb::module_ blas_queries = module.def_submodule("blas", "The same queries for BLAS calls.");
  define_queries(blas_queries, blas_implementations());
  module.def("load_cublas", &load_cublas, nb::arg("path"), "As load_cublaslt, for cuBLAS.");
  module.def("cublas_version", &cublas_version);
  module.def(
      "set_cublas_logging",
      [](const std::string& path) {
        if (Status s = set_cublas_logging(path); !s.is_ok()) throw std::runtime_error(s.message);
      },
      nb::arg("path"), "Where cuBLAS logs its calls: a file, stdout or stderr; nowhere for ''.");
  module.def("load_cublaslt", &load_cublaslt, nb::arg("path"),
             "Opens cuBLASLt from `path` (or finds it already loaded); returns the reason when that fails, else ''.");
  module.def(
      "device",
      [](int ordinal) {
        Device device;
        cudaDeviceProp properties;
        Status status = cuda_status(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
        if (status.is_ok()) status = query_device(ordinal, &device);
        int driver = 0, runtime = 0;
        if (status.is_ok()) status = cuda_status(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
        if (status.is_ok()) status = cuda_status(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
        if (!status.is_ok()) throw std::runtime_error(status.message);
        nb::dict dict;
        dict["name"] = properties.name;
        dict["compute_capability"] = device.compute_capability;
        dict["num_sms"] = device.num_sms;
        dict["shared_memory_bytes"] = device.shared_memory_bytes;
        dict["l2_bytes"] = properties.l2CacheSize;
        dict["memory_bytes"] = static_cast<int64_t>(properties.totalGlobalMem);
        dict["driver_version"] = driver;
        dict["runtime_version"] = runtime;
        return dict;
      },
      nb::arg("ordinal") = 0, "Properties of a CUDA device; RuntimeError with the reason when there is none.");
}
