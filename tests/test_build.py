"""The parts of the build that decide something: whose headers, and what ptxas output is a fault."""

import subprocess
import sys
import zipfile

import pytest
from emulated import REPOSITORY, load_script

from jax_tcgemm.kernels import ptxas
from jax_tcgemm.system import modules

find_cuda = load_script("build_backend/find_cuda.py")
check_wheel = load_script("cmake/check_wheel.py")


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


@pytest.fixture
def no_cuda(monkeypatch, tmp_path):
    """An environment that names no toolkit, but for the one of the usual prefix."""
    for name in ("CUDA_HOME", "CUDA_PATH", "TCGEMM_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "no such folder"))
    return monkeypatch


def make_toolkit(root):
    for file in ("include/cuda_runtime_api.h", "bin/nvcc"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("#!/bin/sh\n")
        (root / file).chmod(0o755)
    return root


def test_order_of_toolkits(no_cuda, tmp_path):
    on_path, by_path, by_home = (make_toolkit(tmp_path / x) for x in "abc")
    no_cuda.setenv("PATH", str(on_path / "bin"))
    assert find_cuda.find_cuda() == on_path
    no_cuda.setenv("CUDA_PATH", str(by_path))
    assert find_cuda.find_cuda() == by_path
    no_cuda.setenv("CUDA_HOME", str(by_home))
    assert find_cuda.find_cuda() == by_home


def test_packages_in_the_second_root(no_cuda, tmp_path):
    (tmp_path / "first" / "nvidia" / "cudnn").mkdir(parents=True)
    root = make_toolkit(tmp_path / "second" / "nvidia" / "cu13")
    no_cuda.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    no_cuda.delitem(sys.modules, "nvidia", raising=False)
    assert find_cuda.find_wheel_cuda() == root


def test_wheel_passes_over_the_system(no_cuda, tmp_path):
    no_cuda.setenv("CUDA_HOME", str(make_toolkit(tmp_path)))
    no_cuda.setenv("TCGEMM_CUDA", "wheel")
    assert find_cuda.find_cuda() == find_cuda.find_wheel_cuda()


def test_nvcc_is_of_the_packages(no_cuda, tmp_path):
    """Beside a toolkit of the system, which has one, too."""
    no_cuda.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "system")))
    root = make_toolkit(tmp_path / "nvidia" / "cu13")
    no_cuda.setattr(sys, "path", [str(tmp_path)])
    no_cuda.delitem(sys.modules, "nvidia", raising=False)
    no_cuda.setenv("TCGEMM_CUDA", "nvcc")
    assert find_cuda.find_cuda() == root
    (root / "bin" / "nvcc").unlink()
    with pytest.raises(FileNotFoundError, match=r"got .*/cu13 without bin/nvcc; build with isol"):
        find_cuda.find_cuda()
    no_cuda.setattr(sys, "path", [])
    with pytest.raises(FileNotFoundError, match="got no CUDA without bin/nvcc"):
        find_cuda.find_cuda()
    no_cuda.setenv("TCGEMM_CUDA", "wheel")
    assert find_cuda.find_cuda() is None


def test_a_folder_without_headers_is_an_error(no_cuda):
    no_cuda.setenv("CUDA_HOME", "/no/such/toolkit")
    with pytest.raises(FileNotFoundError, match="CUDA_HOME must name a CUDA toolkit, got /no/such"):
        find_cuda.find_cuda()


def test_unknown_mode_is_an_error(no_cuda):
    no_cuda.setenv("TCGEMM_CUDA", "yes")
    with pytest.raises(ValueError, match="TCGEMM_CUDA must be on, wheel or nvcc, got yes"):
        find_cuda.find_cuda()


def test_backend_asks_for_what_is_missing(no_cuda, tmp_path):
    no_cuda.syspath_prepend(str(REPOSITORY / "build_backend"))
    no_cuda.chdir(REPOSITORY)
    import backend

    def asks():
        lists = (backend.get_requires_for_build_wheel(), backend.get_requires_for_build_editable())
        found = [{x.partition(";")[0] for x in some if "nvidia" in x} for some in lists]
        assert found[0] == found[1]
        return found[0]

    headers = {f"nvidia-cuda-{name}==13.0.*" for name in ("runtime", "crt", "cccl")}
    no_cuda.setenv("CUDA_HOME", str(make_toolkit(tmp_path)))
    no_cuda.setenv("TCGEMM_CUDA", "wheel")
    assert asks() == headers
    no_cuda.setenv("TCGEMM_CUDA", "nvcc")
    assert asks() == headers | {"nvidia-cuda-nvcc==13.0.*", "nvidia-nvvm==13.0.*"}
    no_cuda.setenv("TCGEMM_CUDA", "on")
    assert asks() == set()


def test_a_wheel_of_a_release_has_its_kernels(tmp_path):
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in "ab":
            archive.writestr(f"jax_tcgemm/prebuilt/{name}.kernel", "")
    of_any_number = check_wheel.faults(wheel)
    assert "it lacks py.typed" in of_any_number
    assert check_wheel.faults(wheel, 2) == of_any_number
    more = set(check_wheel.faults(wheel, 3)) - set(of_any_number)
    assert more == {"it must have 3 kernels, got 2; set TCGEMM_CUDA=nvcc"}
