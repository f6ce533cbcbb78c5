"""Products inside programs, beside plain JAX: small models, and single products in a loop.

A product alone shows what it computes in. Inside a program a custom call also costs about a
microsecond where XLA would inline the product, what XLA no longer fuses with its neighbors, and
what it no longer hoists out of the loop, such as a conversion of the weights. So both are loops in
which every step needs the one before, on a CPU without JAX's asynchronous dispatch, which runs a
program that is one custom call otherwise than one that is not.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import records as rec
from jax_tcgemm.bench import reference, small_models
from jax_tcgemm.bench.suites import Case
from jax_tcgemm.bench.wall_clock import percentiles

# What one call should take, so that neither the clock nor the call itself counts.
_CALL_S = 0.01
_MOST_STEPS = 1 << 20
# Small models end within this of plain JAX, relatively to the largest element.
_TOLERANCE = 1e-2


@dataclasses.dataclass(frozen=True)
class Program:
    """A step to repeat, by plain JAX and by ours, from a carry to the next."""

    group: str
    label: str
    plain: Callable
    ours: Callable
    carry: tuple
    dtype: str = ""


def models(implementation: str | None = None) -> Iterator[Program]:
    """The small models; ours are the same functions under `patch`."""
    patched = jax_tcgemm.patch(implementation=implementation)
    for model in small_models.models():
        yield Program("models", model.name, model.step, patched(model.step), model.carry)


def products(cases: Iterable[Case], implementation: str | None = None) -> Iterator[Program]:
    """Single products; a number of each result goes into the next one's left operand."""
    for case in cases:
        a, b = reference.make_inputs(case, 1)[0]
        d = jnp.zeros((*(case.batch,) * (case.batch > 1), case.m, case.n), case.out_type)
        plain = _product_step(lax.dot_general, case)
        ours = _product_step(jax_tcgemm.dot_general, case, implementation=implementation)
        yield Program("products", f"{case.shape} {case.layout}", plain, ours, (a, b, d), case.dtype)


def _product_step(dot_general: Callable, case: Case, **how) -> Callable:
    def step(a, b, d):
        number = lax.slice(d, (0,) * d.ndim, (1,) * d.ndim)
        a = lax.dynamic_update_slice(a, (0 * number.real).astype(a.dtype), (0,) * a.ndim)
        numbers, precision, out = case.dimension_numbers, case.precision, case.out_type
        return a, b, dot_general(a, b, numbers, precision, out, **how)

    return step


def measure(program: Program, samples: int, revision: str | None = None) -> dict:
    """Times a program in turns with plain JAX, after their results were compared.

    Args:
      program: the program.
      samples: calls of each.
      revision: recorded as the source revision; None reads it from git.

    Returns:
      A record: ``us`` and ``plain_us`` are microseconds of a step (p10, p50, p90), ``ratio`` is
      plain JAX's time / ours in each turn, of these the median, ``processor_ratio`` the same for
      the processor time of all threads, which other work on the machine disturbs less, ``ran``
      counts the products by what ran them, and ``identical`` says whether XLA compiled both to the
      same instructions: a ratio that is not 1 is noise then.

    Raises:
      ValueError: when the results differ.
    """
    repeat = {name: _repeat(getattr(program, name)) for name in ("ours", "plain")}
    error = _difference(*(run(2, program.carry) for run in repeat.values()))
    if not error < _TOLERANCE:
        raise ValueError(
            f"bench: {program.label} must end as plain JAX does, got a relative difference of "
            f"{error:.1e}; it is not measured"
        )
    steps = _num_steps(repeat["plain"], program.carry)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in repeat}
    for turn in range(samples):
        for name in list(repeat)[:: 1 if turn % 2 else -1]:
            times[name].append(_times(repeat[name], steps, program.carry))
    (ours, our_processor), (plain, plain_processor) = (
        zip(*of_one, strict=True) for of_one in times.values()
    )
    calls = jax_tcgemm.explain(program.ours, *program.carry)
    return {
        "schema": rec.SCHEMA,
        "kind": "program",
        "time": rec.now(),
        "revision": revision or rec.git_revision(),
        "group": program.group,
        "label": program.label,
        "dtype": program.dtype,
        "ran": dict(Counter(call.implementation for call in calls)),
        "identical": is_identical(program),
        "us": percentiles(ours),
        "plain_us": percentiles(plain),
        "ratio": _ratio(plain, ours),
        "processor_ratio": _ratio(plain_processor, our_processor),
        "error": error,
        "steps": steps,
        "samples": samples,
        "machine": rec.machine(),
    }


HEAD = (
    *("program", "dtype", "ran", "ours, µs", "plain JAX, µs"),
    *("plain : ours", "processor time, plain : ours"),
)


def row(record: dict) -> list[str]:
    """A record under `HEAD`."""
    ratios = [f"{record[key]:.2f}" for key in ("ratio", "processor_ratio")]
    return [
        record["label"],
        record["dtype"],
        ", ".join(f"{count} {name}" for name, count in record["ran"].items()),
        f"{record['us']['p50']:.4g}",
        f"{record['plain_us']['p50']:.4g}",
        *(["identical"] * 2 if record["identical"] else ratios),
    ]


def is_identical(program: Program) -> bool:
    """Whether XLA compiles ours to the instructions that it compiles plain JAX to."""
    ours, plain = (
        _instructions(_repeat(step).lower(2, program.carry).compile().as_text())
        for step in (program.ours, program.plain)
    )
    return ours == plain


def _instructions(text: str) -> list[str]:
    """Return a compiled program's instructions with numbers for names and without metadata."""
    numbers: dict[str, str] = {}
    lines = (line for line in text.splitlines() if "%" in line)
    return [
        re.sub(
            r"%[\w.-]+",
            lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"),
            re.sub(r", metadata=\{[^}]*\}", "", line),
        )
        for line in lines
    ]


def _repeat(step: Callable) -> Callable:
    """Return a compiled function that runs n steps from a first carry."""
    return jax.jit(lambda n, carry: lax.fori_loop(0, n, lambda _, carry: step(*carry), carry))


def _times(run: Callable, steps: int, carry: tuple) -> tuple[float, float]:
    """Return the wall-clock seconds and processor seconds of a step."""
    start, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(run(steps, carry))
    elapsed = time.perf_counter() - start, time.process_time() - processor
    return elapsed[0] / steps, elapsed[1] / steps


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return round(statistics.median(map(operator.truediv, theirs, ours)), 4)


def _num_steps(run: Callable, carry: tuple) -> int:
    """How many steps take about as long as one call should."""
    steps = 1
    while steps < _MOST_STEPS:
        elapsed = steps * min(_times(run, steps, carry)[0] for _ in range(3))
        if elapsed > _CALL_S / 2:
            break
        steps = math.ceil(steps * min(max(_CALL_S / elapsed, 2), 16))
    return steps


def _difference(ours, plain) -> float:
    """The largest relative difference of two trees of arrays."""

    def difference(x, y):
        x, y = (np.asarray(value).astype(np.complex128) for value in (x, y))
        return float(np.max(np.abs(x - y), initial=0) / max(np.max(np.abs(y), initial=0), 1e-30))

    return max(map(difference, jax.tree.leaves(ours), jax.tree.leaves(plain)))
