"""The folders of csrc lie on floors, and includes go down."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"

KERNELS = tuple(
    f"kernels/{x}"
    for x in (
        *("all_reduce", "batched", "mma_sync", "packed", "quantize", "rows", "simt", "split"),
        "tensor",
        *("wgmma", "wmma"),
    )
)
LIBRARIES = ("libraries/cublas", "libraries/cublaslt", "libraries/cutensor")

# From the top. The folders of one floor know nothing of each other.
FLOORS = (
    ("modules",),
    ("ffi",),
    (*KERNELS, *LIBRARIES, "cpu"),
    ("kernels/common", "libraries"),
    ("kernels",),
    ("epilogue",),
    ("tile",),
    ("ptx",),
    ("core",),
    ("nvrtc",),
)
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}

# Of device code alone, which ships whole with the package.
DEVICE = ("epilogue", "tile", "ptx")


def _folder(path: str) -> str:
    """The folder of a file of csrc, without what lies inside one that is listed."""
    parts = path.split("/")[:-1]
    while parts and "/".join(parts) not in FLOOR_OF:
        parts.pop()
    return "/".join(parts)


def _files(*suffixes: str) -> list[str]:
    return sorted(str(x.relative_to(CSRC)) for x in CSRC.rglob("*") if x.suffix in suffixes)


def _includes(path: str) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', (CSRC / path).read_text("utf-8"), re.MULTILINE)


def test_every_folder_has_a_floor():
    sources = _files(".h", ".cuh", ".cc", ".inc")
    assert {_folder(path) for path in sources} == set(FLOOR_OF)


@pytest.mark.parametrize("folder", FLOOR_OF)
def test_includes_go_down(folder):
    wrong = []
    for path in _files(".h", ".cuh", ".cc", ".inc"):
        if _folder(path) != folder:
            continue
        for name in _includes(path):
            target = _folder(name)
            if name.startswith("xla/"):
                is_right = folder in ("ffi", "modules")
            else:
                is_right = target == folder or FLOOR_OF.get(target, -1) > FLOOR_OF[folder]
            if not is_right:
                wrong.append(f"{path}: {name}")
    assert wrong == []


def test_device_folders_hold_device_headers_only():
    sources = [path for path in _files(".h", ".cc") if _folder(path) in DEVICE]
    # The host fills the arguments of a function.
    assert sources == ["epilogue/function_params.h"]
