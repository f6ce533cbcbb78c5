"""nvcc, which builds some kernels ahead, and NVRTC, which compiles the others, make the same code.

They differ in how they keep pointers to shared memory, so kernels that count in addresses of
32 bits are compiled alike. What is measured of the one compiler's code is then true of the other's.
"""

import ctypes
import dataclasses
import re
import subprocess

import pytest
from emulated import cuda_include, load_script, nvcc
from kernel_instances import INCLUDE, mma_sync, wgmma

from jax_tcgemm.kernels import nvrtc, ptxas
from jax_tcgemm.system import modules

build = load_script("cmake/compile_kernels.py")

# Some of two families.
KERNELS = {
    "mma_sync_f16": mma_sync("64, 64, 128, 32, 32, 4, 3", instruction="f16"),
    "mma_sync_bf16": mma_sync("64, 64, 128, 32, 32, 4, 3", layout="11"),
    "mma_sync_tf32": mma_sync("64, 64, 128, 32, 32, 4, 3", instruction="tf32"),
    "wgmma_bf16": wgmma("128, 128, 1, 1, 1, true, false", layout="00"),
    "wgmma_f16": wgmma("128, 128, 2, 1, 1, true, false", instruction="f16", layout="11"),
    "wgmma_tf32": wgmma("64, 16, 1, 1, 1, true, true", instruction="tf32", layout="10"),
}


def nvcc_release():
    """Such as (13, 0)."""
    said = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.search(r"release (\d+)\.(\d+)", said).groups()))


def nvrtc_release(library):
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@pytest.fixture
def same_release(monkeypatch):
    """NVRTC is the one of nvcc's release, and has the same headers of CUDA's."""
    if nvcc() is None or cuda_include() is None:
        pytest.skip("there is no CUDA compiler")
    compiler = nvrtc._find()
    if isinstance(compiler, str):
        pytest.skip(compiler)
    release = nvcc_release()
    paths = [str(x) for x in cuda_include().parent.glob("lib64/libnvrtc.so.*")]
    paths += modules.library_candidates("nvrtc", ("cu13/lib",))
    found = {nvrtc_release(x): x for x in map(nvrtc._open, paths) if x is not None}
    if release not in found:
        releases = ", ".join("{}.{}".format(*x) for x in sorted(found))
        pytest.skip("nvcc is of release {}.{}, NVRTC of {}".format(*release, releases))
    shipped = compiler.folders[:2]
    compiler = dataclasses.replace(
        compiler,
        library=found[release],
        version=release,
        folders=(*shipped, cuda_include()),
    )
    monkeypatch.setattr(nvrtc, "_find", lambda: compiler)


@pytest.mark.parametrize("instance", [pytest.param(x, id=name) for name, x in KERNELS.items()])
def test_both_compilers_make_the_same_code(instance, same_release):
    kernel = nvrtc.compile_kernel(instance)
    (header,) = instance.headers
    command = [str(nvcc()), f"-I{INCLUDE}"]
    built = build.compile_kernel(command, instance.target, header, instance.kernel, ptxas)
    expected = build.machine_code(built)
    # An instruction is 16 bytes; so short a kernel would be an empty one.
    assert len(expected[kernel.name]) > 100 * 16
    assert build.machine_code(kernel.cubin) == expected
