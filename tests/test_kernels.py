"""Kernels compiled at run time: every family by NVRTC, the cache, errors. No GPU is needed."""

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from kernel_instances import INCLUDE, all_mma_sync, all_wgmma, instances, wgmma
from packed_cases import all_packed
from quantize_cases import all_quantize
from split_cases import all_split

import jax_tcgemm
from jax_tcgemm.kernels import CompileError, Instance, cache, compile_kernels, compiler, nvrtc
from jax_tcgemm.kernels.instance import Kernel
from jax_tcgemm.selection import devices, implementations
from jax_tcgemm.selection.implementations import Candidate
from jax_tcgemm.system import modules

needs_nvrtc = pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason())


def tiny(name="tiny", body="", target="sm_80"):
    """A kernel that compiles in no time."""
    return Instance("tests", (), name, target, f"__global__ void {name}(float* x) {{ {body} }}")


# 1024 threads have 64 registers each.
SPILLING = Instance(
    *("tests", (), "spilling", "sm_80"),
    """
    __global__ void __launch_bounds__(1024) spilling(float* x) {
      float y[96];
      #pragma unroll
      for (int i = 0; i < 96; ++i) y[i] = x[i * 32 + threadIdx.x];
      for (int turn = 0; turn < 100; ++turn) {
        #pragma unroll
        for (int i = 0; i < 96; ++i) y[i] = y[i] * y[(i + 7) % 96] + y[(i + 13) % 96];
      }
      #pragma unroll
      for (int i = 0; i < 96; ++i) x[i * 32 + threadIdx.x] = y[i];
    }
    """,
)


@pytest.fixture
def compiled(monkeypatch):
    """The instances that NVRTC is given, in a process that has none yet."""
    found = []
    actual = nvrtc.compile_kernel

    def compile_kernel(instance):
        found.append(instance)
        return actual(instance)

    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compiler, "_kernels", {})
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the cache."""
    monkeypatch.setenv("TCGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache" / "kernels"


@needs_nvrtc
@pytest.mark.parametrize("instance", [pytest.param(x, id=name) for name, x in instances().items()])
def test_every_kernel_compiles_without_faults(instance):
    kernel = nvrtc.compile_kernel(instance)
    assert kernel.faults == ()
    assert kernel.cubin.startswith(b"\x7fELF")
    assert f".text.{kernel.name}\0".encode() in kernel.cubin


@needs_nvrtc
@pytest.mark.compiled_all
@pytest.mark.parametrize(
    "instance",
    [
        pytest.param(x, id=name)
        for found in (all_mma_sync(), all_wgmma(), all_packed(), all_quantize(), all_split())
        for name, x in found.items()
    ],
)
def test_every_config_compiles_without_faults(instance):
    assert nvrtc.compile_kernel(instance).faults == ()


@needs_nvrtc
@pytest.mark.skipif(modules.cuda is None, reason="this build has no CUDA module")
@pytest.mark.parametrize("function", [jax.scipy.special.erf, jnp.log1p], ids=lambda f: f.__name__)
def test_a_function_runs_in_turns_where_copies_of_it_would_serialize_the_main_loop(function):
    types = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2

    def f(x, w):
        how = {"implementation": "wgmma", "config": "128x128x64_c2x1x1_pp"}
        return jax_tcgemm.matmul(x, w, epilogue=lambda acc: function(acc).astype(x.dtype), **how)

    (call,) = jax_tcgemm.explain(f, *types, platform="cuda")
    candidate = Candidate("wgmma", call.config, "")
    (instance,) = implementations.kernels(candidate, call.problem, devices.ASSUMED_GPU)
    assert nvrtc.compile_kernel(instance).faults == ()


def test_a_kernel_is_compiled_again_where_its_function_serializes_the_main_loop(monkeypatch):
    serialized = "wgmma.mma_async instructions are serialized due to a reason"
    found = []

    def compile_one(instance, *options):
        found.append((instance, *options))
        return Kernel("f", b"in turns" if options else b"at once", () if options else (serialized,))

    monkeypatch.setattr(nvrtc, "_compile", compile_one)
    of_function = Instance("tests", (), "f", "sm_90a", "struct Function;")
    assert nvrtc.compile_kernel(of_function).cubin == b"in turns"
    # Without a function there is nothing else to compile.
    bare = Instance("tests", (), "f", "sm_90a")
    assert nvrtc.compile_kernel(bare).cubin == b"at once"
    assert found == [(of_function,), (of_function, nvrtc._IN_TURNS), (bare,)]


@needs_nvrtc
def test_kernels_are_compiled_once(compiled):
    first, second = tiny("first"), tiny("second")
    found = compile_kernels([first, second, first])
    assert [found[x].name for x in (first, second)] == ["_Z5firstPf", "_Z6secondPf"]
    assert compile_kernels(iter([second])) == {second: found[second]}
    assert sorted(compiled, key=str) == [first, second]


@needs_nvrtc
def test_an_error_names_the_kernel_and_what_is_wrong_with_it(compiled):
    wrong = wgmma("64, 60, 1, 1, 1, true, false")
    with pytest.raises(CompileError) as error:
        compile_kernels([tiny(), wrong])
    assert f"the {wrong} must compile, got NVRTC_ERROR_COMPILATION" in str(error.value)
    assert "the instruction's range of n" in str(error.value)
    assert tiny() in compile_kernels([tiny()])


@needs_nvrtc
def test_spills_are_told(compiled, folder):
    with pytest.warns(UserWarning, match="tests kernel spilling for sm_80 will be slow.*spills"):
        (kernel,) = compile_kernels([SPILLING]).values()
    assert len(kernel.faults) == 1
    assert cache.read(SPILLING) == kernel


@pytest.fixture
def forget():
    """Lets NVRTC be looked for once more, when called and after the test."""

    def forget():
        nvrtc._find.cache_clear()
        nvrtc.digest.cache_clear()

    yield forget
    forget()


def test_a_missing_compiler_is_told_with_its_package(compiled, monkeypatch, forget):
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_open", lambda path: None)
        assert nvrtc.version() == ""
        assert "install nvidia-cuda-nvrtc" in jax_tcgemm.info().versions["NVRTC"]
        with pytest.raises(CompileError, match="NVRTC must be installed, got none: libnvrtc was"):
            compile_kernels([tiny()])


@needs_nvrtc
def test_missing_headers_are_told_with_their_package(tmp_path, monkeypatch, forget):
    library, found = nvrtc._find().library, nvrtc._find().folders
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_open", lambda path: library)
        patch.setattr(nvrtc, "_USUAL_TOOLKIT", tmp_path)
        patch.delenv("CUDA_HOME", raising=False)
        patch.delenv("CUDA_PATH", raising=False)
        patch.setattr(modules, "nvidia_folders", lambda folder: [tmp_path])
        assert nvrtc.reason().startswith("cuda_bf16.h was not found; install nvidia-cuda-runtime")
        for header in ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp", "mma.h"):
            (tmp_path / header).touch()
        forget()
        assert nvrtc.reason().startswith("crt/mma.h was not found; install nvidia-cuda-crt")
    forget()
    assert nvrtc._find().folders == found


def test_an_old_compiler_is_refused(monkeypatch, forget):
    class Library:
        _name = "libnvrtc.so.12"

        @staticmethod
        def nvrtcVersion(major, minor):  # noqa: N802
            major._obj.value, minor._obj.value = 12, 3

    forget()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_open", lambda path: Library())
        assert "must be 12.4 or newer, got 12.3 (libnvrtc.so.12)" in nvrtc.reason()


# --- waiting for it -----------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """NVRTC takes until the event is set; the list has what has begun."""
    event, begun = threading.Event(), []

    def compile_kernel(instance):
        begun.append(instance)
        event.wait(60)
        return nvrtc.Kernel(instance.kernel, b"cubin")

    executor = ThreadPoolExecutor(1)
    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(compiler, "_executor", lambda: executor)
    yield event, begun
    event.set()
    executor.shutdown()


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
def test_what_takes_long_is_told(slow, monkeypatch, capsys, is_terminal):
    event, _ = slow
    monkeypatch.setattr(compiler, "_QUIET_S", 0.0)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    show = compiler._show_progress

    def shown(*arguments):
        event.set()
        return show(*arguments)

    monkeypatch.setattr(compiler, "_show_progress", shown)
    assert len(compile_kernels([tiny("a"), tiny("b")])) == 2
    out, error = capsys.readouterr()
    assert out == ""
    if is_terminal:
        assert "compiling CUDA kernels" in error
    else:
        assert error == "jax_tcgemm: compiling CUDA kernels (0 of 2 done)\n"


def test_what_has_begun_is_waited_for_and_not_begun_again(slow):
    event, begun = slow
    compiler.start([tiny("a"), tiny("b")])
    threading.Timer(0.1, event.set).start()
    assert list(compile_kernels([tiny("b"), tiny("c")])) == [tiny("b"), tiny("c")]
    assert begun == [tiny("a"), tiny("b"), tiny("c")]
    assert compiler.start([tiny("a"), tiny("b"), tiny("c")]) == []


@needs_nvrtc
def test_what_does_not_compile_ahead_is_an_error_when_it_is_asked_for(compiled):
    wrong = tiny("wrong", "return 1;")
    (future,) = compiler.start([wrong])
    assert isinstance(future.exception(60), CompileError)
    for _ in range(2):
        with pytest.raises(CompileError, match="kernel wrong for sm_80 must compile"):
            compile_kernels([wrong])
    assert len(compiled) == 3


def test_an_interrupt_ends_the_wait(slow):
    _, begun = slow
    kernels = [tiny("a"), tiny("b")]

    def interrupt():
        while not begun:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    # The processes of a parallel test run ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            compile_kernels(kernels)
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == kernels[:1]


# --- the cache ----------------------------------------------------------------------------------


@needs_nvrtc
def test_another_process_reads_what_one_has_written(compiled, folder):
    (kernel,) = compile_kernels([tiny()]).values()
    compiler._kernels.clear()
    assert compile_kernels([tiny()]) == {tiny(): kernel}
    assert compiled == [tiny()]
    assert [x.suffix for x in folder.iterdir()] == [".kernel"]


@needs_nvrtc
def test_the_cache_can_be_switched_off(compiled, folder, monkeypatch):
    monkeypatch.setenv("TCGEMM_CACHE_DIR", "off")
    for _ in range(2):
        compile_kernels([tiny()])
        compiler._kernels.clear()
    assert len(compiled) == 2
    assert not folder.exists()


@needs_nvrtc
@pytest.mark.parametrize(
    "damage",
    [lambda x: b"", lambda x: x[:20], lambda x: x[:-1], lambda x: x[:-9] + b"damaged  "],
    ids=["empty", "no digest", "truncated", "changed"],
)
def test_a_damaged_file_is_replaced(compiled, folder, damage):
    compile_kernels([tiny()])
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    compiler._kernels.clear()
    with pytest.warns(UserWarning, match=f"damaged and compiled again: {file}"):
        compile_kernels([tiny()])
    assert file.read_bytes() == whole
    assert len(compiled) == 2


@needs_nvrtc
@pytest.mark.parametrize("why", ["no folder", "full", "unreadable"])
def test_a_folder_that_cannot_be_used_is_told_once(compiled, folder, monkeypatch, why):
    if why == "no folder":
        folder.parent.write_text("")
        named = folder.parent
    elif why == "full":

        def replace(source, target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

        monkeypatch.setattr(os, "replace", replace)
        named = folder
    else:
        named = cache.path(tiny("a"))
        named.mkdir(parents=True)
    with pytest.warns(UserWarning, match=f"compiled anew in each process: .*{named}") as told:
        kernels = compile_kernels([tiny("a"), tiny("b")])
    assert len(told) == 1
    assert len(kernels) == len(compiled) == 2
    assert not list(folder.parent.glob("**/*.tmp"))


def write(instance, size, last_used_s):
    cache.write(instance, nvrtc.Kernel(instance.kernel, bytes(size)))
    os.utime(cache.path(instance), (last_used_s, last_used_s))


@needs_nvrtc
def test_what_was_used_least_recently_goes_first(folder, monkeypatch):
    now = time.time()
    names = ["oldest", "read", "newer", "newest"]
    for i, name in enumerate(names):
        write(tiny(name), 1000, now - 100 + i)
    for name, age_s in (("abandoned.tmp", 2 * cache._ABANDONED_S), ("under_way.tmp", 60)):
        (folder / name).touch()
        os.utime(folder / name, (now - age_s, now - age_s))
    cache.trim()
    assert not (folder / "abandoned.tmp").exists()
    assert (folder / "under_way.tmp").exists()
    assert cache.read(tiny("oldest")).cubin == bytes(1000)  # which makes it the newest
    monkeypatch.setattr(cache, "LIMIT_BYTES", 3000)
    cache.trim()
    assert [cache.path(tiny(name)).exists() for name in names] == [True, False, False, True]


@needs_nvrtc
def test_all_that_a_kernel_depends_on_has_a_part_in_its_name(folder, tmp_path, forget, monkeypatch):
    include = tmp_path / "include"
    shutil.copytree(INCLUDE, include)
    found = dataclasses.replace(
        nvrtc._find(), folders=(include / "nvrtc", include, *nvrtc._find().folders[2:])
    )
    headers = dataclasses.replace(tiny(), headers=("tile/grid.cuh",))

    def path(instance):
        nvrtc.digest.cache_clear()
        return cache.path(instance)

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_find", lambda: found)
        paths = [path(x) for x in (tiny(), tiny("b"), tiny(body="*x = 1;"), tiny(target="sm_90a"))]
        paths.append(path(headers))
        for header in ("tile/grid.cuh", "nvrtc/cstdint"):
            (include / header).write_text("#pragma once\n")
            paths.append(path(headers))
        found = dataclasses.replace(found, version=(99, 0))
        paths.append(path(headers))
        assert path(headers) == paths[-1]
    assert len(set(paths)) == len(paths)


@needs_nvrtc
def test_processes_share_the_cache(folder):
    code = """
import sys
from jax_tcgemm.kernels import Instance, compile_kernels
kernels = [
    Instance("tests", (), f"k{i}", "sm_80", f"__global__ void k{i}(int* x) {{ *x = {i}; }}")
    for i in range(8)
]
print(sorted(x.name for x in compile_kernels(kernels).values()))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code],
            env={**os.environ, "TCGEMM_CACHE_DIR": str(folder.parent)},
            cwd=folder.parent.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    printed = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == {f"{sorted(f'_Z2k{i}Pi' for i in range(8))}\n"}
    assert len(list(folder.iterdir())) == 8
