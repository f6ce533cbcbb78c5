"""Runs suites: plan each case, check every result, time all contenders in turns, record."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jax_tcgemm.bench import records as rec
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.contenders import Contender, plan
from jax_tcgemm.bench.suites import Case, Suite
from jax_tcgemm.bench.workload import Workload
from jax_tcgemm.system import modules
from jax_tcgemm.tuning import timing

# Fewer calls than this say nothing about spread; a slow contender gets no less.
MIN_REPEATS = 5
# An idle GPU takes a while to raise its clock.
_SPIN_UP_S = 0.1
# The power limit sets in later, and lowers the clock of long products: calls count from then on.
_LEAD_S = 1.0
# Cases whose programs are compiled together.
_COMPILED_AHEAD = 16
# Of a progress bar.
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of ``bench``.

    Attributes:
      implementations: names, or ``auto``.
      peers: names from ``contenders.PEERS``.
      configs: ``--config`` as given, or None.
      repeats: calls of each contender on each case.
      budget_s: seconds one contender may spend on one case, unless that asks for more; slower ones
        get fewer repeats, and one whose single call takes longer is left out.
      jobs: programs compiled at once; 0 takes a number that suits the machine.
      timer: ``auto``, or a timer of :func:`timing.measure`.
      revision: recorded as the source revision; None reads it from git.
    """

    implementations: Sequence[str]
    peers: Sequence[str]
    configs: str | None = None
    repeats: int = 20
    budget_s: float = 2.0
    jobs: int = 0
    timer: str = "auto"
    revision: str | None = None


class Harness:
    """Runs cases one after the other; every record is kept and, if asked, written at once."""

    def __init__(self, options: Options, console: Console, out: pathlib.Path | None = None):
        self.options = options
        self.records: list[dict] = []
        self.wrong: list[str] = []
        self._console = console
        self._out = out
        on_gpu = jax.default_backend() == "gpu"
        self._on_gpu = on_gpu
        default_timer = "trace" if on_gpu else "wall"
        self._timer = default_timer if options.timer == "auto" else options.timer
        self._machine = rec.machine()
        self._machine["revision"] = options.revision or rec.git_revision()
        properties = modules.cuda_device() if on_gpu else None
        self._machine["driver_cuda"] = properties["driver_version"] if properties else None
        self._cache_bytes = timing.cache_bytes()
        self._probe = concurrent.futures.ThreadPoolExecutor(1)

    def run(self, suites: Sequence[Suite]) -> None:
        """Measures every case of every suite, with a progress bar."""
        cases = [case for suite in suites for case in suite.cases]
        jobs = self.options.jobs or min(8, os.cpu_count() or 1)
        # 64-bit types are off in JAX by default; operands here always say their own.
        with (
            jax.enable_x64(True),
            Progress(*COLUMNS, console=self._console) as progress,
            concurrent.futures.ThreadPoolExecutor(jobs) as pool,
        ):
            task = progress.add_task("", total=len(cases))
            for first in range(0, len(cases), _COMPILED_AHEAD):
                chunk = cases[first : first + _COMPILED_AHEAD]
                progress.update(task, description=f"compiling {len(chunk)} cases")
                # All of it before anything is timed: compiling also runs candidates on the GPU.
                planned = list(pool.map(self._prepare, chunk))
                for case, (contenders, refused, memory) in zip(chunk, planned, strict=True):
                    progress.update(task, description=case.title)
                    try:
                        new = self._run_case(case, contenders, refused, memory)
                    except Exception as failure:
                        # Such as too little memory for one case; the others are still measured.
                        self._fail(case, "the case", failure)
                        new = []
                    self.records += new
                    if self._out is not None:
                        rec.append_records(self._out, new)
                    progress.advance(task)
                    if not self._console.is_terminal:
                        done = f"[{int(progress.tasks[0].completed)}/{len(cases)}]"
                        for record in new:
                            self._say(case, f"{done} {_summary(record)}")

    def _prepare(
        self, case: Case | Workload
    ) -> tuple[list[Contender], dict[str, str], dict[str, dict[str, int]]]:
        """Plans a case and compiles all it needs, so that calling it finds it in JAX's caches.

        Returns:
          The contenders, why others cannot run it, and the bytes that each contender needs.
        """
        options, memory = self.options, {}
        with jax.enable_x64(True):  # Holds for one thread.
            contenders, refused = plan(
                case, options.implementations, options.peers, options.configs
            )
            # What does not compile fails again, and is reported, when it is called.
            for contender in contenders:
                with contextlib.suppress(Exception):
                    compiled = contender.function.lower(*case.operands).compile()
                    memory[contender.name] = _memory(compiled.memory_analysis())
            with contextlib.suppress(Exception):
                reference.prepare(
                    case,
                    [
                        jax.eval_shape(c.function, *case.operands)
                        for c in contenders
                        if not c.is_part
                    ],
                )
        return contenders, refused, memory

    def _say(self, case: Case | Workload, text: str) -> None:
        self._console.print(f"{case.title}: {text}", highlight=False, soft_wrap=True)

    def _fail(self, case: Case | Workload, what: str, failure: Exception) -> None:
        text = (str(failure).splitlines() or [type(failure).__name__])[0]
        self._say(case, f"[red]{what} failed[/]: {escape(text)}")
        self.wrong.append(f"{what} failed on {case.shape}: {text}")

    def _run_case(self, case: Case | Workload, contenders, refused, memory) -> list[dict]:
        for name, why in refused.items():
            self._say(case, f"[yellow]{name} left out[/]: {escape(why)}")
        if not contenders:
            return []
        sets = reference.make_inputs(
            case, timing.num_input_sets(case.input_bytes, self._cache_bytes)
        )
        contenders, error = self._check(case, contenders, sets)
        contenders, repeats = self._warm_up(case, contenders, sets)
        if not contenders:
            return []
        total_bytes = case.input_bytes * len(sets)
        flush_bytes = 2 * self._cache_bytes if total_bytes < 2 * self._cache_bytes else 0
        states = {"before": self._state_under_load(contenders, sets, _SPIN_UP_S)}
        timings = self._time(case, contenders, sets, repeats, flush_bytes)
        states["after"] = self._state_under_load(contenders, sets)
        clocks = {
            f"{key}_{when}": state[key]
            for when, state in states.items()
            for key in ("sm_mhz", "power_w", "temperature_c")
            if key in state
        }
        return self._records(case, contenders, timings, error, memory, clocks)

    def _check(self, case, contenders, sets) -> tuple[list[Contender], dict[str, float]]:
        """Runs each contender once; those that are wrong or fail are reported and dropped."""
        results, alive = [], []
        for contender in contenders:
            try:
                results.append(jax.block_until_ready(contender.function(*sets[0])))
                alive.append(contender)
            except Exception as failure:
                self._fail(case, contender.name, failure)
        limit = reference.tolerance(case)
        compared = [x for c, x in zip(alive, results, strict=True) if not c.is_part]
        found = reference.errors(case, sets[0], compared) if compared else []
        error = dict(zip((c.name for c in alive if not c.is_part), found, strict=True))
        for name, value in error.items():
            if not value <= limit:  # Also true of NaN.
                self._say(case, f"[red]{name} is wrong[/]: error {value:.3g} over {limit:.3g}")
                self.wrong.append(f"{name} on {case.shape}: error {value:.3g} over {limit:.3g}")
        return [c for c in alive if c.is_part or error[c.name] <= limit], error

    def _warm_up(self, case, contenders, sets) -> tuple[list[Contender], list[int]]:
        """Fits the repeats to the budget of each contender."""
        kept, repeats = [], []
        budget_s = max(self.options.budget_s, case.budget_s)
        for contender in contenders:
            start = time.perf_counter()
            jax.block_until_ready(contender.function(*sets[-1]))
            seconds = time.perf_counter() - start
            if seconds > budget_s:
                self._say(
                    case, f"[yellow]{contender.name} left out[/]: a call takes {seconds:.1f} s"
                )
                continue
            affordable = int(budget_s / seconds)
            kept.append(contender)
            repeats.append(min(self.options.repeats, max(affordable, MIN_REPEATS)))
        return kept, repeats

    def _state_under_load(self, contenders, sets, least_s: float = 0.0) -> dict:
        """Clocks and power while the contenders run; {} without a GPU."""
        if not self._on_gpu:
            return {}
        start = time.perf_counter()
        state = self._probe.submit(rec.gpu_state)
        while not state.done() or time.perf_counter() - start < least_s:
            for contender in contenders:
                jax.block_until_ready(contender.function(*sets[0]))
        return state.result()

    def _time(self, case, contenders, sets, repeats, flush_bytes) -> dict[str, timing.Timing]:
        runnables = [timing.Runnable(c.name, c.module, c.function) for c in contenders]
        if self._timer != "trace":
            return timing.measure(runnables, sets, repeats, timer=self._timer)

        def report(failure):
            self._say(
                case, f"[yellow]no device time[/]: {escape(str(failure))}; using wall-clock time"
            )

        return timing.measure_device_time(
            runnables, sets, repeats, flush_bytes=flush_bytes, lead_s=_LEAD_S, report=report
        )

    def _records(self, case, contenders, timings, error, memory, clocks) -> list[dict]:
        def summary(name):
            return {f"p{q}": round(timings[name].percentile(q), 3) for q in (10, 50, 90)}

        def used(name):
            return memory.get(name, {"peak_bytes": None, "temp_bytes": None})

        new = []
        measured = {c.name for c in contenders}
        parts = [c.name for c in contenders if c.is_part]
        all_peers = case.peers if isinstance(case, Workload) else self.options.peers
        for contender in contenders:
            # Peers that were not asked for as implementations appear in others' records only.
            if not contender.recorded:
                continue
            peers = [p for p in all_peers if p in measured and p != contender.name]
            us = summary(contender.name)

            def beside(name, own=contender.name):
                return {
                    "us": summary(name),
                    "ratio": round(timings[own].ratio(timings[name]), 4),
                    **used(name),
                }

            record = {
                "schema": rec.SCHEMA,
                "kind": case.kind,
                "time": rec.now(),
                "revision": self._machine["revision"],
                **case.fields,
                "implementation": contender.asked,
                "forced_config": contender.forced_config,
                "ran": contender.ran,
                "config": contender.config,
                "why": contender.why,
                "us": us,
                "tflops": float(f"{case.flops / us['p50'] / 1e6:.6g}"),
                "gbps": float(f"{case.bytes / us['p50'] / 1e3:.6g}"),
                "error": error[contender.name],
                **used(contender.name),
                "peers": {p: beside(p) | {"error": error[p]} for p in peers},
                "ratio": None,
                "timer": timings[contender.name].timer,
                "samples": len(timings[contender.name].us),
                "kernels": timings[contender.name].kernels,
                "machine": {k: v for k, v in self._machine.items() if k != "revision"} | clocks,
            }
            if parts:
                record["parts"] = {p: beside(p) for p in parts}
            if peers:
                record["ratio"] = min(peer["ratio"] for peer in record["peers"].values())
            new.append(record)
        return new


def _summary(record: dict) -> str:
    rate = f"{record['us']['p50']:.1f} µs, {record['tflops']:.4g} TFLOP/s"
    ratio = "" if record["ratio"] is None else f", ratio {record['ratio']:.3f}"
    return f"{rec.contender_name(record)} ({record['ran']}/{record['config']}): {rate}{ratio}"


def _memory(memory) -> dict[str, int]:
    """Device memory of one call by XLA's own account: with operands and results, and without."""
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary = memory.temp_size_in_bytes
    return {"peak_bytes": used + temporary, "temp_bytes": temporary}
