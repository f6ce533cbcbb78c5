"""The parts of the build that decide something: which compiler, and what ptxas output fails."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from jax_tcgemm.kernels import ptxas
from jax_tcgemm.system import modules

REPOSITORY = Path(__file__).resolve().parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_ptxas = load(REPOSITORY / "cmake" / "check_ptxas.py")
find_nvcc = load(REPOSITORY / "build_backend" / "find_nvcc.py")


@pytest.mark.parametrize("name", ["cpu", "cuda", "cutensor"])
def test_a_module_defines_nothing_of_the_cpp_library_for_others(name):
    """Functions of a C++ library that is linked as an archive would mix with the process's."""
    module = getattr(modules, name)
    if module is None:
        pytest.skip(modules.reason(name) or f"this build has no _{name}")
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", module.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    # Weak ones are what our own objects instantiate of the library's templates.
    symbols = [line.split()[-2:] for line in listed.stdout.splitlines()]
    assert ["T", f"PyInit__{name}"] in symbols
    assert not [x for kind, x in symbols if kind == "T" and x.startswith(("_ZNS", "_ZNKS", "_ZS"))]
    assert not any("basic_ostream" in symbol and "_M_insert" in symbol for _, symbol in symbols)


CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4gemmPf' for 'sm_80'
ptxas info    : Function properties for _Z4gemmPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 416 bytes cmem[0]
"""
SPILL = """\
ptxas info    : Compiling entry function '_Z4gemmPf' for 'sm_90a'
ptxas info    : Function properties for _Z4gemmPf
    416 bytes stack frame, 808 bytes spill stores, 832 bytes spill loads
"""
SERIALISED = (
    "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in the function "
    "'_Z4gemmPf'\n"
)


def test_clean_report_passes():
    assert ptxas.find_faults(CLEAN, "gemm.cu") == []


def test_spill_on_one_target_is_a_fault():
    faults = ptxas.find_faults(CLEAN + SPILL, "gemm.cu")
    assert faults == [
        "_Z4gemmPf for sm_90a spills registers: 808 bytes spill stores, 832 bytes spill loads"
    ]


def test_serialised_wgmma_is_a_fault():
    assert len(ptxas.find_faults(SERIALISED + CLEAN, "gemm.cu")) == 1


def test_allowed_spill_is_no_fault_elsewhere_it_is(monkeypatch):
    monkeypatch.setattr(ptxas, "ALLOWED_SPILLS", {r"gemm\.cu sm_90a _Z4gemm": "a reason"})
    assert ptxas.find_faults(SPILL, "gemm.cu") == []
    assert len(ptxas.find_faults(SPILL, "other.cu")) == 1


def fake_compiler(tmp_path, report, status):
    script = tmp_path / "nvcc.py"
    script.write_text(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('object')\n"
        f"print({report!r}, file=sys.stderr, end='')\n"
        f"sys.exit({status})\n"
    )
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("report", "status", "expected", "has_object"),
    [
        (CLEAN, 0, 0, True),
        (SPILL, 0, 1, False),
        (CLEAN, 2, 2, True),
    ],
    ids=["clean", "spill", "compiler_error"],
)
def test_launcher(report, status, expected, has_object, tmp_path, capfd):
    output = tmp_path / "gemm.o"
    command = [*fake_compiler(tmp_path, report, status), "-c", "gemm.cu", "-o", str(output)]
    assert check_ptxas.main(command) == expected
    assert output.exists() == has_object
    if expected == 0:
        assert capfd.readouterr().out == ""
        assert output.with_name("gemm.o.ptxas.txt").read_text() == report


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path):
    """An environment that names no compiler, but for the one of the usual prefix."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "TCGEMM_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "no such folder"))
    return monkeypatch


def make_nvcc(prefix):
    nvcc = prefix / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return nvcc


def test_order_of_system_compilers(no_nvcc, tmp_path):
    on_path, by_path, by_home, by_name = (make_nvcc(tmp_path / x) for x in "abcd")
    no_nvcc.setenv("PATH", str(on_path.parent))
    assert find_nvcc.find_nvcc() == str(on_path)
    no_nvcc.setenv("CUDA_PATH", str(tmp_path / "b"))
    assert find_nvcc.find_nvcc() == str(by_path)
    no_nvcc.setenv("CUDA_HOME", str(tmp_path / "c"))
    assert find_nvcc.find_nvcc() == str(by_home)
    no_nvcc.setenv("CUDACXX", str(by_name))
    assert find_nvcc.find_nvcc() == str(by_name)


def test_wheel_compiler_in_the_second_root(no_nvcc, tmp_path):
    (tmp_path / "first" / "nvidia" / "cudnn").mkdir(parents=True)
    nvcc = make_nvcc(tmp_path / "second" / "nvidia" / "cu13")
    no_nvcc.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    no_nvcc.delitem(sys.modules, "nvidia", raising=False)
    assert find_nvcc.find_wheel_nvcc() == str(nvcc)


def test_off_finds_none_and_wheel_passes_over_the_system(no_nvcc, tmp_path):
    no_nvcc.setenv("CUDACXX", str(make_nvcc(tmp_path)))
    no_nvcc.setenv("TCGEMM_CUDA", "off")
    assert find_nvcc.find_nvcc() is None
    no_nvcc.setenv("TCGEMM_CUDA", "wheel")
    assert find_nvcc.find_nvcc() == find_nvcc.find_wheel_nvcc()


def test_missing_cudacxx_is_an_error(no_nvcc):
    no_nvcc.setenv("CUDACXX", "/no/such/nvcc")
    with pytest.raises(FileNotFoundError, match="CUDACXX must name a CUDA compiler, got /no/such"):
        find_nvcc.find_nvcc()


def test_unknown_mode_is_an_error(no_nvcc):
    no_nvcc.setenv("TCGEMM_CUDA", "yes")
    with pytest.raises(ValueError, match="TCGEMM_CUDA must be on, off or wheel, got yes"):
        find_nvcc.find_nvcc()


def test_backend_asks_for_the_compiler_only_where_there_is_none(no_nvcc, tmp_path):
    no_nvcc.syspath_prepend(str(REPOSITORY / "build_backend"))
    no_nvcc.chdir(REPOSITORY)
    import backend

    def asks():
        lists = (backend.get_requires_for_build_wheel(), backend.get_requires_for_build_editable())
        found = [any("cuda-toolkit" in x for x in requires) for requires in lists]
        assert found[0] == found[1]
        return found[0]

    no_nvcc.setenv("TCGEMM_CUDA", "wheel")
    assert asks()
    no_nvcc.setenv("TCGEMM_CUDA", "off")
    assert not asks()
    no_nvcc.setenv("TCGEMM_CUDA", "on")
    no_nvcc.setenv("CUDACXX", str(make_nvcc(tmp_path)))
    assert not asks()
