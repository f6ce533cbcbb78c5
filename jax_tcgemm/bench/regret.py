"""How much slower a choice is than the best that could have been made, on random problems."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from rich.table import Table

from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.tuning.autotune import Tuned, decide
from jax_tcgemm.tuning.measuring import measure

# Extents are drawn from these ranges: m, n, k, and the batch. Each regime is as likely as another.
_REGIMES = (
    ((256, 8192), (256, 8192), (256, 8192), (1, 1)),  # training
    ((1, 256), (1024, 28672), (1024, 14336), (1, 1)),  # decoding
    ((32, 512), (32, 512), (8192, 65536), (1, 1)),  # long K
    ((512, 8192), (512, 8192), (32, 512), (1, 1)),  # short K
    ((64, 1024), (64, 1024), (32, 1024), (8, 128)),  # batched
)
_LAYOUTS = ((False, False), (False, True), (True, False))
# An H200 takes a millisecond for that many operations.
_MOST_FLOPS = 4e11
_MOST_BYTES = 2e9


def random_problems(
    count: int, seed: int = 0, dtype: str = "bf16", scale: float = 1.0
) -> list[Problem]:
    """Problems of every regime; a third with extents that are multiples of nothing.

    Args:
      count: how many.
      seed: the same seed gives the same problems.
      dtype: bf16, f16 or tf32.
      scale: of the extents: below 1 for slower machines.

    Raises:
      ValueError: for another dtype.
    """
    if dtype not in ("bf16", "f16", "tf32"):
        raise ValueError(
            f"tune: regret's dtype must be bf16, f16 or tf32, got dtype={dtype!r}; choose one"
        )
    element, compute = ("f32", "tf32") if dtype == "tf32" else (dtype, "f32")
    if jax.default_backend() != "gpu":
        compute = "f32"  # Which is all that a CPU has.
    generator = np.random.default_rng(seed)
    found: list[Problem] = []
    while len(found) < count:
        regime = _REGIMES[generator.integers(len(_REGIMES))]
        multiple = (1, 8, 64)[generator.integers(3)]
        extents = []
        for low, high in regime[:3]:
            extent = math.exp(generator.uniform(math.log(low), math.log(high))) * scale
            extents.append(max(round(extent / multiple), 1) * multiple)
        m, n, k = extents
        batch = int(generator.integers(regime[3][0], regime[3][1] + 1))
        a, b = _LAYOUTS[generator.integers(len(_LAYOUTS))]
        problem = Problem(
            batch,
            batch,
            m,
            n,
            k,
            Operand(element, a, m if a else k, 0, m * k if batch > 1 else 0),
            Operand(element, b, k if b else n, 0, k * n if batch > 1 else 0),
            element,
            compute,
        )
        if problem.flops <= _MOST_FLOPS and problem.bytes <= _MOST_BYTES:
            found.append(problem)
    return found


def time_again(tuned: Tuned, budget_s: float) -> Tuned:
    """The same, with what was chosen and what was best timed once more, beside each other.

    The shortest of thirty times owes a part of its lead to luck, and would be the best of too many.

    Args:
      tuned: what was measured for a problem.
      budget_s: seconds.

    Returns:
      With the new times; as it was where the choice is the best, or one of the two did not run.
    """
    best, chosen = tuned.measured[0], tuned.before
    if chosen is None or chosen.name == best.name:
        return tuned
    names = [(m.implementation, m.config) for m in (chosen, best)]
    again = measure(tuned.problem, names, budget_s)
    return decide(tuned.problem, chosen, again) if len(again) == len(names) else tuned


def regret(tuned: Tuned) -> float:
    """Time of what was chosen over the best time, less one; NaN where the choice did not run."""
    if tuned.before is None:
        return math.nan
    return tuned.before.us / tuned.measured[0].us - 1


def regret_table(found: Sequence[Tuned]) -> tuple[Table, str]:
    """A table of all problems, the worst first, and one line that sums it up."""
    table = Table("problem", "chosen", "us", "best", "us", "regret")
    for tuned in sorted(found, key=lambda t: (t.before is not None, -regret(t))):
        best, chosen = tuned.measured[0], tuned.before
        table.add_row(
            str(tuned.problem),
            chosen.name if chosen else "-",
            f"{chosen.us:.4g}" if chosen else "-",
            best.name if chosen is None or best.name != chosen.name else "the same",
            f"{best.us:.4g}",
            f"{100 * regret(tuned):.1f} %",
        )
    values = [regret(tuned) for tuned in found if tuned.before is not None]
    failed = len(found) - len(values)
    if not values:
        return table, f"regret: none of the {failed} choices ran"
    within = sum(value <= 0.05 for value in values)
    summary = (
        f"regret on {len(values)} problems: median {100 * np.median(values):.1f} %, "
        f"mean {100 * np.mean(values):.1f} %, max {100 * np.max(values):.1f} %; "
        f"{within} of {len(values)} within 5 %"
    )
    return table, summary + (f"; {failed} choices did not run" if failed else "")
