"""From instances to kernels, each compiled once."""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from jax_tcgemm.kernels import cache, nvrtc
from jax_tcgemm.kernels.instance import Instance, Kernel
from jax_tcgemm.kernels.nvrtc import CompileError

__all__ = ["CompileError", "compile_kernels"]

# What takes longer is said to be under way.
_QUIET_S = 2.0

# Of this process. A dictionary's own operations need no lock, and a kernel that two threads ask for
# at once is compiled by both.
_kernels: dict[Instance, Kernel] = {}


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
    missing = []
    for instance in instances:
        if instance not in _kernels:
            if kernel := cache.read(instance):
                _kernels[instance] = kernel
            else:
                missing.append(instance)
    if missing:
        _compile(missing)
    return {instance: _kernels[instance] for instance in instances}


def _compile(instances: list[Instance]) -> None:
    executor = ThreadPoolExecutor(
        min(len(instances), len(os.sched_getaffinity(0))), thread_name_prefix="nvrtc"
    )
    # Threads of their own even for one kernel: the caller's can be interrupted while it waits.
    try:
        futures = {executor.submit(nvrtc.compile_kernel, x): x for x in instances}
        with contextlib.ExitStack() as stack:
            begin, advance, pending = time.monotonic(), None, set(futures)
            while pending:
                quiet_s = begin + _QUIET_S - time.monotonic() if advance is None else None
                done, pending = wait(pending, quiet_s, FIRST_COMPLETED)
                for future in done:
                    _keep(futures[future], future.result())
                if advance is not None:
                    advance(len(done))
                elif pending and time.monotonic() >= begin + _QUIET_S:
                    advance = _show_progress(stack, len(futures), len(futures) - len(pending))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
    cache.trim()


def _keep(instance: Instance, kernel: Kernel) -> None:
    _kernels[instance] = kernel
    cache.write(instance, kernel)
    if kernel.faults:
        warnings.warn(
            f"jax_tcgemm: the {instance} will be slow: {'; '.join(kernel.faults)}", stacklevel=4
        )


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
