"""Finds the CUDA compiler; the build backend and CMakeLists.txt both ask here.

Run as a script it prints the path of nvcc, or nothing when there is none.
"""

import importlib.util
import os
import shutil
from pathlib import Path


def _executable(path: Path) -> str | None:
    return str(path) if path.is_file() and os.access(path, os.X_OK) else None


def find_system_nvcc() -> str | None:
    """Returns nvcc as CMake would find it: CUDACXX, CUDA_HOME, CUDA_PATH, PATH, the usual prefix."""
    if cudacxx := os.environ.get("CUDACXX"):
        found = shutil.which(cudacxx)
        if found is None:
            raise FileNotFoundError(f"CUDACXX must name a CUDA compiler, got {cudacxx}")
        return found
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        prefix = os.environ.get(variable)
        if prefix and (found := _executable(Path(prefix, "bin", "nvcc"))):
            return found
    return shutil.which("nvcc") or _executable(Path("/usr/local/cuda/bin/nvcc"))


def find_wheel_nvcc() -> str | None:
    """Returns the nvcc of the PyPI packages of CUDA 13, wherever on sys.path they are."""
    spec = importlib.util.find_spec("nvidia")
    # A namespace package: under build isolation it may have several roots.
    for root in spec.submodule_search_locations or () if spec else ():
        if found := _executable(Path(root, "cu13", "bin", "nvcc")):
            return found
    return None


if __name__ == "__main__":
    print(find_system_nvcc() or find_wheel_nvcc() or "")
