"""The compiled modules: loading them, registering their FFI targets, saying why one is missing.

`cpu`, `cuda` and `cutensor` are the modules, or None; `reason` tells why. Nothing here raises for
a missing or broken module, GPU, driver or library: `import jax_tcgemm` must work on any machine.
Importing this module registers the FFI targets and touches neither the driver nor a vendor's
library.
"""

import ctypes
import functools
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import jax

from jax_tcgemm.system import module_files

_reasons: dict[str, str] = {}


def _load(name: str) -> ModuleType | None:
    full_name = f"jax_tcgemm._{name}"
    try:
        spec = importlib.util.find_spec(full_name)
        if spec is not None and spec.origin is not None:
            module_files.check(spec.origin)
        module = importlib.import_module(full_name)
        # XLA matches platform names exactly: it never looks at targets registered for "cuda".
        platform = "cpu" if name == "cpu" else "CUDA"
        # The state that calls keep, which their targets name.
        for type_name, capsules in getattr(module, "types", dict)().items():
            jax.ffi.register_ffi_type(type_name, capsules, platform=platform)
        for target, capsule in module.registrations().items():
            jax.ffi.register_ffi_target(target, capsule, platform=platform)
    except ModuleNotFoundError as error:
        _reasons[name] = f"this build has no {full_name}" if error.name == full_name else str(error)
    except Exception as error:  # A broken shared object, whatever the loader makes of it.
        _reasons[name] = f"{type(error).__name__}: {error}"
    else:
        return module
    return None


cpu = _load("cpu")
cuda = _load("cuda")
cutensor = _load("cutensor")


def reason(name: str) -> str:
    """Why "cpu", "cuda" (the modules), "gpu", "cublaslt" or "cutensor" is not available, or ""."""
    if name == "gpu":
        cuda_device()
    elif name == "cublaslt":
        return cublaslt_reason()
    elif name == "cutensor":
        return cutensor_reason()
    elif name not in ("cpu", "cuda"):
        raise ValueError(
            f"reason: name must be cpu, cuda, gpu, cublaslt or cutensor, got {name=}; choose one"
        )
    return _reasons.get(name, "")


@functools.cache
def cuda_device() -> dict | None:
    """Properties of the first CUDA device (see `_cuda.device`), or None with `reason("gpu")`."""
    if cuda is None:
        _reasons["gpu"] = _reasons["cuda"]
        return None
    try:
        return cuda.device(0)
    except RuntimeError as error:
        _reasons["gpu"] = (
            str(error) if _has_driver() else "no NVIDIA driver (libcuda.so.1) was found"
        )
        return None


def _has_driver() -> bool:
    # The runtime calls a missing driver and one that is too old by the same name.
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def nvidia_folders(folder: str) -> list[Path]:
    """Where the packages that pip installs may have a folder, such as "cu13/lib"."""
    spec = importlib.util.find_spec("nvidia")
    # "nvidia" is a namespace package and may lie in several site-packages folders at once.
    return [Path(root, folder) for root in (spec.submodule_search_locations or ())] if spec else []


def library_candidates(name: str, folders: tuple[str, ...]) -> list[str]:
    """Paths of a vendor's library, newest first: in the packages that pip installs, then by name.

    Args:
      name: such as "cublasLt" of libcublasLt.so.13.
      folders: where it may lie below a root of the namespace package "nvidia".
    """
    found = [
        path
        for folder in folders
        for root in nvidia_folders(folder)
        for path in root.glob(f"lib{name}.so.*")
    ]

    def version(path: Path) -> int:
        match = re.search(r"\.so\.(\d+)", path.name)
        return int(match[1]) if match else 0

    found.sort(key=version, reverse=True)
    return [*map(str, found), f"lib{name}.so.13", f"lib{name}.so.12"]


def _open_library(name: str) -> str:
    """Opens a library that the _cuda module uses; why it cannot be used, or ""."""
    if cuda is None:
        return _reasons["cuda"]
    load = getattr(cuda, f"load_{name.lower()}")
    reasons = []
    for path in library_candidates(name, ("cu13/lib", "cublas/lib")):
        error = load(path)
        if not error:
            return ""
        reasons.append(error)
    return "; ".join(reasons)


@functools.cache
def cublaslt_reason() -> str:
    """Opens cuBLASLt at the first call; why it cannot be used, or ""."""
    return _open_library("cublasLt")


@functools.cache
def cublas_reason() -> str:
    """Opens cuBLAS at the first call; why it cannot be used, or ""."""
    return _open_library("cublas")


@functools.cache
def peer_access_reason() -> str:
    """Return why some GPU here cannot access another one's memory; "" if all can."""
    return _reasons["cuda"] if cuda is None else cuda.all_reduce.peer_access_reason()


@functools.cache
def cutensor_reason() -> str:
    """Opens cuTENSOR at the first call; why it cannot be used, or ""."""
    if cutensor is None:
        return _reasons["cutensor"]
    # cuTENSOR needs cuBLASLt, and finds the one that the process already has.
    if reason := cublaslt_reason():
        return f"cuTENSOR needs cuBLASLt: {reason}"
    spec = importlib.util.find_spec("cutensor")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    reasons = []
    for path in (
        *(str(Path(folder, "lib/libcutensor.so.2")) for folder in folders),
        "libcutensor.so.2",
    ):
        error = cutensor.load_cutensor(path)
        if not error:
            return ""
        reasons.append(error)
    return "; ".join(reasons)
