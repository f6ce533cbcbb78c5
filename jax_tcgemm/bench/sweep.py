"""Random problems by the default choice beside XLA: the test that the default is never slower.

Each problem of `random_problems` is computed by the library's default choice and by the same
expression in plain JAX, both jitted and timed in turns, after both results have been compared with
a reference on the host. A record of a problem is one JSON line::

    kind "sweep", time, revision, seed, machine
    sweep_kind, problem       the kind and the text of the problem
    ran, why                  implementation/config of each call, and why it was selected
    us, xla_us, ratio         medians in microseconds; of the turns' XLA time / ours the median
    turns                     calls of each
    error, xla_error          max |result - reference| / max |reference|
    tolerance                 what the error must not exceed
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from rich.table import Table

import jax_tcgemm
from jax_tcgemm.bench import records, reference
from jax_tcgemm.bench.random_problems.problem import Problem
from jax_tcgemm.tuning import timing

OURS, XLA = "ours", "xla"
# The promise: a ratio below this is a fault, unless the time lost is below what a launch varies by.
LEAST_RATIO, FORGIVEN_US = 0.95, 0.3
_TURNS = 15
# Problems that are compiled and then traced together.
_TOGETHER = 48


@dataclasses.dataclass
class _Prepared:
    problem: Problem
    ran: list[str] = dataclasses.field(default_factory=list)
    why: list[str] = dataclasses.field(default_factory=list)
    runnables: list[timing.Runnable] = dataclasses.field(default_factory=list)
    expected: list[np.ndarray] = dataclasses.field(default_factory=list)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: str = ""


def measure(
    problems: Sequence[Problem],
    *,
    limit_s: float,
    advance: Callable[[str, int], None] = lambda what, number: None,
) -> Iterator[dict]:
    """Checks and times problems, some at a time.

    Args:
      problems: the problems.
      limit_s: seconds after which no more are begun that would not be done by then.
      advance: told what is done now, and how many problems are done with.

    Yields:
      Of each problem its record, without what all records share.
    """
    start, longest = time.monotonic(), 0.0
    jobs = min(16, os.cpu_count() or 1)
    with jax.enable_x64(True), concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for first in range(0, len(problems), _TOGETHER):
            begin = time.monotonic()
            if first and begin - start + longest > limit_s:
                return
            some = problems[first : first + _TOGETHER]
            advance(f"compiling {len(some)} problems", 0)
            # All before anything is timed: XLA runs candidates of its own while it compiles.
            prepared = list(pool.map(_prepare, some, range(len(some))))
            advance(f"checking {len(some)} problems", 0)
            list(pool.map(_expect, prepared))
            for each in prepared:
                _check(each)
            advance(f"measuring {len(some)} problems", 0)
            yield from map(_record, prepared, _time(prepared))
            advance("", len(some))
            longest = max(longest, time.monotonic() - begin)
            jax.clear_caches()  # Programs that are never called again.


def _prepare(problem: Problem, number: int) -> _Prepared:
    """Compiles both programs."""
    prepared = _Prepared(problem)
    try:
        with jax.enable_x64(True):  # Holds for one thread.
            calls = jax_tcgemm.explain(problem.ours, *problem.operands)
            prepared.ran = [f"{call.implementation}/{call.config}" for call in calls]
            prepared.why = [call.why for call in calls]
            for name, function in ((OURS, problem.ours), (XLA, problem.plain)):
                module = f"tcgemm_sweep_{number}_{name}"
                jitted = jax.jit(_named(function, module))
                jitted.lower(*problem.operands).compile()
                prepared.runnables.append(timing.Runnable(name, f"jit_{module}", jitted))
    except Exception as failure:  # The record says so; the others are still measured.
        prepared.failure = _text(failure)
    return prepared


def _named(function: Callable, name: str) -> Callable:
    def named(*operands):
        return function(*operands)

    named.__name__ = named.__qualname__ = name
    return named


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"


def _inputs(problem: Problem, number: int) -> list[tuple[jax.Array, ...]]:
    with jax.enable_x64(True):
        return reference.make_inputs(problem, number)


def _expect(each: _Prepared) -> None:
    """Computes the reference on the host."""
    if each.failure:
        return
    try:
        with jax.enable_x64(True):
            (operands,) = _inputs(each.problem, 1)
            results = each.problem.reference(*map(_on_host, operands))
            each.expected = [np.asarray(x) for x in jax.tree.leaves(results)]
    except Exception as failure:
        each.failure = f"the reference failed: {_text(failure)}"


def _on_host(x: jax.Array) -> np.ndarray:
    """An operand in 64 bits; complex numbers in twice as many."""
    if np.issubdtype(x.dtype, np.integer):
        return np.asarray(x).astype(np.int64)
    wide = np.complex128 if np.issubdtype(x.dtype, np.complexfloating) else np.float64
    return np.asarray(x).astype(wide)


def _check(each: _Prepared) -> None:
    """Runs both programs once and compares them with the reference."""
    if each.failure:
        return
    try:
        (operands,) = _inputs(each.problem, 1)
        for runnable in each.runnables:
            results = jax.tree.leaves(jax.device_get(runnable.function(*operands)))
            pairs = zip(results, each.expected, strict=True)
            each.errors[runnable.name] = max(_error(*pair) for pair in pairs)
    except Exception as failure:
        each.failure = _text(failure)


def _error(result: np.ndarray, expected: np.ndarray) -> float:
    if result.shape != expected.shape:
        raise ValueError(f"the result's shape is {result.shape}, not {expected.shape}")
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    difference = np.abs(np.asarray(result).astype(wide) - expected).max(initial=0.0)
    return float(difference / max(np.abs(expected).max(initial=0.0), np.finfo(float).tiny))


def _time(prepared: Sequence[_Prepared]) -> list[dict[str, timing.Timing] | None]:
    """Timings of both programs of each problem, None where there are none."""
    cache_bytes = timing.cache_bytes()
    timer = "trace" if jax.default_backend() == "gpu" else "wall"
    found: list[dict[str, timing.Timing] | None] = [None] * len(prepared)
    left = [number for number, each in enumerate(prepared) if not each.failure]
    for _ in range(2):  # A trace can lose what some of them did.
        groups = []
        for number in left:
            each = prepared[number]
            num_sets = timing.num_input_sets(each.problem.input_bytes, cache_bytes)
            flush = each.problem.input_bytes * num_sets < 2 * cache_bytes
            make_sets = functools.partial(_inputs, each.problem, num_sets)
            counts = [_TURNS] * len(each.runnables)
            groups.append(
                timing.Group(each.runnables, make_sets, counts, 2 * cache_bytes if flush else 0)
            )
        times: list = [None] * len(left)
        with contextlib.suppress(RuntimeError):
            times = timing.measure_groups(groups, timer=timer)
        for number, one in zip(left, times, strict=True):
            if isinstance(one, dict):
                found[number] = one
            elif one is not None:
                prepared[number].failure = _text(one)
        left = [number for number in left if found[number] is None]
        if not left:
            break
    return found


def _record(each: _Prepared, times: dict[str, timing.Timing] | None) -> dict:
    record = {
        "sweep_kind": each.problem.kind,
        "problem": each.problem.text,
        "ran": each.ran,
        "why": each.why,
        "error": each.errors.get(OURS),
        "xla_error": each.errors.get(XLA),
        "tolerance": each.problem.tolerance,
    }
    if times is None:
        return record | {"failure": each.failure}
    ours, xla = times[OURS], times[XLA]
    return record | {
        "us": round(ours.percentile(50), 3),
        "xla_us": round(xla.percentile(50), 3),
        "ratio": round(ours.ratio(xla), 4),
        "turns": len(ours.us),
        "timer": ours.timer,
    }


def shared_fields(seed: int, revision: str | None) -> dict:
    """Fields that all records of a sweep share."""
    return {
        "schema": records.SCHEMA,
        "kind": "sweep",
        "time": records.now(),
        "revision": revision or records.git_revision(),
        "seed": seed,
        "machine": records.machine(),
    }


def is_wrong(record: dict) -> bool:
    """Whether a result differs from the reference by more than its tolerance, or there is none."""
    return "failure" in record or not record["error"] <= record["tolerance"]


def is_slow(record: dict) -> bool:
    """Whether the default loses more to XLA than is forgiven."""
    if "ratio" not in record or record["ratio"] >= LEAST_RATIO:
        return False
    return record["us"] - record["xla_us"] > FORGIVEN_US


QUANTILES = (0, 1, 5, 50, 95)


def quantiles(found: Sequence[dict]) -> list[tuple[str, int, float, list[float]]]:
    """Kind, number, geometric mean and `QUANTILES` of the ratios; all kinds together at the end."""
    by_kind: dict[str, list[float]] = {}
    for record in found:
        if "ratio" in record:
            by_kind.setdefault(record["sweep_kind"], []).append(record["ratio"])
    everything = [ratio for ratios in by_kind.values() for ratio in ratios]
    rows = [*by_kind.items(), ("all", everything)] if everything else []
    return [
        (
            kind,
            len(ratios),
            float(np.exp(np.mean(np.log(ratios)))),
            [float(x) for x in np.percentile(ratios, QUANTILES)],
        )
        for kind, ratios in rows
    ]


def tables(found: Sequence[dict]) -> tuple[Table, Table]:
    """Quantiles of XLA's time / ours by kind, and every problem that is slow or wrong."""
    summary = Table("kind", "problems", "geomean", *(f"{q} %" for q in QUANTILES))
    for kind, number, geomean, values in quantiles(found):
        summary.add_row(kind, str(number), f"{geomean:.3f}", *(f"{value:.3f}" for value in values))
    faults = Table("problem", "µs", "XLA, µs", "ratio", "error", "XLA's", "ran")
    for record in sorted(found, key=lambda x: x.get("ratio", 0.0)):
        if not (is_slow(record) or is_wrong(record)):
            continue
        if "failure" in record:
            faults.add_row(record["problem"], "", "", "", record["failure"], "", "")
            continue
        faults.add_row(
            record["problem"],
            f"{record['us']:.4g}",
            f"{record['xla_us']:.4g}",
            f"{record['ratio']:.3f}",
            f"{record['error']:.1e}",
            f"{record['xla_error']:.1e}",
            ", ".join(dict.fromkeys(record["ran"])),
        )
    return summary, faults
