"""Public `tune_on_first_use`: measures products without a stored selection at first lowering.

JAX lowers a program after its trace and before its run, so nothing is being traced at that time. A
separate thread compiles and runs the measurements, without the contexts in which the program is
lowered. A selection is final: the user's table stores it.
"""

import concurrent.futures
import functools
import os
import subprocess
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_tcgemm import selection
from jax_tcgemm.kernels import is_compiled
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection import tables
from jax_tcgemm.system.switches import is_on
from jax_tcgemm.tuning.autotune import Tuning, decide
from jax_tcgemm.tuning.measuring import check_fits, contenders, kernels_of, measure, start_up

_BUDGET_S = 2.0
_CANDIDATES = 12

# Whether it was asked for by a call; None: as TCGEMM_TUNE says.
_enabled: bool | None = None
# What failed here is not tried again.
_failed: set[Problem] = set()


def tune_on_first_use(enabled: bool = True) -> None:
    """Measure each product without a stored selection when the product is first lowered.

    The setting is like `autotune` for every later program of this process. Before such a product is
    compiled, these contenders are timed in turns on random numbers, for at most two seconds: the
    selected config, other configs whose kernels are already compiled, cuBLASLt and XLA's kernel.
    The user's cache folder stores the fastest permanently. The first start of a program takes
    longer by the time of the measurements; later starts do not. `TCGEMM_TUNE=1` has the same effect
    without a code change.

    Nothing is measured while another process uses the GPU, or if several processes run one
    computation, because these must make equal selections; the selection is then made as usual.
    Products that name an implementation, batch-invariant products and products that `autotune` does
    not measure are not measured, either.

    Args:
      enabled: whether to measure. False disables measurements even if TCGEMM_TUNE enables them.

    Raises:
      TypeError: if `enabled` is not a bool.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> jax_tcgemm.tune_on_first_use()
      >>> y = jax.jit(jax_tcgemm.matmul)(jnp.ones((24, 40)), jnp.ones((40, 56)))
      >>> jax_tcgemm.tune_on_first_use(False)
    """
    global _enabled
    if not isinstance(enabled, bool):
        raise TypeError(
            f"tune_on_first_use: enabled must be True or False, got enabled of type "
            f"{type(enabled).__name__}; leave it out"
        )
    _enabled = enabled


def _measurer() -> Callable | None:
    is_asked = is_on("TCGEMM_TUNE") if _enabled is None else _enabled
    return _measure if is_asked else None


selection.set_measurer(_measurer)


@functools.cache
def _worker() -> concurrent.futures.ThreadPoolExecutor:
    # One thread, as measurements would disturb each other.
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tcgemm_tune")


def _measure(problem: Problem, device: selection.Device) -> None:
    """Measure a problem, if possible, and select the fastest implementation from now on."""
    is_here = device == selection.default_device() and not device.assumed
    if not is_here or jax.process_count() > 1 or problem.flops == 0 or problem in _failed:
        return
    try:
        _worker().submit(_measure_and_keep, problem, device).result()
    except Exception as error:
        _failed.add(problem)
        warnings.warn(
            f"jax_tcgemm: {problem} could not be measured when it was first used, and is chosen "
            f"for without: {error}",
            stacklevel=2,
        )


def _measure_and_keep(problem: Problem, device: selection.Device) -> None:
    with selection.unseen():
        if device.platform == "cuda" and not _is_idle():
            return
        check_fits("tune_on_first_use", problem)
        start_up(device)
        before = selection.select(CallOptions("tune_on_first_use"), problem, device)
        names = contenders(problem, device, _CANDIDATES)
        # The first is the current selection, which the program needs compiled in any case.
        ready = [name for name in names[1:] if all(map(is_compiled, kernels_of(problem, *name)))]
        measured = measure(problem, [names[0], *ready], _BUDGET_S, quiet=True)
        if not measured:
            raise RuntimeError("nothing that can run it was fast enough to be timed")
        table = Tuning(device, [decide(problem, before, measured)]).table
    tables.save_to_cache(table)
    tables.adopt(table, "measured when it was first used")


def _is_idle() -> bool:
    """Wait for this process's work; return whether no other process uses the first GPU."""
    jax.block_until_ready(jnp.zeros(()) + 1)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
    try:
        apps = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", "-i", first],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return True  # Other processes are unknown.
    return len(apps.split()) <= 1
