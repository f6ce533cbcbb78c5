"""scikit-build-core, plus CUDA's headers and static runtime from PyPI where there is no toolkit."""

from find_cuda import find_system_cuda, mode
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.build import get_requires_for_build_editable as _requires_for_editable
from scikit_build_core.build import get_requires_for_build_wheel as _requires_for_wheel

# Three packages of one release: headers of nvidia-cuda-runtime include those of the other two.
_CUDA_WHEELS = [
    f"nvidia-cuda-{name}==13.0.*; sys_platform == 'linux'" for name in ("runtime", "crt", "cccl")
]


def _cuda_requires() -> list[str]:
    is_of_system = mode() == "on" and find_system_cuda() is not None
    return [] if is_of_system else _CUDA_WHEELS


def get_requires_for_build_wheel(config_settings=None):
    """Extends scikit-build-core's list."""
    return [*_requires_for_wheel(config_settings), *_cuda_requires()]


def get_requires_for_build_editable(config_settings=None):
    """Extends scikit-build-core's list."""
    return [*_requires_for_editable(config_settings), *_cuda_requires()]
