"""Time of a call: device time from a profiler trace, or else wall-clock time.

Contenders are run in turns, each in an order of its own, so that clocks, temperature and power are
the same for all, and every call takes the next set of inputs, so that none finds its data in cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.system import modules

TIMERS = ("trace", "chained", "wall")

# Sets of inputs that are rotated. Products too small to fill the cache with this many are
# separated by a read of more than the cache instead.
MAX_SETS = 16
# Turns at the start of a trace that are left out, for starting the profiler lets the GPU idle: as
# many as fill the time that was asked for, within these bounds.
_LEAST_UNCOUNTED, _MOST_UNCOUNTED = 3, 500
# Stands for the last-level cache of a machine without a GPU.
_HOST_CACHE_BYTES = 32 << 20


class TraceError(RuntimeError):
    """The profiler trace does not say how long the calls took."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of each call of one contender."""

    us: tuple[float, ...]
    timer: str
    kernels: int | None = None  # device activities of one call, where a trace tells

    def percentile(self, q: float) -> float:
        """The q-th percentile in microseconds."""
        return float(np.percentile(self.us, q))

    def ratio(self, other: Timing) -> float:
        """Median of the ratio (other's time / own time) over the turns in which both ran.

        At the power limit, the clock changes between turns, but hardly within a turn.
        """
        turns = zip(other.us, self.us, strict=False)
        return float(np.median([theirs / ours for theirs, ours in turns]))


@dataclasses.dataclass(frozen=True)
class Runnable:
    """A compiled function of a set of inputs, with the name its kernels carry in a trace."""

    name: str
    module: str
    function: Callable


def cache_bytes() -> int:
    """Bytes of the cache that inputs must exceed: the GPU's L2, or a constant for CPUs."""
    properties = modules.cuda_device() if jax.default_backend() == "gpu" else None
    return properties["l2_bytes"] if properties else _HOST_CACHE_BYTES


def num_input_sets(set_bytes: int, cache_bytes: int) -> int:
    """Number of input sets to rotate: four times the cache, from two to MAX_SETS."""
    wanted = -(-4 * cache_bytes // max(set_bytes, 1))
    return int(min(max(wanted, 2), MAX_SETS))


def measure(
    contenders: Sequence[Runnable],
    sets: Sequence[tuple],
    repeats: Sequence[int],
    *,
    timer: str,
    flush_bytes: int = 0,
    lead_s: float = 0.0,
) -> dict[str, Timing]:
    """Time each contender ``repeats`` times, interleaved.

    Args:
      contenders: compiled and warmed-up functions.
      sets: inputs to rotate through.
      repeats: calls of each contender.
      timer: ``"trace"`` (device time by CUPTI, through the JAX profiler), ``"chained"`` (wall
        clock of all sets in one program, divided) or ``"wall"`` (wall clock of a call).
      flush_bytes: when over 0, this many bytes are read on the device between the calls.
      lead_s: seconds of uncounted turns first, so that clock and power settle; with
        ``timer="trace"``.

    Returns:
      Timings by contender name.

    Raises:
      TraceError: with ``timer="trace"``, when the trace does not hold the calls' kernels.
    """
    if timer == "trace":
        return _measure_trace(contenders, sets, repeats, flush_bytes, lead_s)
    if timer == "chained":
        return _measure_chained(contenders, sets, repeats)
    assert timer == "wall"
    return _measure_wall(contenders, sets, repeats)


def measure_device_time(
    contenders: Sequence[Runnable],
    sets: Sequence[tuple],
    repeats: Sequence[int],
    *,
    lost: type[Exception] = TraceError,
    report: Callable[[Exception], None] = lambda failure: None,
    **options,
) -> dict[str, Timing]:
    """Time contenders by a trace, or with ``"chained"`` after two traces that lost activities.

    Args:
      contenders: as for `measure`.
      sets: as for `measure`.
      repeats: as for `measure`.
      lost: exception type of a trace that lost activities.
      report: called with the exception of the second trace.
      **options: other arguments of `measure`, for a trace.

    Returns:
      Timings by contender name.
    """
    for _ in range(2):
        try:
            return measure(contenders, sets, repeats, timer="trace", **options)
        except lost as failure:
            why = failure
    report(why)
    return measure(contenders, sets, repeats, timer="chained")


def _turns(contenders: Sequence[Runnable], repeats: Sequence[int]) -> Iterable[int]:
    """Yield contender indices in call order; contenders with fewer repeats stop earlier.

    Each turn has a random order, the same in every run: the time of a call depends on the power
    that the previous call drew, so no contender may always follow the same one.
    """
    orders = random.Random(0)
    for turn in range(max(repeats)):
        for index in orders.sample(range(len(contenders)), len(contenders)):
            if turn < repeats[index]:
                yield index


def _measure_wall(contenders, sets, repeats) -> dict[str, Timing]:
    us: list[list[float]] = [[] for _ in contenders]
    for call, i in enumerate(_turns(contenders, repeats)):
        operands = sets[call % len(sets)]
        start = time.perf_counter()
        jax.block_until_ready(contenders[i].function(*operands))
        us[i].append((time.perf_counter() - start) * 1e6)
    return {c.name: Timing(tuple(us[i]), "wall") for i, c in enumerate(contenders)}


def _measure_chained(contenders, sets, repeats) -> dict[str, Timing]:
    """Wall-clock time of a program that makes one call per set, divided by the number of sets."""
    chains = []
    for contender in contenders:
        chain = jax.jit(lambda sets, f=contender.function: [f(*operands) for operands in sets])
        jax.block_until_ready(chain(list(sets)))
        chains.append(Runnable(contender.name, "", chain))
    whole = _measure_wall(chains, [(list(sets),)], repeats)
    return {
        name: Timing(tuple(us / len(sets) for us in timing.us), "chained")
        for name, timing in whole.items()
    }


def _measure_trace(contenders, sets, repeats, flush_bytes, lead_s) -> dict[str, Timing]:
    uncounted = _LEAST_UNCOUNTED
    if lead_s > 0:
        start = time.perf_counter()
        _run_turns(contenders, sets, [1] * len(contenders), flush_bytes)
        turns = math.ceil(lead_s / (time.perf_counter() - start))
        uncounted = min(max(turns, _LEAST_UNCOUNTED), _MOST_UNCOUNTED)
    counts = [count + uncounted for count in repeats]
    with _tracing() as activities:
        _run_turns(contenders, sets, counts, flush_bytes)
    return _counted(contenders, _times_of(activities, _calls(contenders, counts)), uncounted)


class Group(NamedTuple):
    """Contenders that are measured in turns, with their own inputs; see `measure`."""

    contenders: Sequence[Runnable]
    make_sets: Callable[[], Sequence[tuple]]
    repeats: Sequence[int]
    flush_bytes: int = 0


def measure_groups(groups: Sequence[Group], *, timer: str) -> list[dict[str, Timing] | Exception]:
    """Time groups one after the other, in one trace, as a trace takes long to start and end.

    Args:
      groups: the groups. Module names of their contenders must be distinct.
      timer: ``"trace"`` or ``"wall"``.

    Returns:
      For each group its timings by contender name, or the exception that it raised.
    """
    found: list = [None] * len(groups)

    def run(group):
        sets = group.make_sets()
        if timer == "wall":
            return _measure_wall(group.contenders, sets, group.repeats)
        counts = [count + _LEAST_UNCOUNTED for count in group.repeats]
        _run_turns(group.contenders, sets, counts, group.flush_bytes)
        return _calls(group.contenders, counts)

    with _tracing() if timer == "trace" else contextlib.nullcontext() as activities:
        for index, group in enumerate(groups):
            try:
                found[index] = run(group)
            except Exception as failure:  # such as too little memory for one of them
                found[index] = failure
    if timer == "trace":
        for index, (group, calls) in enumerate(zip(groups, found, strict=True)):
            if isinstance(calls, Exception):
                continue
            try:
                times = _times_of(activities, calls)
                found[index] = _counted(group.contenders, times, _LEAST_UNCOUNTED)
            except TraceError as failure:
                found[index] = failure
    return found


def _run_turns(contenders, sets, counts, flush_bytes) -> None:
    flush = _flush(flush_bytes) if flush_bytes else None
    out = None
    for call, i in enumerate(_turns(contenders, counts)):
        if flush is not None:
            flush()
        out = contenders[i].function(*sets[call % len(sets)])
    jax.block_until_ready(out)


def _calls(contenders, counts) -> dict[str, int]:
    return {c.module: count for c, count in zip(contenders, counts, strict=True)}


def _counted(contenders, times: dict[str, Timing], uncounted: int) -> dict[str, Timing]:
    """Timings by contender name, without the uncounted first turns."""
    return {
        c.name: dataclasses.replace(times[c.module], us=times[c.module].us[uncounted:])
        for c in contenders
    }


@contextlib.contextmanager
def _tracing() -> Iterator[list]:
    """Trace a block and yield a list; after the block, it holds the `_activities` of all GPUs."""
    found: list = []
    with tempfile.TemporaryDirectory(prefix="tcgemm-trace-") as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 0
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            yield found
        finally:
            jax.profiler.stop_trace()
        traces = list(pathlib.Path(folder).glob("**/*.xplane.pb"))
        if not traces:
            raise TraceError("the profiler wrote no trace")
        found += _activities(jax.profiler.ProfileData.from_file(str(traces[0])))


def device_times(data, calls: dict[str, int]) -> dict[str, Timing]:
    """Device time of each call of each module in a profiler trace of one GPU.

    All kernels, copies and fills of a call count. Gaps between them do not, as a full stream has
    none. Overlapping time, as with PDL, counts once.

    Args:
      data: a ``jax.profiler.ProfileData``.
      calls: number of calls of each HLO module, by name (``jit_<function>``).

    Raises:
      TraceError: if a module's activities are missing or do not divide evenly among its calls.
    """
    return _times_of(_activities(data), calls)


def _times_of(activities: Sequence[tuple], calls: dict[str, int]) -> dict[str, Timing]:
    events: dict[str, list[tuple[float, float]]] = {module: [] for module in calls}
    for module, start_ns, duration_ns in activities:
        if module in events:
            events[module].append((start_ns, duration_ns))
    times = {}
    for module, count in calls.items():
        found = sorted(events[module])
        if not found or len(found) % count:
            raise TraceError(
                f"the trace has {len(found)} activities of {module} for {count} calls"
                f" ({len(activities)} on the GPU in all)"
            )
        each = len(found) // count
        us = tuple(_covered_ns(found[i : i + each]) / 1e3 for i in range(0, len(found), each))
        times[module] = Timing(us, "trace", each)
    return times


def _covered_ns(intervals: Sequence[tuple[float, float]]) -> float:
    """Time covered by (start, duration) intervals, which are sorted by start."""
    covered, end = 0.0, -math.inf
    for start, duration in intervals:
        covered += max(start + duration - max(start, end), 0.0)
        end = max(end, start + duration)
    return covered


def _activities(data) -> list[tuple[str | None, float, float]]:
    """HLO module, start and duration of each activity on the streams of GPUs."""
    found = []
    with warnings.catch_warnings():
        # JAX's own reader warns about its types, in C++ that aborts where warnings are errors.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                # Only streams hold the activities themselves; other lines summarise them again.
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    module = dict(event.stats).get("hlo_module")
                    found.append((module, event.start_ns, event.duration_ns))
    return found


@functools.cache
def _flush(num_bytes: int) -> Callable:
    """Return a function that reads `num_bytes` on the device, which leaves no dirty cache lines."""
    buffer = jax.block_until_ready(jnp.ones(num_bytes // 4, jnp.float32))

    def tcgemm_bench_flush(x):
        return jnp.max(x)

    reader = jax.jit(tcgemm_bench_flush)
    jax.block_until_ready(reader(buffer))
    return lambda: reader(buffer)
