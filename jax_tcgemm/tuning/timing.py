"""How long a call takes: device time from a profiler trace, wall-clock time where there is none.

Contenders are run in turns, each in an order of its own, so that clocks, temperature and power are
the same for all, and every call takes the next set of inputs, so that none finds its data in cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence

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
        """The other's time / ours in each turn that both ran in, of these ratios the median.

        The clock changes from turn to turn at the power limit, but hardly within one.
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
    """Bytes of the cache that inputs are rotated past: the GPU's L2, or what stands for a CPU's."""
    properties = modules.cuda_device() if jax.default_backend() == "gpu" else None
    return properties["l2_bytes"] if properties else _HOST_CACHE_BYTES


def num_input_sets(set_bytes: int, cache_bytes: int) -> int:
    """Sets of inputs to rotate: together over four caches, at least two, at most MAX_SETS."""
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
    """Times every contender ``repeats`` times, interleaved.

    Args:
      contenders: compiled and warmed-up functions.
      sets: inputs to rotate through.
      repeats: calls of each contender.
      timer: ``"trace"`` (device time by CUPTI, through the JAX profiler), ``"chained"`` (wall
        clock of all sets in one program, divided) or ``"wall"`` (wall clock of a call).
      flush_bytes: when over 0, this many bytes are read on the device between the calls.
      lead_s: seconds of turns before those that count, so that clock and power have settled; with
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
    """Times by a trace, or ``"chained"`` where two of them are lost.

    A trace can lose activities; a second that does, too, means that it cannot be relied on.

    Args:
      contenders: as of `measure`.
      sets: as of `measure`.
      repeats: as of `measure`.
      lost: what a lost trace raises.
      report: told what the second trace raised.
      **options: of `measure`, for a trace.

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
    """Contender indices in the order of the calls; those with fewer repeats stop earlier.

    Each turn has an order of its own, the same ones in every run: how long a call takes depends on
    the power that the one before it drew, which none may always come after.
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
    """Wall clock of one program that makes a call for each set, divided by their number."""
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
    flush = _flush(flush_bytes) if flush_bytes else None

    def run_turns(counts):
        out = None
        for call, i in enumerate(_turns(contenders, counts)):
            if flush is not None:
                flush()
            out = contenders[i].function(*sets[call % len(sets)])
        jax.block_until_ready(out)

    uncounted = _LEAST_UNCOUNTED
    if lead_s > 0:
        start = time.perf_counter()
        run_turns([1] * len(contenders))
        turns = math.ceil(lead_s / (time.perf_counter() - start))
        uncounted = min(max(turns, _LEAST_UNCOUNTED), _MOST_UNCOUNTED)
    counts = [count + uncounted for count in repeats]
    with tempfile.TemporaryDirectory(prefix="tcgemm-trace-") as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 0
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run_turns(counts)
        finally:
            jax.profiler.stop_trace()
        traces = list(pathlib.Path(folder).glob("**/*.xplane.pb"))
        if not traces:
            raise TraceError("the profiler wrote no trace")
        data = jax.profiler.ProfileData.from_file(str(traces[0]))
        calls = {c.module: count for c, count in zip(contenders, counts, strict=True)}
        times = device_times(data, calls)
    return {
        c.name: dataclasses.replace(times[c.module], us=times[c.module].us[uncounted:])
        for c in contenders
    }


def device_times(data, calls: dict[str, int]) -> dict[str, Timing]:
    """Device time of each call of each module in a profiler trace of one GPU.

    Every kernel, copy and fill that a call put on the GPU counts. Time between them does not: on
    a stream that is kept full there is none. Where two overlap, as a kernel does that may start
    before the one it depends on has ended, the time counts once.

    Args:
      data: a ``jax.profiler.ProfileData``.
      calls: HLO module names (``jit_<function>``), each with how often it was called.

    Raises:
      TraceError: when a module's activities are missing or do not divide among its calls.
    """
    events: dict[str, list[tuple[float, float]]] = {module: [] for module in calls}
    num_events = 0
    for module, start_ns, duration_ns in _activities(data):
        num_events += 1
        if module in events:
            events[module].append((start_ns, duration_ns))
    times = {}
    for module, count in calls.items():
        found = sorted(events[module])
        if not found or len(found) % count:
            raise TraceError(
                f"the trace has {len(found)} activities of {module} for {count} calls"
                f" ({num_events} on the GPU in all)"
            )
        each = len(found) // count
        us = tuple(_covered_ns(found[i : i + each]) / 1e3 for i in range(0, len(found), each))
        times[module] = Timing(us, "trace", each)
    return times


def _covered_ns(intervals: Sequence[tuple[float, float]]) -> float:
    """The time that (start, duration) intervals cover, given in the order of their starts."""
    covered, end = 0.0, -math.inf
    for start, duration in intervals:
        covered += max(start + duration - max(start, end), 0.0)
        end = max(end, start + duration)
    return covered


def _activities(data) -> list[tuple[str | None, float, float]]:
    """The HLO module, start and duration of everything that the streams of GPUs ran."""
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
    """A function that reads `num_bytes` on the device, which leaves no dirty line behind."""
    buffer = jax.block_until_ready(jnp.ones(num_bytes // 4, jnp.float32))

    def tcgemm_bench_flush(x):
        return jnp.max(x)

    reader = jax.jit(tcgemm_bench_flush)
    jax.block_until_ready(reader(buffer))
    return lambda: reader(buffer)
