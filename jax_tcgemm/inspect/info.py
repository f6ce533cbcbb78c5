"""Versions, GPUs and implementations of this installation."""

import dataclasses
import importlib.metadata
import io
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from jax_tcgemm import _build, tensor
from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import cutensor, listed, target_device
from jax_tcgemm.system import modules
from jax_tcgemm.tensor.contract import ALGORITHMS

# Of the _cuda module, bottom to top of the ladder; needed where the module is missing.
CUDA_IMPLEMENTATIONS = (
    "simt_naive",
    "simt_tiled",
    "simt_batched",
    "wmma_naive",
    "wmma_tiled",
    "mma_sync",
    "wgmma",
    "cublaslt",
)
# (operand, output, compute, m = n = k). An implementation that refuses all is unavailable.
_PROBES = (
    ("bf16", "bf16", "f32", 256),
    ("f16", "f16", "f32", 256),
    ("f32", "f32", "f32", 256),
    ("f32", "f32", "tf32", 256),
    ("f64", "f64", "f64", 256),
    ("s8", "s32", "s32", 256),
    ("f32", "f32", "f32", 16),
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A CUDA device as the driver describes it."""

    ordinal: int
    name: str
    compute_capability: str
    num_sms: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class ImplementationInfo:
    """An implementation: the platform it serves and, where it is not available, the reason."""

    name: str
    platform: str
    available: bool
    reason: str
    configs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Info:
    """Result of `info`, which prints as tables.

    Attributes:
      versions: version of each component, or the reason why the component is missing.
      gpus: the CUDA devices.
      gpu_reason: reason why no implementation can run on a GPU; empty if one can.
      implementations: every implementation, with the reason for each that is not available.
      plan_cache: counters of the plan cache of `tensor`.
    """

    versions: dict[str, str]
    gpus: tuple[Gpu, ...]
    gpu_reason: str
    implementations: tuple[ImplementationInfo, ...]
    plan_cache: dict[str, int]

    def as_dict(self) -> dict:
        """Return the fields as dictionaries, lists, strings and numbers, for JSON."""
        fields = dataclasses.asdict(self)
        fields["gpus"] = list(fields["gpus"])
        fields["implementations"] = [
            entry | {"configs": list(entry["configs"])} for entry in fields["implementations"]
        ]
        return fields

    def __rich__(self):
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        def table(*headings: str) -> Table:
            return Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)

        versions = table("component", "version")
        for name, version in self.versions.items():
            versions.add_row(name, version)
        gpus = table("GPU", "name", "compute capability", "SMs", "memory")
        for gpu in self.gpus:
            memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
            gpus.add_row(
                str(gpu.ordinal), gpu.name, gpu.compute_capability, str(gpu.num_sms), memory
            )
        if not self.gpus:
            gpus = Text(f"No GPU: {self.gpu_reason}")
        implementations = table("implementation", "platform", "available", "configs / reason")
        for entry in self.implementations:
            implementations.add_row(
                entry.name,
                entry.platform,
                "yes" if entry.available else "no",
                Text(listed(entry.configs, " ") if entry.available else entry.reason),
            )
        plans = ", ".join(f"{name} {count}" for name, count in self.plan_cache.items())
        return Group(versions, "", gpus, "", implementations, "", f"Plans of cuTENSOR: {plans}")

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(
            file=out, width=max(80, shutil.get_terminal_size((120, 24)).columns), highlight=False
        ).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver_version() -> str:
    """The driver's release, such as 580.95.05, and the CUDA version it supports."""
    device = modules.cuda_device()
    supports = f"supports CUDA {_cuda_version(device['driver_version'])}" if device else ""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return supports or "none"
    release = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return ", ".join(filter(None, (release[0] if release else "", supports))) or "unknown"


def _versions() -> dict[str, str]:
    return {
        "jax_tcgemm": _version("jax_tcgemm"),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "numpy": _version("numpy"),
        "Python": platform.python_version(),
        "C++ compiler of this build": _build.CXX_COMPILER,
        "CUDA of this build": _build.CUDA_VERSION,
        "NVIDIA driver": _driver_version(),
        "cuTENSOR": _cutensor_version() or "not installed",
        "NVRTC": nvrtc.version() or f"not available: {nvrtc.reason()}",
        "cuBLAS": "not found" if modules.cublas_reason() else modules.cuda.cublas_version(),
    }


def _cutensor_version() -> str:
    """The version of the library, such as 2.8.1; "" where it cannot be used."""
    if modules.reason("cutensor"):
        return ""
    number = modules.cutensor.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _gpus() -> Iterator[Gpu]:
    if modules.cuda_device() is None:
        return
    ordinal = 0
    while True:
        try:
            device = modules.cuda.device(ordinal)
        except RuntimeError:
            return
        major, minor = divmod(device["compute_capability"], 10)
        yield Gpu(
            ordinal, device["name"], f"{major}.{minor}", device["num_sms"], device["memory_bytes"]
        )
        ordinal += 1


def _gpu_reason() -> str:
    """Why no implementation can run on a GPU; "" when some can."""
    if reason := modules.reason("cuda") or modules.reason("gpu"):
        return reason
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError as error:
        return f"JAX does not use the GPU: {error}"
    return ""


def _probe(dtype: str, out_dtype: str, compute: str, size: int) -> Problem:
    matrix = Operand(dtype, transposed=False, ld=size, outer_stride=0, inner_stride=0)
    return Problem(1, 1, size, size, size, matrix, matrix, out_dtype, compute)


def _device_reason(name: str, config: str) -> str:
    """Why the implementation refuses even the plainest products on this GPU, or ""."""
    device = target_device("cuda").query()
    reasons = []
    for probe in _PROBES:
        reason = modules.cuda.reject(name, config, _probe(*probe).query(), device)
        if not reason:
            return ""
        reasons.append(reason)
    return reasons[0]


def _implementations(gpu_reason: str) -> Iterator[ImplementationInfo]:
    known = (
        modules.cuda.implementations() if modules.cuda else dict.fromkeys(CUDA_IMPLEMENTATIONS, ())
    )
    for name, configs in known.items():
        reason = gpu_reason
        if not reason and name == "cublaslt":
            reason = modules.cublaslt_reason()
        if not reason:
            reason = _device_reason(name, configs[0])
        yield ImplementationInfo(name, "cuda", not reason, reason, tuple(configs))
    reason = gpu_reason or modules.cublas_reason()
    yield ImplementationInfo("cublas", "cuda", not reason, reason, ("default",))
    reason = gpu_reason or cutensor.reason()
    yield ImplementationInfo("cutensor", "cuda", not reason, reason, ALGORITHMS)
    host = modules.cpu.implementations() if modules.cpu else {"host": ()}
    for name, configs in host.items():
        reason = modules.reason("cpu")
        yield ImplementationInfo(name, "cpu", not reason, reason, tuple(configs))
    yield ImplementationInfo("xla", "any", True, "", ("default",))


def info() -> Info:
    """Report versions, GPUs and, for each implementation, whether it can run on this machine.

    Returns:
      An `Info`, with fields for programs; it prints as tables. For an implementation that is not
      available, `reason` gives the cause: no GPU, no driver, a broken module, a library that was
      not found, or a rule that the device violates.

    A missing component never raises an error. The function starts JAX's backends to find out
    whether JAX uses the GPU.

    Examples:
      >>> print(jax_tcgemm.info())  # doctest: +SKIP
    """
    gpu_reason = _gpu_reason()
    return Info(
        _versions(),
        tuple(_gpus()),
        gpu_reason,
        tuple(_implementations(gpu_reason)),
        tensor.plan_cache(),
    )
