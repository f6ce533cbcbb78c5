"""How much slower a choice is than the best that could have been made, on random problems.

Of each problem, what is chosen where no table knows it is timed in turns with XLA's own kernel and
with a bounded number of our other ways to run it. A row of the file is one way to run one problem::

    m, n, k, batch, layout, dtype, epilogue     the problem; rows are packed
    implementation, config, us, turns           the way, and the median of so many calls
    chosen                                      1 for what is chosen, else 0
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import dataclasses
import functools
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.bench import records, reference
from jax_tcgemm.bench.suites import LAYOUTS, Case
from jax_tcgemm.inspect.explain import Call
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection import tables
from jax_tcgemm.selection.configs import WgmmaConfig
from jax_tcgemm.tuning import timing
from jax_tcgemm.tuning.measuring import compile_kernels_of

# Extents are drawn log-uniformly up to these.
_MOST_EXTENT, _MOST_BATCH = 65536, 512
# An H200 takes a millisecond for that many operations.
_MOST_FLOPS, _MOST_BYTES = 4e11, 2e9
# One problem in so many is batched, has an epilogue.
_BATCHED, _FUSED = 0.4, 0.12

# Ways beside the chosen one and XLA's: the first of the cost model's order, then the first of each
# kind of wgmma that is not among them (the transposed problem or not, K split or not); and the
# first of the others. With a function a kernel is compiled for each way.
_FIRST, _OF_KINDS = 8, 4
_OTHERS = {
    "cublaslt": 2,
    "mma_sync": 4,
    "wmma_tiled": 1,
    "simt_tiled": 1,
    "simt_batched": 1,
    "host": 1,
}
_FUSED_WAYS = 4

# Turns that tell the slow from the fast, and turns of those that came first and of the chosen one.
_FIRST_TURNS, _SECOND_TURNS = 5, 15
_FINALISTS = 4
# What takes so many times the fastest call's time, on the host's clock, is not measured.
_FAR_BEHIND = 4.0
# Problems that are compiled and then traced together.
_TOGETHER = 24


def _gelu(x):
    return jax.nn.gelu(x, approximate=True)


# Epilogues of the accumulator, and of the operands that the tuple names: a row, a matrix.
EPILOGUES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "bias": (lambda acc, bias: acc + bias, ("n",)),
    "gelu": (lambda acc, bias: _gelu(acc + bias), ("n",)),
    "residual": (lambda acc, bias, x: acc + bias + x, ("n", "mn")),
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """Problem to measure: a product and the name of its epilogue, "" for none."""

    case: Case
    epilogue: str = ""

    def __str__(self) -> str:
        case = self.case
        return f"{case.shape} {case.layout} {case.dtype} {self.epilogue}".rstrip()

    @property
    def key(self) -> tuple[str, ...]:
        """Values of the problem's columns in a row of the file, in the order of `PROBLEM`."""
        case = self.case
        fields = case.m, case.n, case.k, case.batch, case.layout, case.dtype, self.epilogue
        return tuple(map(str, fields))

    @property
    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of A and B as stored in memory, and of the epilogue's operands."""
        case = self.case
        if not self.epilogue:
            return case.operands
        rows = (case.batch, case.m) if case.batch > 1 else (case.m,)
        shapes = ((case.n,) if kind == "n" else (*rows, case.n) for kind in self._reads)
        return (*case.operands, *(jax.ShapeDtypeStruct(s, case.element_type) for s in shapes))

    @property
    def _reads(self) -> tuple[str, ...]:
        return EPILOGUES[self.epilogue][1]

    def function(self, implementation: str | None, config: str | None = None) -> Callable:
        """Return the function of the operands, by our own choice, a named one, or plain JAX."""
        case, numbers = self.case, self.case.dimension_numbers
        plain = implementation in (selection.XLA, UNFUSED)
        if implementation == selection.XLA:
            product = functools.partial(lax.dot_general, precision=case.precision)
        else:
            asked = {} if plain else {"implementation": implementation, "config": config}
            product = functools.partial(jax_tcgemm.dot_general, precision=case.precision, **asked)
        if not self.epilogue:
            return lambda a, b: product(a, b, numbers)
        follows = functools.partial(_rounded, EPILOGUES[self.epilogue][0], case.element_type)
        if not plain:
            return lambda a, b, *rest: product(
                a, b, numbers, epilogue=follows, epilogue_operands=rest
            )
        return lambda a, b, *rest: follows(
            product(a, b, numbers, preferred_element_type=jnp.float32), *rest
        )


def _rounded(function: Callable, dtype: str, acc, *operands):
    return function(acc, *(x.astype(acc.dtype) for x in operands)).astype(dtype)


# Our own choice for the product, and an epilogue that XLA runs.
UNFUSED = "unfused"
XLA_NAME = f"{selection.XLA}/default"
PROBLEM = ("m", "n", "k", "batch", "layout", "dtype", "epilogue")
FIELDS = (*PROBLEM, "implementation", "config", "us", "turns", "chosen")


def random_problems(count: int, seed: int = 0, scale: float = 1.0) -> list[Draw]:
    """Problems of any size, layout and alignment, in bf16 and TF32; some batched, some fused.

    Args:
      count: how many.
      seed: the same seed gives the same problems, of which a larger count has more.
      scale: of the logarithms of the largest extents: below 1 for slower machines.
    """
    generator = np.random.default_rng(seed)

    def extent(most: int, multiple: int = 1) -> int:
        drawn = math.exp(generator.uniform(0, scale * math.log(most)))
        return max(round(drawn / multiple), 1) * multiple

    found: list[Draw] = []
    while len(found) < count:
        multiple = (1, 8, 64)[generator.integers(3)]
        # Rows of activations are any number, however aligned the weights.
        of_m = (1, multiple)[generator.integers(2)]
        m, n, k = (extent(_MOST_EXTENT, each) for each in (of_m, multiple, multiple))
        batch = extent(_MOST_BATCH) if generator.random() < _BATCHED else 1
        dtype = ("bf16", "tf32")[generator.integers(2)]
        layout = LAYOUTS[generator.integers(len(LAYOUTS))]
        epilogue = ""
        if generator.random() < _FUSED:
            epilogue = tuple(EPILOGUES)[generator.integers(len(EPILOGUES))]
        case = Case("regret", "", batch, m, n, k, dtype, layout)
        if case.flops <= _MOST_FLOPS and case.bytes <= _MOST_BYTES:
            found.append(Draw(case, epilogue))
    return found


# --- the ways to run a problem ------------------------------------------------------------------


class Ways(NamedTuple):
    """The ways to run a problem: functions of the operands by name, `implementation/config`.

    `problem` is the product as our implementations see it, None where it is none for them.
    """

    chosen: str
    functions: dict[str, Callable]
    problem: Problem | None


def ways(draw: Draw, device: selection.Device) -> Ways:
    """Return the ways to run a problem: the selected one, XLA's own kernel, then others."""
    auto = draw.function(None)
    call = _only_call(draw, auto, device)
    unfused = f"{UNFUSED}/{selection.XLA}"
    is_fused = call is not None and getattr(call.problem, "function", None) is not None
    chosen = unfused
    if is_fused or not draw.epilogue:
        chosen = f"{call.implementation}/{call.config}"
    found = {chosen: auto, XLA_NAME: draw.function(selection.XLA)}
    if draw.epilogue:
        found.setdefault(unfused, draw.function(UNFUSED))
        if not is_fused:
            call = _only_call(draw, draw.function("wgmma"), device)
    problem = call.problem if call is not None else None
    if isinstance(problem, Problem):
        limits = {"wgmma": _FUSED_WAYS} if draw.epilogue else _OTHERS
        for name in _others(problem, device, limits):
            found.setdefault("/".join(name), draw.function(*name))
    return Ways(chosen, found, problem)


def _only_call(draw: Draw, function: Callable, device: selection.Device) -> Call | None:
    """The one call of ours that a function makes; None where it cannot be made."""
    with contextlib.suppress(ValueError):
        calls = jax_tcgemm.explain(function, *draw.operands, platform=device.platform)
        return calls[0] if len(calls) == 1 else None


def _others(
    problem: Problem, device: selection.Device, limits: dict[str, int]
) -> Iterator[tuple[str, str]]:
    by_name: dict[str, list[str]] = {}
    for candidate, _ in selection.ranked(problem, device):
        by_name.setdefault(candidate.implementation, []).append(candidate.config)
    by_name.pop(selection.XLA, None)
    wgmma = by_name.get("wgmma", [])
    yield from (("wgmma", config) for config in wgmma[: limits.get("wgmma", _FIRST)])
    if "wgmma" not in limits:
        kinds: dict[tuple[bool, bool], str] = {}
        for name in wgmma[_FIRST:]:
            config = WgmmaConfig.parse(name)
            kinds.setdefault((config.swap_ab, config.num_splits > 1), name)
        yield from (("wgmma", config) for config in list(kinds.values())[:_OF_KINDS])
    for name, limit in limits.items():
        if name != "wgmma":
            yield from ((name, config) for config in by_name.get(name, [])[:limit])


# --- measuring ----------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """A problem, what is chosen for it, and of each way that ran its microseconds and turns."""

    draw: Draw
    chosen: str
    times: dict[str, tuple[float, int]]


@dataclasses.dataclass
class _Prepared:
    """A problem with its ways compiled, and the seconds that a call of each takes."""

    draw: Draw
    chosen: str
    runnables: list[timing.Runnable]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    times: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)


def measure(
    draws: Sequence[Draw],
    device: selection.Device,
    *,
    budget_s: float,
    limit_s: float = math.inf,
    advance: Callable[[str, int], None] = lambda what, number: None,
) -> Iterator[Outcome]:
    """Measures problems as if no table knew them; a few at a time, each yielded when it is done.

    Args:
      draws: the problems.
      device: this machine's default device.
      budget_s: seconds that calls for one problem take at most, but for one of each way.
      limit_s: seconds after which no more are begun that would not be done by then.
      advance: told what is done now, and how many problems are done with.

    Yields:
      What was measured; of a problem none of whose ways runs, nothing.
    """
    start, longest = time.monotonic(), 0.0
    jobs = min(8, os.cpu_count() or 1)
    with tables.unused(), concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for first in range(0, len(draws), _TOGETHER):
            begin = time.monotonic()
            if first and begin - start + longest > limit_s:
                return
            some = draws[first : first + _TOGETHER]
            advance(f"compiling {len(some)} problems", 0)
            # All before anything is timed: XLA runs candidates of its own while it compiles.
            prepared = list(pool.map(_prepare, some, range(len(some)), [device] * len(some)))
            advance(f"measuring {len(some)} problems", 0)
            for turns in (_FIRST_TURNS, _SECOND_TURNS):
                _time(prepared, turns, budget_s)
            yield from (Outcome(p.draw, p.chosen, p.times) for p in prepared if p.times)
            advance("", len(some))
            longest = max(longest, time.monotonic() - begin)
            # Programs that are never called again.
            jax.clear_caches()


def _prepare(draw: Draw, number: int, device: selection.Device) -> _Prepared:
    """Compiles all that a problem needs; what does not compile is left out."""
    try:
        chosen, functions, problem = ways(draw, device)
    except Exception as failure:
        warnings.warn(f"jax_tcgemm: {draw} is left out: {failure}", stacklevel=2)
        return _Prepared(draw, "", [])
    if problem is not None:
        compile_kernels_of(problem, [name.split("/", 1) for name in functions])
    runnables = []
    for index, (name, function) in enumerate(functions.items()):
        module = f"tcgemm_regret_{number}_{index}"

        def named(*operands, function=function):
            return function(*operands)

        named.__name__ = named.__qualname__ = module
        jitted = jax.jit(named)
        with contextlib.suppress(Exception):
            jitted.lower(*draw.operands).compile()
            runnables.append(timing.Runnable(name, f"jit_{module}", jitted))
    with contextlib.suppress(Exception):
        for x in draw.operands:
            reference.random.lower(jax.random.key(0, impl="rbg"), x.shape, x.dtype).compile()
    return _Prepared(draw, chosen, runnables)


def _time(prepared: Sequence[_Prepared], turns: int, budget_s: float) -> None:
    """Time the ways whose order is not known yet, of all problems in one trace."""
    cache_bytes = timing.cache_bytes()
    timer = "trace" if jax.default_backend() == "gpu" else "wall"
    groups = []
    for each in prepared:
        case = each.draw.case
        num_sets = timing.num_input_sets(case.input_bytes, cache_bytes)
        make_sets = functools.partial(reference.make_inputs, each.draw, num_sets)
        if not each.seconds:
            _warm_up(each)
        chosen = _contending(each)
        each_s = sum(each.seconds[r.name] for r in chosen)
        affordable = max(1, min(turns, int(budget_s / 2 / each_s))) if chosen else 0
        filled = case.input_bytes * num_sets
        flush_bytes = 2 * cache_bytes if filled < 2 * cache_bytes else 0
        groups.append(timing.Group(chosen, make_sets, [affordable] * len(chosen), flush_bytes))
    left = [pair for pair in zip(prepared, groups, strict=True) if pair[1].contenders]
    for _ in range(2):  # A trace can lose what some of them did.
        found: list = [None] * len(left)
        with contextlib.suppress(RuntimeError):
            found = timing.measure_groups([group for _, group in left], timer=timer)
        for (each, _), times in zip(left, found, strict=True):
            if isinstance(times, dict):
                each.times |= {n: (t.percentile(50), len(t.us)) for n, t in times.items()}
        left = [
            pair for pair, times in zip(left, found, strict=True) if not isinstance(times, dict)
        ]
        if not left:
            break


def _contending(each: _Prepared) -> list[timing.Runnable]:
    """All that run; once they have been timed, the first of them, the chosen one and XLA's."""
    running = [r for r in each.runnables if r.name in each.seconds]
    if not each.times:
        return running
    order = sorted((r for r in running if r.name in each.times), key=lambda r: each.times[r.name])
    always = each.chosen, XLA_NAME
    return [r for i, r in enumerate(order) if i < _FINALISTS or r.name in always]


def _warm_up(each: _Prepared) -> None:
    """Calls each way, and finds how long that takes; leaves out what fails or is far behind."""
    with contextlib.suppress(Exception):
        (operands,) = reference.make_inputs(each.draw, 1)
        for runnable in each.runnables:
            with contextlib.suppress(Exception):
                times = []
                for _ in range(2):  # The first call also loads what it needs.
                    start = time.perf_counter()
                    jax.block_until_ready(runnable.function(*operands))
                    times.append(time.perf_counter() - start)
                each.seconds[runnable.name] = times[-1]
    limit = _FAR_BEHIND * min(each.seconds.values(), default=0.0)
    kept = {n: s for n, s in each.seconds.items() if s <= limit or n == each.chosen}
    each.seconds = kept


# --- the file and its summary -------------------------------------------------------------------


def read(path: pathlib.Path) -> list[Outcome]:
    """Read the outcomes of a file in its order; [] where there is no file."""
    found: dict[tuple, Outcome] = {}
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            key = tuple(row[name] for name in PROBLEM)
            if key not in found:
                m, n, k, batch = (int(row[name]) for name in PROBLEM[:4])
                case = Case("regret", "", batch, m, n, k, row["dtype"], row["layout"])
                found[key] = Outcome(Draw(case, row["epilogue"]), "", {})
            name = f"{row['implementation']}/{row['config']}"
            found[key].times[name] = float(row["us"]), int(row["turns"])
            if row["chosen"] == "1":
                found[key] = found[key]._replace(chosen=name)
    return list(found.values())


def append(path: pathlib.Path, outcome: Outcome) -> None:
    """Writes a problem's rows at the end of a file, after a line on where new ones come from."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            machine = records.machine()["device"]
            file.write(f"# python -m jax_tcgemm bench regret on {machine}")
            file.write(f" at {records.git_revision() or jax_tcgemm.__version__}.\n")
            writer.writerow(FIELDS)
        for name, (us, turns) in outcome.times.items():
            is_chosen = int(name == outcome.chosen)
            way = name.split("/", 1)
            writer.writerow((*outcome.draw.key, *way, f"{us:.5g}", turns, is_chosen))


def best(outcome: Outcome) -> str:
    """The fastest way, of those that had as many turns as the chosen one.

    The shortest of few turns is partly luck.
    """
    _, turns = outcome.times[outcome.chosen]
    return min((u, name) for name, (u, t) in outcome.times.items() if t >= turns)[1]


def ratio(outcome: Outcome, name: str | None = None) -> float:
    """The time of a way, the best by default, over that of the chosen one; NaN without either."""
    if outcome.chosen not in outcome.times:
        return math.nan
    us, _ = outcome.times.get(best(outcome) if name is None else name, (math.nan, 0))
    return us / outcome.times[outcome.chosen][0]


def summary(outcomes: Sequence[Outcome], worst: int = 15) -> tuple[Table, str]:
    """The problems that lose most by the choice, and a line that sums up all."""
    ran = sorted((o for o in outcomes if o.chosen in o.times), key=ratio)
    table = Table("problem", "chosen", "µs", "best", "µs", "best / chosen")
    for outcome in ran[:worst]:
        table.add_row(
            str(outcome.draw),
            outcome.chosen,
            f"{outcome.times[outcome.chosen][0]:.4g}",
            best(outcome),
            f"{outcome.times[best(outcome)][0]:.4g}",
            f"{ratio(outcome):.3f}",
        )
    failed = len(outcomes) - len(ran)
    if not ran:
        return table, f"regret: none of the {failed} choices ran"
    text = f"{len(ran)} problems"
    for what, name in (("best", None), ("XLA", XLA_NAME)):
        values = np.array([r for r in (ratio(o, name) for o in ran) if not math.isnan(r)])
        if len(values):
            geomean, low = np.exp(np.mean(np.log(values))), np.percentile(values, 5)
            text += f"; {what} / chosen: geomean {geomean:.4f}, 5th percentile {low:.3f}"
    return table, text + (f"; {failed} choices did not run" if failed else "")
