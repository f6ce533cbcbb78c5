"""Checks a wheel: what it holds, its size, and that its modules link neither CUDA nor by an RPATH.

Usage: python cmake/check_wheel.py [--kernels cmake/release_kernels.txt] dist/*.whl
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_MOST_BYTES = 10 * 10**6
_FILES = (
    "py.typed",
    "_build.py",
    "include/kernels/wgmma/kernel.cuh",
    "include/ptx/wgmma_shapes.cuh",
)
_MODULES = ("_cpu", "_cuda", "_cutensor")


def kernels(wheel: Path) -> list[str]:
    """Returns the names of the kernels that were compiled ahead."""
    with zipfile.ZipFile(wheel) as archive:
        return [x for x in archive.namelist() if x.startswith("jax_tcgemm/prebuilt/")]


def faults(wheel: Path, num_kernels: int | None = None) -> list[str]:
    """Returns the faults of a wheel, which must have so many kernels; None for any number."""
    found = []
    if (size := wheel.stat().st_size) > _MOST_BYTES:
        found.append(f"it must have at most {_MOST_BYTES} bytes, got {size}")
    if num_kernels not in (None, count := len(kernels(wheel))):
        found.append(f"it must have {num_kernels} kernels, got {count}; set TCGEMM_CUDA=nvcc")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder)
        package = Path(folder, "jax_tcgemm")
        found += [f"it lacks {name}" for name in _FILES if not (package / name).is_file()]
        for name in _MODULES:
            paths = list(package.glob(f"{name}.*.so"))
            if len(paths) != 1:
                found.append(f"it must have one {name}, got {len(paths)}")
            for path in paths:
                said = subprocess.run(
                    ["readelf", "-d", path], capture_output=True, text=True, check=True
                ).stdout
                lines = [x for x in said.splitlines() if "PATH" in x or "libcu" in x]
                found += [f"{path.name} must not have {line.strip()}" for line in lines]
    return found


def main() -> int:
    """Prints what is wrong with each wheel; 1 where there is something."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", type=Path, help="the list that it must have the kernels of")
    parser.add_argument("wheels", type=Path, nargs="+")
    arguments = parser.parse_args()
    wanted = arguments.kernels and len(arguments.kernels.read_text().splitlines())
    bad = 0
    for path in arguments.wheels:
        found = faults(path, wanted)
        bad |= bool(found)
        held = f"{path.stat().st_size / 1e6:.1f} MB, {len(kernels(path))} kernels compiled ahead"
        print(f"{path.name}: {held}", *(found or ["good"]), sep="\n  ")
    return bad


if __name__ == "__main__":
    sys.exit(main())
