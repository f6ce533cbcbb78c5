"""Finds CUDA's headers and static runtime; the build backend and CMake both ask here.

TCGEMM_CUDA says which: "on" (the default) takes the system's, or else those of the PyPI packages;
"wheel" takes the PyPI packages' even where the system has some; "nvcc" is "wheel" with the compiler
from PyPI, too, by which the build compiles the kernels of releases. Run as a script it prints the
toolkit's folder, or nothing where there is none.
"""

import importlib.util
import os
import shutil
from pathlib import Path


def mode() -> str:
    """Returns what TCGEMM_CUDA asks for."""
    value = os.environ.get("TCGEMM_CUDA", "on").lower()
    if value not in ("on", "wheel", "nvcc"):
        raise ValueError(f"TCGEMM_CUDA must be on, wheel or nvcc, got {value}")
    return value


def _has_headers(root: Path) -> bool:
    folders = (root / "include", root / "targets" / "x86_64-linux" / "include")
    return any((folder / "cuda_runtime_api.h").is_file() for folder in folders)


def find_system_cuda() -> Path | None:
    """Returns the first toolkit of CUDA_HOME, CUDA_PATH, the nvcc on PATH and the usual prefix."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            if not _has_headers(Path(root)):
                raise FileNotFoundError(f"{variable} must name a CUDA toolkit, got {root}")
            return Path(root)
    roots = [Path("/usr/local/cuda")]
    if nvcc := shutil.which("nvcc"):
        roots.insert(0, Path(nvcc).resolve().parents[1])
    return next(filter(_has_headers, roots), None)


def find_wheel_cuda() -> Path | None:
    """Returns the folder of the PyPI packages of CUDA 13, wherever on sys.path they are."""
    spec = importlib.util.find_spec("nvidia")
    # A namespace package: under build isolation it may have several roots.
    locations = (spec.submodule_search_locations or ()) if spec else ()
    return next(filter(_has_headers, (Path(root, "cu13") for root in locations)), None)


def find_cuda() -> Path | None:
    """Returns the toolkit to build with; an nvcc that is asked for must be there."""
    root = (find_system_cuda() if mode() == "on" else None) or find_wheel_cuda()
    if mode() == "nvcc" and (root is None or not os.access(root / "bin" / "nvcc", os.X_OK)):
        raise FileNotFoundError(
            f"TCGEMM_CUDA=nvcc must find the compiler of PyPI's packages, got {root or 'no CUDA'} "
            "without bin/nvcc; build with isolation, which installs it, install nvidia-cuda-nvcc "
            "and nvidia-nvvm of the headers' release, or set TCGEMM_CUDA=wheel"
        )
    return root


if __name__ == "__main__":
    print(find_cuda() or "")
