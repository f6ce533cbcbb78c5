"""Public `autotune`: measures and stores the fastest implementation of each product of a program.

Nothing is measured inside a traced function. Problems are collected while a program is traced, and
measured outside, on separate buffers of random numbers.
"""

import contextlib
import dataclasses
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp

from jax_tcgemm import selection
from jax_tcgemm.inspect.explain import explain
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Problem
from jax_tcgemm.selection import tables
from jax_tcgemm.tuning.measuring import Measurement, check_positive, contenders, measure, start_up

BUDGET_S = 5.0
CANDIDATES = 20

# What is faster by less than this is noise, and the choice stays as it is.
_NOISE = 0.01


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Measurements of one problem.

    Attributes:
      problem: the problem.
      best: the selection from now on.
      before: the previous selection, as measured, or None if it failed.
      measured: all completed measurements, fastest first.
    """

    problem: Problem
    best: Measurement
    before: Measurement | None
    measured: tuple[Measurement, ...]


class Tuning(Sequence):
    """Result of `autotune`: a sequence of `Tuned` that prints as a table.

    As a context manager, the sequence is empty until the end of the block.

    Attributes:
      device: the measured device.
      path: file in the user's cache folder that stores the result, or None if it was not written.
    """

    def __init__(
        self,
        device: selection.Device,
        tuned: Iterable[Tuned] = (),
        *,
        cache: bool = True,
        **options,
    ):
        self.device = device
        self.path = None
        self._tuned = tuple(tuned)
        self._cache = cache
        self._options = options  # of tune_problems, at the end of the block
        self._collecting = contextlib.ExitStack()

    def __getitem__(self, index):
        return self._tuned[index]

    def __len__(self) -> int:
        return len(self._tuned)

    def __enter__(self) -> "Tuning":
        _check_not_traced()
        # What was compiled before would not be traced again, and so not be seen.
        jax.clear_caches()
        self._found = self._collecting.enter_context(selection.collect())
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._collecting.close()
        if kind is None:
            self._tune(self._found)

    @property
    def table(self) -> tables.Table:
        """Return the result as a table of measured selections."""
        entries = {}
        for tuned in self:
            best = tuned.best
            entries[tables.problem_key(tuned.problem)] = tables.make_entry(
                best.implementation, best.config, best.us, selection.abi_of(best.implementation)
            )
        return tables.Table(self.device.key, entries, "jax_tcgemm.autotune")

    def save(self, path: str | os.PathLike) -> None:
        """Write the result as JSON, for `jax_tcgemm.tuning.load`.

        Args:
          path: the file. An existing file is replaced atomically.

        Raises:
          OSError: if the file cannot be written.
        """
        tables.write_table(path, self.table)

    def _tune(self, found: Iterable[tuple[Problem, selection.Device]]) -> None:
        problems = dict.fromkeys(problem for problem, device in found if device == self.device)
        self._tuned = ()
        try:
            for tuned in tune_problems(list(problems), self.device, **self._options):
                self._tuned += (tuned,)
        finally:
            # Also of what was measured until an interruption.
            if self._tuned:
                self._use()

    def _use(self) -> None:
        if self._cache:
            self.path = tables.save_to_cache(self.table)
        tables.adopt(self.table, "autotune in this process")
        if any(tuned.before is None or tuned.before.name != tuned.best.name for tuned in self):
            jax.clear_caches()

    def __rich__(self):
        from rich import box
        from rich.table import Table

        if not self:
            return "No product of jax_tcgemm was tuned."
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for heading in ("problem", "before", "now"):
            table.add_column(heading, overflow="fold")
        for heading in ("us before", "us now", "measured"):
            table.add_column(heading, justify="right")
        for tuned in self:
            before = tuned.before
            table.add_row(
                str(tuned.problem),
                before.name if before else "-",
                tuned.best.name if not before or before.name != tuned.best.name else "the same",
                f"{before.us:.4g}" if before else "-",
                f"{tuned.best.us:.4g}",
                str(len(tuned.measured)),
            )
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        width = max(100, shutil.get_terminal_size((140, 24)).columns)
        Console(file=out, width=width).print(self)
        return out.getvalue().rstrip()


def autotune(
    f=None,
    /,
    *args,
    budget_s: float = BUDGET_S,
    candidates: int = CANDIDATES,
    cache: bool = True,
    progress: bool = True,
    **kwargs,
) -> Tuning:
    """Measure implementations of each product of a function and select the fastest from now on.

    `autotune` finds every call of this library in the function that does not name an
    implementation, like `explain`. For each distinct problem, `autotune` measures the `candidates`
    configs with the shortest estimated times, cuBLASLt and XLA where they can run the problem. The
    contenders run in turns, on random numbers in buffers that are rotated past the cache. All
    products of one problem use the same selection. Run `autotune` before production runs: with the
    same tables, a program always makes the same selections.

    Without a function, `autotune` is a context manager, and the products lowered in the block are
    tuned at its end. JAX's caches are cleared at the start, so that all functions called in the
    block are lowered::

        with jax_tcgemm.autotune() as tuning:
            step(state, batch)
        print(tuning)

    If a selection changes, `autotune` clears JAX's caches (`jax.clear_caches()`), so that programs
    compiled earlier are compiled with the new selections at their next call.

    Args:
      f: a function of JAX arrays, such as a result of `jax.grad` or `jax.jit`. None gives a context
        manager.
      *args: arguments of f, or `jax.ShapeDtypeStruct`s. f itself does not run.
      budget_s: seconds per problem, including the compilation of programs, but not of kernels that
        are not cached yet.
      candidates: number of configs to measure for each problem, besides cuBLASLt and XLA.
      cache: whether to merge the result into the user's cache folder (TCGEMM_CACHE_DIR), which
        later processes read. If the folder cannot be written, the result holds for this process,
        with a warning.
      progress: whether to show a progress bar on standard error.
      **kwargs: keyword arguments of f.

    Returns:
      A `Tuning`, a sequence of `Tuned` that prints as a table. `save(path)` writes the result, and
      `jax_tcgemm.tuning.load(path)` reads it.

    Raises:
      TypeError: if f is not a function.
      ValueError: if called inside a traced function, where nothing can be measured, if arguments
        are given without a function, or if the budget or the number of candidates is not positive.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> tuning = jax_tcgemm.autotune(jax_tcgemm.matmul, x, x, cache=False, progress=False)
      >>> tuning[0].problem.m, tuning[0].best.us > 0
      (64, True)
    """
    for name, value in (("budget_s", budget_s), ("candidates", candidates)):
        check_positive("autotune", name, value)
    if not isinstance(candidates, int):
        raise TypeError(f"autotune: candidates must be an integer, got {candidates=}; leave it out")
    if f is not None and not callable(f):
        raise TypeError(
            f"autotune: f must be a function or None, got f of type {type(f).__name__}; "
            "pass its arguments after it"
        )
    if f is None and (args or kwargs):
        raise ValueError(
            f"autotune: arguments must come with a function, got {len(args) + len(kwargs)}; "
            "pass the function first, or nothing for a context manager"
        )
    result = Tuning(
        selection.default_device(),
        cache=cache,
        budget_s=budget_s,
        candidates=candidates,
        progress=progress,
    )
    if f is None:
        return result
    _check_not_traced()
    with selection.collect() as found:
        explain(f, *args, **kwargs)
    result._tune(found)
    return result


def _check_not_traced() -> None:
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise ValueError(
            "autotune: it must be called outside traced functions, got a call inside one; "
            "call it before jit, with the function and its arguments"
        )


def tune_problems(
    problems: Sequence[Problem],
    device: selection.Device,
    *,
    budget_s: float = BUDGET_S,
    candidates: int = CANDIDATES,
    xla: bool = True,
    progress: bool = True,
) -> Iterator[Tuned]:
    """Measure problems one after the other, without changing a selection.

    Args:
      problems: the problems. Problems without arithmetic are skipped.
      device: this machine's default device.
      budget_s: seconds per problem.
      candidates: configs to measure per problem, besides cuBLASLt and XLA.
      xla: whether to measure XLA. XLA's own autotuning at compilation takes longer than all other
        measurements.
      progress: whether to show a progress bar on standard error.

    Yields:
      One `Tuned` for each problem with a measurement, as soon as it is measured.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    problems = [p for p in problems if p.flops > 0]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("starting", total=len(problems))
        if problems:
            start_up(device)
        for problem in problems:
            bar.update(task, description=f"tuning {problem}")
            before = selection.select(CallOptions("autotune"), problem, device)
            names = contenders(problem, device, candidates, xla)
            measured = measure(problem, names, budget_s)
            if measured:
                yield decide(problem, before, measured)
            bar.advance(task)


def decide(
    problem: Problem, before: selection.Choice | Measurement, measured: list[Measurement]
) -> Tuned:
    """Select the fastest measurement, or `before` if it is about as fast.

    `measured` is sorted by time.
    """
    best = measured[0]
    name = f"{before.implementation}/{before.config}"
    old = next((m for m in measured if m.name == name), None)
    if old is not None and old.us <= best.us * (1 + _NOISE):
        best = old
    return Tuned(problem, best, old, tuple(measured))
