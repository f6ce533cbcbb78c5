"""Checks a wheel: what it holds, its size, and that its modules link neither CUDA nor by an RPATH.

Usage: python cmake/check_wheel.py dist/*.whl
"""

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


def faults(wheel: Path) -> list[str]:
    """Returns the faults of a wheel."""
    found = []
    if (size := wheel.stat().st_size) > _MOST_BYTES:
        found.append(f"it must have at most {_MOST_BYTES} bytes, got {size}")
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


def main(paths: list[str]) -> int:
    """Prints what is wrong with each wheel; 1 where there is something."""
    bad = 0
    for path in map(Path, paths):
        found = faults(path)
        bad |= bool(found)
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB", *(found or ["good"]), sep="\n  ")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else "name a wheel")
