"""Compiles a list of kernels by nvcc, to files that kernels/prebuilt.py reads.

A kernel that ptxas gave up performance of fails the build.
"""

import argparse
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Nothing is installed yet while it is built.
_PACKAGE = Path(__file__).resolve().parents[1] / "jax_tcgemm" / "kernels"


def _load(*names: str) -> list:
    """Modules of the package that import nothing else of it."""
    spec = importlib.util.spec_from_loader("kernels", None, is_package=True)
    package = importlib.util.module_from_spec(spec)
    package.__path__ = [str(_PACKAGE)]
    sys.modules["kernels"] = package
    return [importlib.import_module(f"kernels.{name}") for name in names]


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """Returns the instructions of each kernel of a cubin by its name: sections of the ELF file."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [sections_at + i * size for i in range(count)]
    (names,) = struct.unpack_from("<Q", cubin, sections[names_index] + 0x18)
    found = {}
    for section in sections:
        (name_offset,) = struct.unpack_from("<I", cubin, section)
        offset, length = struct.unpack_from("<QQ", cubin, section + 0x18)
        begin = names + name_offset
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = cubin[offset : offset + length]
    return found


def compile_kernel(command: list[str], target: str, header: str, kernel: str, ptxas) -> bytes:
    """Compiles one kernel to a cubin; `ptxas`: the module that knows the faults of its report."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        # A function that takes the kernel's address instantiates the template.
        source.write_text(
            f'#include "{header}"\n'
            f"const void* kernel() {{ return reinterpret_cast<const void*>(&{kernel}); }}\n"
        )
        options = ("-std=c++17", f"-arch={target}", "-Xptxas=-v", "-cubin", "-o", cubin, source)
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        log = done.stdout + done.stderr
        if done.returncode:
            raise SystemExit(f"{kernel} for {target} must compile, got\n{log}")
        if faults := ptxas.find_faults(log, header):
            raise SystemExit(f"{kernel} for {target}: " + "\n".join(faults))
        return cubin.read_bytes()


def main() -> None:
    """Compiles all of a list, as many at a time as there are cores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--list", type=Path, required=True)
    parser.add_argument("--headers-hash", type=Path, required=True, help="what CMake wrote it to")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    instance, kernel_file, ptxas = _load("instance", "kernel_file", "ptxas")
    command = [arguments.nvcc, *(f"-I{folder}" for folder in arguments.include)]
    text = arguments.headers_hash.read_text()
    (headers_hash,) = re.findall(r'kDeviceHeadersHash\[\] = "(\w+)"', text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for old in arguments.out.glob(f"*{kernel_file.SUFFIX}"):
        old.unlink()

    def one(line: str) -> None:
        target, header, kernel = line.split(" | ")
        cubin = compile_kernel(command, target, header, kernel, ptxas)
        (entry,) = machine_code(cubin)
        made = kernel_file.encode(instance.Kernel(entry, cubin), f"{kernel} for {target}")
        name = kernel_file.prebuilt_name(kernel, target, headers_hash)
        (arguments.out / name).write_bytes(made)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(one, arguments.list.read_text().splitlines()))


if __name__ == "__main__":
    main()
