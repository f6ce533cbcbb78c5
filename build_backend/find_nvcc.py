"""Finds the CUDA compiler; the build backend and CMakeLists.txt both ask here.

TCGEMM_CUDA says which one: "on" (the default) takes the system's, or else that of the PyPI
packages; "wheel" takes the PyPI packages' even where the system has one; "off" takes none.
Run as a script it prints the path of nvcc, or nothing when there is none.
"""

import importlib.util
import os
import shutil
from pathlib import Path


def mode() -> str:
    """Returns what TCGEMM_CUDA asks for."""
    value = os.environ.get("TCGEMM_CUDA", "on").lower()
    if value not in ("on", "off", "wheel"):
        raise ValueError(f"TCGEMM_CUDA must be on, off or wheel, got {value}")
    return value


def _executable(path: Path) -> str | None:
    return str(path) if path.is_file() and os.access(path, os.X_OK) else None


def find_system_nvcc() -> str | None:
    """Returns the first nvcc of CUDACXX, CUDA_HOME, CUDA_PATH, PATH and the usual prefix."""
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
    for root in (spec.submodule_search_locations or ()) if spec else ():
        if found := _executable(Path(root, "cu13", "bin", "nvcc")):
            return found
    return None


def find_nvcc() -> str | None:
    """Returns the nvcc to build with."""
    if mode() == "off":
        return None
    return (find_system_nvcc() if mode() == "on" else None) or find_wheel_nvcc()


if __name__ == "__main__":
    print(find_nvcc() or "")
