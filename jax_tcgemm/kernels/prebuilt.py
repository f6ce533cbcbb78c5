"""Kernels that the build compiled: those of cmake/prebuilt_kernels.txt, where it found nvcc.

Wheels of releases hold those of cmake/release_kernels.txt. A file's name tells the kernel, the
target and the headers that it was compiled from, which must be those that `_cuda` was built with.
"""

import functools
from pathlib import Path

from jax_tcgemm import _build
from jax_tcgemm.kernels import kernel_file, nvrtc
from jax_tcgemm.kernels.instance import Instance, Kernel
from jax_tcgemm.system import modules

FOLDER = Path(_build.__file__).parent / "prebuilt"


@functools.cache
def _is_of_use() -> bool:
    """Whether the machine code is for a driver as old as the one here, or as NVRTC's.

    A driver refuses code of a later major release of CUDA.
    """
    major = int(_build.CUDA_VERSION.partition(".")[0])
    if (device := modules.cuda_device()) is not None:
        return device["driver_version"] // 1000 >= major
    return int(nvrtc.version().partition(".")[0] or 0) >= major


def path(instance: Instance) -> Path | None:
    """The instance's file, which need not exist; None where no build can have compiled it."""
    if instance.definitions or modules.cuda is None or not _is_of_use():
        return None
    headers_hash = modules.cuda.device_headers_hash
    return FOLDER / kernel_file.prebuilt_name(instance.kernel, instance.target, headers_hash)


def read(instance: Instance) -> Kernel | None:
    """The kernel, where the build has compiled it."""
    file = path(instance)
    if file is None:
        return None
    try:
        return kernel_file.decode(file.read_bytes())
    except OSError:
        return None
