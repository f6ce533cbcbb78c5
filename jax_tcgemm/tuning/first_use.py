"""`tune_on_first_use`: measures a product that no table knows when it is first lowered.

A program is lowered between its trace and its run, when nothing is traced; what is measured then is
compiled and run by a thread of its own, which has none of the contexts that the program is lowered
in. A choice stays what it was found to be: the user's table keeps it.
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
    """Measures each product that no table knows when it is first lowered, for this process.

    Like `autotune`, for every program there will be: before such a product is compiled, the config
    that is chosen, others whose kernels are compiled already, cuBLASLt and XLA's own kernel are
    timed in turns on random numbers, for two seconds at most, and the fastest is kept in the
    user's cache folder for good. It adds that to the first start of a program, and nothing to later
    ones. `TCGEMM_TUNE=1` does the same without a change of code.

    Nothing is measured, and the choice is what it would have been, while another process uses the
    GPU, and where several processes run one computation, which must choose alike. Not measured,
    either, are products that name an implementation or whose rows must not depend on one another,
    and what `autotune` does not measure.

    Args:
      enabled: False stops it, also where TCGEMM_TUNE asks for it.

    Raises:
      TypeError: when `enabled` is neither true nor false.

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
    # One: measurements would disturb each other.
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tcgemm_tune")


def _measure(problem: Problem, device: selection.Device) -> None:
    """Lets what is fastest decide from now on, where it can be measured."""
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
        # The first runs the program otherwise, and is compiled for it in any case.
        ready = [name for name in names[1:] if all(map(is_compiled, kernels_of(problem, *name)))]
        measured = measure(problem, [names[0], *ready], _BUDGET_S, quiet=True)
        if not measured:
            raise RuntimeError("nothing that can run it was fast enough to be timed")
        table = Tuning(device, [decide(problem, before, measured)]).table
    tables.save_to_cache(table)
    tables.adopt(table, "measured when it was first used")


def _is_idle() -> bool:
    """Whether the first GPU has no work but ours, which is waited for."""
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
        return True  # Nothing is known of others.
    return len(apps.split()) <= 1
