"""scikit-build-core, plus the CUDA compiler from PyPI on a machine that has none."""

from find_nvcc import find_system_nvcc, mode
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.build import get_requires_for_build_editable as _requires_for_editable
from scikit_build_core.build import get_requires_for_build_wheel as _requires_for_wheel

# The meta-package pins matching parts; nvcc alone would pull an assembler of another version.
_CUDA_WHEELS = ["cuda-toolkit[nvcc,cudart,cccl]==13.0.*"]


def _cuda_requires() -> list[str]:
    wanted = mode() == "wheel" or (mode() == "on" and find_system_nvcc() is None)
    return _CUDA_WHEELS if wanted else []


def get_requires_for_build_wheel(config_settings=None):
    """Extends scikit-build-core's list."""
    return [*_requires_for_wheel(config_settings), *_cuda_requires()]


def get_requires_for_build_editable(config_settings=None):
    """Extends scikit-build-core's list."""
    return [*_requires_for_editable(config_settings), *_cuda_requires()]
