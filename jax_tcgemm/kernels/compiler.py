"""From instances to kernels, each compiled once."""

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from jax_tcgemm.kernels import cache, nvrtc, prebuilt
from jax_tcgemm.kernels.instance import Instance, Kernel
from jax_tcgemm.kernels.nvrtc import CompileError

__all__ = ["CompileError", "compile_kernels", "is_compiled", "start"]

# What takes longer is said to be under way.
_QUIET_S = 2.0

# Of this process: the kernels that it has, and those under way. What failed is in neither.
_kernels: dict[Instance, Kernel] = {}
_under_way: dict[Instance, Future] = {}
_lock = threading.Lock()


@functools.cache
def _executor() -> ThreadPoolExecutor:
    # NVRTC takes one core for a kernel, and lets other threads of Python run meanwhile.
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="nvrtc")


def start(instances: Iterable[Instance]) -> list[Future]:
    """Begins to compile kernels that will be asked for; returns at once, with what is under way."""
    futures = []
    for instance in instances:
        with _lock:
            if instance in _kernels:
                continue
            if instance not in _under_way:
                _under_way[instance] = _executor().submit(_compile, instance)
            futures.append(_under_way[instance])
    return futures


def is_compiled(instance: Instance) -> bool:
    """Whether this process, the installation or the cache has a kernel."""
    if instance in _kernels:
        return True
    files = (place.path(instance) for place in (prebuilt, cache))
    return any(file is not None and file.exists() for file in files)


def compile_kernels(instances: Iterable[Instance]) -> dict[Instance, Kernel]:
    """Compiles kernels, those of them that neither this process nor the cache has.

    They are compiled side by side on all cores. A progress bar is shown after two seconds, on
    standard error, or one line where that is no terminal.

    Args:
      instances: the kernels.

    Returns:
      A kernel for each instance.

    Raises:
      CompileError: names the kernel, with NVRTC's messages, or says why there is no NVRTC.
    """
    instances = list(dict.fromkeys(instances))
    while futures := start(instances):
        _wait(futures)
    return {instance: _kernels[instance] for instance in instances}


def _compile(instance: Instance) -> None:
    """In a thread of the executor: makes a kernel one of those that this process has."""
    try:
        kernel = prebuilt.read(instance) or cache.read(instance)
        if kernel is None:
            kernel = nvrtc.compile_kernel(instance)
            cache.write(instance, kernel)
            cache.trim()
            if kernel.faults:
                faults = "; ".join(kernel.faults)
                warnings.warn(f"jax_tcgemm: the {instance} will be slow: {faults}", stacklevel=2)
        _kernels[instance] = kernel
    finally:
        with _lock:
            _under_way.pop(instance, None)


def _wait(futures: list[Future]) -> None:
    with contextlib.ExitStack() as stack:
        begin, advance, pending = time.monotonic(), None, set(futures)
        try:
            while pending:
                quiet_s = begin + _QUIET_S - time.monotonic() if advance is None else None
                done, pending = wait(pending, quiet_s, FIRST_COMPLETED)
                for future in done:
                    if not future.cancelled():  # by another thread, which was interrupted
                        future.result()
                if advance is not None:
                    advance(len(done))
                elif pending and time.monotonic() >= begin + _QUIET_S:
                    advance = _show_progress(stack, len(futures), len(futures) - len(pending))
        except BaseException:
            for instance, future in tuple(_under_way.items()):
                if future in pending and future.cancel():
                    _under_way.pop(instance, None)
            raise


def _show_progress(stack: contextlib.ExitStack, total: int, completed: int) -> Callable:
    """Shows that kernels are compiled until `stack` ends; returns what tells that more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"jax_tcgemm: compiling CUDA kernels ({completed} of {total} done)")
        return lambda done: None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = stack.enter_context(Progress(*columns, console=console, transient=True))
    task = bar.add_task("compiling CUDA kernels", total=total, completed=completed)
    return lambda done: bar.advance(task, done)
