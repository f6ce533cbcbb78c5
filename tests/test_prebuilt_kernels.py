"""Kernels that the build compiles where it has nvcc: a short list, a longer one for releases."""

import dataclasses
import itertools
import types

import pytest
from emulated import load_script

from jax_tcgemm import _build, selection
from jax_tcgemm.kernels import Instance, cache, compiler, kernel_file, nvrtc, prebuilt
from jax_tcgemm.kernels.instance import Kernel
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.system import modules

KERNEL = Kernel("entry", b"\x7fELF and more")
INSTANCE = Instance(
    "rows", ("kernels/rows/kernel.cuh",), "tcgemm::rows::multiply_rows<float, 4>", "sm_90"
)
HEADERS_HASH = "5ca1ab1e"

release = load_script("cmake/list_release_kernels.py")
needs_cuda_module = pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))


def lines(path):
    return path.read_text().splitlines()


def sources_of_the_ladder():
    """Lines of every config of every bare product, with and without copies of its operands."""
    found = set()
    computed = (("f32", "f32", "f32"), *release.TYPES)
    for (dtype, out_dtype, compute), layout, capability, size in itertools.product(
        computed, release.LAYOUTS, (80, 90), (509, 512, 4096)
    ):
        operands = [Operand(dtype, letter == "T", size) for letter in layout]
        problem = Problem(1, 1, size, size, size, *operands, out_dtype, compute).query()
        device = dataclasses.replace(selection.ASSUMED_GPU, compute_capability=capability).query()
        for name, configs in modules.cuda.implementations().items():
            if name == "cublaslt":
                continue
            reasons = modules.cuda.rejections(name, problem, device)
            for config, reason in zip(configs, reasons, strict=True):
                if not reason:
                    sources = modules.cuda.kernels(name, config, problem, device)
                    found |= {
                        f"{target} | {header} | {kernel}" for header, kernel, target in sources
                    }
    return found


@needs_cuda_module
def test_each_is_of_a_product():
    found = sources_of_the_ladder()
    for path in (release.SHORT, release.LONG):
        assert [line for line in lines(path) if line not in found] == []


def test_the_list_of_releases_is_the_longer_one():
    short, long = lines(release.SHORT), lines(release.LONG)
    assert len(set(long)) == len(long)
    assert set(short) < set(long)
    targets = [line.partition(" | ")[0] for line in long]
    assert targets == sorted(targets, key=lambda x: x != "sm_90a")


@needs_cuda_module
def test_a_release_has_the_kernels_of_most_products():
    """Fewer say that the table or the cost model changed, and the list must be written again."""
    products, has = list(release.products(step=6)), set(lines(release.LONG))
    assert sum(has.issuperset(kernels) for kernels in products) >= 0.8 * len(products)


@needs_cuda_module
def test_an_installation_has_all_kernels_of_a_list_or_none():
    names = [
        {
            kernel_file.prebuilt_name(kernel, target, modules.cuda.device_headers_hash)
            for target, _, kernel in (line.split(" | ") for line in lines(path))
        }
        for path in (release.SHORT, release.LONG)
    ]
    assert {path.name for path in prebuilt.FOLDER.glob("*")} in (*names, set())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where one kernel is that a build has made, for any driver."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "_is_of_use", lambda: True)
    monkeypatch.setattr(modules, "cuda", types.SimpleNamespace(device_headers_hash=HEADERS_HASH))
    name = kernel_file.prebuilt_name(INSTANCE.kernel, INSTANCE.target, HEADERS_HASH)
    file = tmp_path / name
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


def test_one_of_other_headers_is_not_taken(folder, monkeypatch):
    assert prebuilt.read(INSTANCE) == KERNEL
    monkeypatch.setattr(modules.cuda, "device_headers_hash", "of other headers")
    assert prebuilt.read(INSTANCE) is None
    monkeypatch.setattr(modules, "cuda", None)
    assert prebuilt.read(INSTANCE) is None


def test_nvrtc_compiles_what_the_driver_is_too_old_for(folder, monkeypatch):
    """Machine code of CUDA 13, and a driver of CUDA 12."""
    other = Kernel("entry", b"\x7fELF of NVRTC")
    monkeypatch.setattr(prebuilt, "_is_of_use", lambda: False)
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(cache, "path", lambda _: None)
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda _: other)
    assert not compiler.is_compiled(INSTANCE)
    assert compiler.compile_kernels([INSTANCE]) == {INSTANCE: other}


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
