"""Selection and estimated time of `simt_batched`, for large batches of tiny matrices.

The kernel is bound by memory bandwidth, or by the CUDA cores where matrices are larger.
"""

from collections.abc import Sequence

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection import xla_forms
from jax_tcgemm.selection.cost_model import coverage
from jax_tcgemm.selection.implementations import Candidate

IMPLEMENTATION = "simt_batched"

# A launch, and the fraction of memory bandwidth that the kernel reaches (H200: 39017x11x11x11 NT
# float32 takes 18 us and its memory traffic 12 us; 52512x15x15x9 NT float64 takes 55 and 43 us).
_LAUNCH_US, _BANDWIDTH = 3.0, 0.8
# Multiply-adds of an SM per microsecond, in float32 and in float64.
_PRODUCTS_PER_US, _WIDE_PRODUCTS_PER_US = 64 * 1700.0, 48 * 1700.0
# Batches with fewer entries, or with a shorter time of memory traffic, gain nothing over XLA's
# loop, which XLA fuses with its neighbors.
_LEAST_BATCH, _LEAST_MEMORY_US = 1000, 3.0
# The largest extent where libraries have no estimate; above it they are as fast (3000x32x32x32 NT
# complex64: 33 us, XLA 24 us; 6000x24x24x24 NN float64: 28 and 29 us).
_MOST_UNMODELLED = 28


def estimated_us(problem: Problem, num_sms: int, bytes_per_us: float) -> float:
    """Estimate the time of the kernel in microseconds."""
    memory = problem.bytes / (_BANDWIDTH * bytes_per_us)
    rate = _WIDE_PRODUCTS_PER_US if problem.compute == "f64" else _PRODUCTS_PER_US
    arithmetic = problem.flops / 2 / (rate * num_sms)
    return _LAUNCH_US + max(memory, arithmetic)


def candidate_of(
    problem: Problem, considered: Sequence[Candidate], bytes_per_us: float
) -> Candidate | None:
    """Return the candidate for a batch of tiny matrices; None where it cannot run or gains nothing.

    XLA's loop runs at memory bandwidth if it reads both operands along rows and K is small.
    """
    if problem.batch < _LEAST_BATCH or problem.bytes / bytes_per_us < _LEAST_MEMORY_US:
        return None
    if xla_forms.broadcast_pays(problem) and xla_forms.broadcast_is_fast(problem):
        return None
    is_large = max(problem.m, problem.n, problem.k) > _MOST_UNMODELLED
    if is_large and not coverage.models(problem):
        return None
    found = (c for c in considered if c.implementation == IMPLEMENTATION and not c.reason)
    return next(found, None)
