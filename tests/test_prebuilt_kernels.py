"""Kernels that the build compiles where it finds nvcc (cmake/prebuilt_kernels.txt)."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from jax_tcgemm import _build, selection
from jax_tcgemm.kernels import Instance, cache, compiler, kernel_file, nvrtc, prebuilt
from jax_tcgemm.kernels.instance import Kernel
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.system import modules

LIST = Path(__file__).resolve().parents[1] / "cmake" / "prebuilt_kernels.txt"
KERNEL = Kernel("entry", b"\x7fELF and more")
INSTANCE = Instance(
    "rows", ("kernels/rows/kernel.cuh",), "tcgemm::rows::multiply_rows<float, 4>", "sm_90"
)


def lines():
    return [line.split(" | ") for line in LIST.read_text().splitlines()]


def sources_of_the_ladder():
    """(target, header, kernel) of every bare product of two dtypes on two architectures."""
    found = set()
    for layout, dtype, capability, size in itertools.product(
        ("NN", "NT", "TN", "TT"), ("f32", "bf16"), (80, 90), (512, 4096)
    ):
        operands = [Operand(dtype, letter == "T", size, 0, 0) for letter in layout]
        problem = Problem(1, 1, size, size, size, *operands, dtype, "f32").query()
        device = dataclasses.replace(selection.ASSUMED_GPU, compute_capability=capability).query()
        for name, configs in modules.cuda.implementations().items():
            if name == "cublaslt":
                continue
            for config in configs:
                if not modules.cuda.reject(name, config, problem, device):
                    sources = modules.cuda.kernels(name, config, problem, device)
                    found |= {(target, header, kernel) for header, kernel, target in sources}
    return found


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
def test_each_is_of_a_product():
    found = sources_of_the_ladder()
    copies = [line for line in lines() if "operand_copy" in line[1]]
    unknown = [line for line in lines() if tuple(line) not in found and line not in copies]
    assert unknown == []
    assert len(copies) == 1


def test_the_build_compiled_all_or_none():
    names = {kernel_file.prebuilt_name(kernel, target) for target, _, kernel in lines()}
    assert {path.name for path in prebuilt.FOLDER.glob("*")} in (names, set())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where one kernel is that a build has made, for any driver."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "_is_of_use", lambda: True)
    file = tmp_path / kernel_file.prebuilt_name(INSTANCE.kernel, INSTANCE.target)
    file.write_bytes(kernel_file.encode(KERNEL, str(INSTANCE)))
    return tmp_path


def test_one_is_neither_compiled_nor_cached(folder, monkeypatch):
    def fail(*_):
        raise AssertionError("it must not be asked")

    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(cache, "read", fail)
    monkeypatch.setattr(nvrtc, "compile_kernel", fail)
    assert compiler.is_compiled(INSTANCE)
    assert compiler.compile_kernels([INSTANCE]) == {INSTANCE: KERNEL}


@pytest.mark.parametrize(
    "change", [{"target": "sm_80"}, {"kernel": "another"}, {"definitions": "struct X {};"}], ids=str
)
def test_others_are_not_there(folder, change):
    assert prebuilt.read(dataclasses.replace(INSTANCE, **change)) is None


def test_a_damaged_file_is_not_taken(folder):
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert prebuilt.read(INSTANCE) is None


@pytest.mark.parametrize(
    ("driver", "compiler_version", "is_of_use"),
    [
        (13000, "", True),
        (12090, "13.0", False),
        (None, "13.1", True),
        (None, "12.9", False),
        (None, "", False),
    ],
)
def test_code_of_a_later_cuda_is_not_taken(monkeypatch, driver, compiler_version, is_of_use):
    monkeypatch.setattr(_build, "CUDA_VERSION", "13.0")
    device = None if driver is None else {"driver_version": driver}
    monkeypatch.setattr(modules, "cuda_device", lambda: device)
    monkeypatch.setattr(nvrtc, "version", lambda: compiler_version)
    assert prebuilt._is_of_use.__wrapped__() == is_of_use
