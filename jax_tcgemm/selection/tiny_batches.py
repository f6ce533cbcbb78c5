"""When `simt_batched` is selected, and its estimated time: large batches of tiny matrices.

Its kernel is bound by memory, or by the CUDA cores where matrices are larger.
"""

from collections.abc import Sequence

from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection import cost_model, xla_forms
from jax_tcgemm.selection.implementations import Candidate

IMPLEMENTATION = "simt_batched"

# A launch, and the part of the memory's bandwidth that the kernel reaches (H200: 39017x11x11x11 NT
# float32 18 us, where memory takes 12; 52512x15x15x9 NT float64 55 and 43).
_LAUNCH_US, _BANDWIDTH = 3.0, 0.8
# Multiply-adds of an SM in a microsecond, of float32 and of float64.
_PRODUCTS_PER_US, _WIDE_PRODUCTS_PER_US = 64 * 1700.0, 48 * 1700.0
# Batches below this, or whose memory traffic takes less, gain nothing over XLA's loop, which XLA
# fuses with what is around it.
_LEAST_BATCH, _LEAST_MEMORY_US = 1000, 3.0
# Where libraries are not modelled, they are as fast from here on (3000x32x32x32 NT complex64:
# 33 us, XLA's 24; 6000x24x24x24 NN float64: 28 and 29).
_MOST_UNMODELLED = 28


def estimated_us(problem: Problem, num_sms: int, bytes_per_us: float) -> float:
    """Estimated time of the kernel."""
    memory = problem.bytes / (_BANDWIDTH * bytes_per_us)
    rate = _WIDE_PRODUCTS_PER_US if problem.compute == "f64" else _PRODUCTS_PER_US
    arithmetic = problem.flops / 2 / (rate * num_sms)
    return _LAUNCH_US + max(memory, arithmetic)


def candidate_of(
    problem: Problem, considered: Sequence[Candidate], bytes_per_us: float
) -> Candidate | None:
    """The candidate that runs a batch of tiny matrices; None where it cannot or would gain nothing.

    Where XLA's loop reads both operands along rows and has few terms, it is as fast as memory.
    """
    if problem.batch < _LEAST_BATCH or problem.bytes / bytes_per_us < _LEAST_MEMORY_US:
        return None
    if xla_forms.broadcast_pays(problem) and xla_forms.broadcast_is_fast(problem):
        return None
    is_large = max(problem.m, problem.n, problem.k) > _MOST_UNMODELLED
    if is_large and not cost_model.models(problem):
        return None
    found = (c for c in considered if c.implementation == IMPLEMENTATION and not c.reason)
    return next(found, None)
