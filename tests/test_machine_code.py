"""nvcc, which builds some kernels ahead, and NVRTC, which compiles the others, make the same code.

They differ in how they keep pointers to shared memory, so kernels that count in addresses of
32 bits are compiled alike. What is measured of the one compiler's code is then true of the other's.
"""

import ctypes
import dataclasses
import re
import struct
import subprocess

import pytest
from emulated import cuda_include, nvcc
from kernel_instances import INCLUDE, mma_sync, wgmma

from jax_tcgemm.kernels import nvrtc
from jax_tcgemm.system import modules

# Some of each family.
PREBUILT = {
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


def compile_by_nvcc(instance, folder):
    """The cubin, compiled as the build does it."""
    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    # What takes a kernel's address instantiates it.
    source.write_text(
        f"{instance.source}"
        "const void* kernel() {\n"
        f"  return reinterpret_cast<const void*>(&{instance.kernel});\n"
        "}\n"
    )
    options = ("-std=c++17", f"-arch={instance.target}", f"-I{INCLUDE}", "-cubin", "-o", cubin)
    subprocess.run([nvcc(), *options, source], check=True)
    return cubin.read_bytes()


def machine_code(cubin, name):
    """The instructions of the kernel `name`: a section of the ELF file."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_idx = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = []
    for i in range(count):
        at = sections_at + i * size
        (name_at,) = struct.unpack_from("<I", cubin, at)
        begin, length = struct.unpack_from("<QQ", cubin, at + 0x18)
        sections.append((name_at, begin, length))
    names = sections[names_idx][1]
    for name_at, begin, length in sections:
        own_name = cubin[names + name_at : cubin.index(b"\0", names + name_at)]
        if own_name.decode() == f".text.{name}":
            return cubin[begin : begin + length]
    raise AssertionError(f"the cubin has no kernel {name}")


@pytest.mark.parametrize("instance", [pytest.param(x, id=name) for name, x in PREBUILT.items()])
def test_both_compilers_make_the_same_code(instance, same_release, tmp_path):
    kernel = nvrtc.compile_kernel(instance)
    expected = machine_code(compile_by_nvcc(instance, tmp_path), kernel.name)
    # An instruction is 16 bytes; so short a kernel would be an empty one.
    assert len(expected) > 100 * 16
    assert machine_code(kernel.cubin, kernel.name) == expected
