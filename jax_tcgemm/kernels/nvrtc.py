"""NVRTC, NVIDIA's run-time compiler, from the packages that `jax[cuda13]` brings or the system."""

import ctypes
import dataclasses
import functools
import hashlib
import os
from pathlib import Path

from jax_tcgemm import _build
from jax_tcgemm.kernels.instance import Instance, Kernel
from jax_tcgemm.kernels.ptxas import find_faults
from jax_tcgemm.system import modules

# That of the CUDA compiler that builds the package.
_OLDEST = (12, 4)
_OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
# One copy of a function's code, which runs in turns (csrc/kernels/wgmma/function_boxes.cuh).
_IN_TURNS = "--define-macro=TCGEMM_FUNCTIONS_IN_TURNS"
_USUAL_TOOLKIT = Path("/usr/local/cuda")
# What kernels include of CUDA's own headers, to the package that brings it.
_CUDA_HEADERS = {
    "cuda_bf16.h": "nvidia-cuda-runtime",
    "cuda_bf16.hpp": "nvidia-cuda-runtime",
    "cuda_fp16.h": "nvidia-cuda-runtime",
    "cuda_fp16.hpp": "nvidia-cuda-runtime",
    "mma.h": "nvidia-cuda-runtime",
    "crt/mma.h": "nvidia-cuda-crt",
    "crt/mma.hpp": "nvidia-cuda-crt",
}


class CompileError(RuntimeError):
    """A kernel cannot be compiled: NVRTC is missing, or refuses it. The message names both."""


@dataclasses.dataclass(frozen=True)
class _Compiler:
    library: ctypes.CDLL
    version: tuple[int, int]
    # Of kernels, of the standard headers that they include, and of CUDA's own.
    folders: tuple[Path, ...]

    def call(self, function: str, *arguments: object) -> None:
        """Calls a function of NVRTC that has no reason to fail."""
        if status := getattr(self.library, function)(*arguments):
            raise CompileError(f"compile_kernels: {function}: {self.message(status)}")

    def message(self, status: int) -> str:
        text = self.library.nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        return text(status).decode()

    def output(self, program: ctypes.c_void_p, what: str) -> bytes:
        """Such as the program's "CUBIN" or "ProgramLog"."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, text)
        return text.raw


@functools.cache
def _find() -> _Compiler | str:
    """The compiler, or why there is none."""
    toolkits = [Path(os.environ[x]) for x in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(x)]
    toolkits.append(_USUAL_TOOLKIT)
    paths = modules.library_candidates("nvrtc", ("cu13/lib",))
    paths += [str(x) for toolkit in toolkits for x in toolkit.glob("lib64/libnvrtc.so.1?")]
    library = next(filter(None, map(_open, paths)), None)
    if library is None:
        return "libnvrtc was not found; install nvidia-cuda-nvrtc, which jax[cuda13] brings"
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    version = (major.value, minor.value)
    if version < _OLDEST:
        return (
            f"NVRTC must be {_OLDEST[0]}.{_OLDEST[1]} or newer, got {version[0]}.{version[1]} "
            f"({library._name}); install nvidia-cuda-nvrtc, which jax[cuda13] brings"
        )

    folders = []
    candidates = (*modules.nvidia_folders("cu13/include"), *(x / "include" for x in toolkits))
    for header, package in _CUDA_HEADERS.items():
        folder = next((x for x in candidates if (x / header).is_file()), None)
        if folder is None:
            return f"{header} was not found; install {package}, which jax[cuda13] brings"
        folders.append(folder)
    shipped = Path(_build.__file__).parent / "include"
    return _Compiler(library, version, (shipped / "nvrtc", shipped, *dict.fromkeys(folders)))


def _open(path: str) -> ctypes.CDLL | None:
    try:
        # NVRTC opens its built-in functions by name, and does not look beside itself.
        if os.path.isabs(path):
            for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
        return ctypes.CDLL(path)
    except OSError:
        return None


def _compiler() -> _Compiler:
    compiler = _find()
    if isinstance(compiler, str):
        raise CompileError(f"compile_kernels: NVRTC must be installed, got none: {compiler}")
    return compiler


def reason() -> str:
    """Why kernels cannot be compiled here, with the package that would help, or ""."""
    found = _find()
    return found if isinstance(found, str) else ""


def version() -> str:
    """NVRTC's version, such as 13.0; "" where it is not available."""
    found = _find()
    return "" if isinstance(found, str) else "{}.{}".format(*found.version)


@functools.cache
def digest() -> str:
    """A hash of all that kernels are compiled with and from: NVRTC, its options, the headers."""
    compiler = _compiler()
    path = compiler.library._name
    # The library's size tells releases apart that call themselves by the same version.
    size = os.path.getsize(path) if os.path.isabs(path) else 0
    result = hashlib.sha256(repr((compiler.version, size, _OPTIONS, _IN_TURNS)).encode())
    _, shipped, *cuda = compiler.folders
    for file in sorted(x for x in shipped.rglob("*") if x.is_file()):
        text = file.read_bytes()
        result.update(f"{file.relative_to(shipped)} {len(text)}\n".encode() + text)
    for header in _CUDA_HEADERS:
        result.update(next(x / header for x in cuda if (x / header).is_file()).read_bytes())
    return result.hexdigest()


def compile_kernel(instance: Instance) -> Kernel:
    """Compiles one kernel. Other threads run meanwhile.

    Beside many copies of a function's code, ptxas may keep too few registers for the accumulators
    and serialize the main loop's wgmma instructions, which then takes twice as long, as with erf in
    ping-pong kernels. Such a kernel is compiled again with one copy, which runs in turns.

    Args:
      instance: the kernel.

    Returns:
      The kernel.

    Raises:
      CompileError: with NVRTC's messages, when it does not compile; or when there is no NVRTC.
    """
    kernel = _compile(instance)
    if kernel.is_serialized and instance.definitions:
        other = _compile(instance, _IN_TURNS)
        kernel = kernel if other.faults else other
    return kernel


def _compile(instance: Instance, *more_options: str) -> Kernel:
    """Compiles one kernel once."""
    compiler = _compiler()
    options = [
        f"--gpu-architecture={instance.target}",
        *_OPTIONS,
        *more_options,
        *(f"--include-path={folder}" for folder in compiler.folders),
    ]
    program = ctypes.c_void_p()
    file = f"{instance.family}.cu"
    compiler.call(
        "nvrtcCreateProgram",
        *(ctypes.byref(program), instance.source.encode(), file.encode(), 0, None, None),
    )
    try:
        compiler.call("nvrtcAddNameExpression", program, instance.kernel.encode())
        status = compiler.library.nvrtcCompileProgram(
            program,
            len(options),
            (ctypes.c_char_p * len(options))(*(option.encode() for option in options)),
        )
        log = compiler.output(program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
        if status:
            raise CompileError(
                f"compile_kernels: the {instance} must compile, got {compiler.message(status)} "
                f"from NVRTC {version()}:\n{log}"
            )
        name = ctypes.c_char_p()
        compiler.call("nvrtcGetLoweredName", program, instance.kernel.encode(), ctypes.byref(name))
        return Kernel(
            name.value.decode(),
            compiler.output(program, "CUBIN"),
            tuple(find_faults(log, file)),
        )
    finally:
        compiler.library.nvrtcDestroyProgram(ctypes.byref(program))
