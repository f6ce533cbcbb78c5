"""scikit-build-core, plus what TCGEMM_CUDA asks for of CUDA's packages from PyPI."""

from find_cuda import find_system_cuda, mode
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.build import get_requires_for_build_editable as _requires_for_editable
from scikit_build_core.build import get_requires_for_build_wheel as _requires_for_wheel

# Packages of one release. Headers of nvidia-cuda-runtime include those of the other two, and the
# ptxas of nvidia-cuda-nvcc refuses the PTX of a newer nvidia-nvvm, which is the compiler proper.
_HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
_COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm")


def _cuda_requires() -> list[str]:
    if mode() == "on" and find_system_cuda() is not None:
        return []
    packages = _HEADERS + (_COMPILER if mode() == "nvcc" else ())
    return [f"{package}==13.0.*; sys_platform == 'linux'" for package in packages]


def get_requires_for_build_wheel(config_settings=None):
    """Extends scikit-build-core's list."""
    return [*_requires_for_wheel(config_settings), *_cuda_requires()]


def get_requires_for_build_editable(config_settings=None):
    """Extends scikit-build-core's list."""
    return [*_requires_for_editable(config_settings), *_cuda_requires()]
