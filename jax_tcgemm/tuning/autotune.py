"""`autotune`: measures what runs each product of a program fastest, and remembers it.

Nothing is ever measured inside a traced function: problems are collected while a program is
traced, and timed outside it, on buffers of random numbers of their own.
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
    """What was measured for one problem.

    Attributes:
      problem: the problem.
      best: what is used from now on.
      before: what was chosen before, as measured; None where that failed.
      measured: everything that was measured to the end, the fastest first.
    """

    problem: Problem
    best: Measurement
    before: Measurement | None
    measured: tuple[Measurement, ...]


class Tuning(Sequence):
    """The result of `autotune`: a sequence of `Tuned` that prints as a table.

    As a context manager it is empty until the end of the block.

    Attributes:
      device: what was measured on.
      path: the file in the user's cache folder that has the result; None when it was not written.
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
        """The result as a table of measured choices."""
        entries = {}
        for tuned in self:
            best = tuned.best
            entries[tables.problem_key(tuned.problem)] = tables.make_entry(
                best.implementation, best.config, best.us, selection.abi_of(best.implementation)
            )
        return tables.Table(self.device.key, entries, "jax_tcgemm.autotune")

    def save(self, path: str | os.PathLike) -> None:
        """Writes the result as JSON, for `jax_tcgemm.tuning.load`.

        Args:
          path: the file; one that is there is replaced, at once and as a whole.

        Raises:
          OSError: when it cannot be written.
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
    """Measures what runs each product of a function fastest, and uses that from now on.

    Every call of ours in the function that names no implementation is found, as `explain` finds it;
    each distinct problem is run by the `candidates` configs that the cost model ranks first, by
    cuBLASLt and by XLA where they can, in turns, on random numbers in buffers that are rotated past
    the cache. Products of one problem are chosen alike wherever they are. Do this before the
    program runs for good: with the same tables, the same program always makes the same choices.

    Without a function it is a context manager: the products that are lowered in the block are
    tuned at its end. JAX's caches are cleared at the start, so that all that runs is lowered::

        with jax_tcgemm.autotune() as tuning:
            step(state, batch)
        print(tuning)

    Where a choice changes, JAX's caches are cleared (`jax.clear_caches()`), so that programs which
    were compiled before are compiled again, with the new choices, when they are next called.

    Args:
      f: a function of JAX arrays, such as one made by `jax.grad` or `jax.jit`; None for a context.
      *args: its arguments; `jax.ShapeDtypeStruct`s do. The function itself does not run.
      budget_s: seconds for each problem, with the compilation of programs, but not of kernels that
        are not cached yet.
      candidates: configs to measure for each problem, beside cuBLASLt and XLA.
      cache: merge the result into the user's cache folder (TCGEMM_CACHE_DIR), which later
        processes read; where it cannot be written, the result holds for this process, with a
        warning.
      progress: show a progress bar on standard error.
      **kwargs: its keyword arguments.

    Returns:
      A `Tuning`: a sequence of `Tuned` that prints as a table, with `save(path)`;
      `jax_tcgemm.tuning.load(path)` reads it again.

    Raises:
      TypeError: for a function that is none.
      ValueError: inside a traced function, where nothing can be measured; for arguments without a
        function; and for a budget or number of candidates that is not positive.

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
    """Measures problems, one after the other; changes no choice.

    Args:
      problems: the problems. Left out: those without arithmetic.
      device: this machine's default device.
      budget_s: seconds for each.
      candidates: configs to measure for each, beside cuBLASLt and XLA.
      xla: whether XLA takes part. It searches for an algorithm of its own while compiling, which
        takes longer than all the rest.
      progress: show a progress bar on standard error.

    Yields:
      One `Tuned` for each problem of which anything could be measured, as soon as it has been.
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
    """What is used from now on, by what was measured of `before` and others, the fastest first."""
    best = measured[0]
    name = f"{before.implementation}/{before.config}"
    old = next((m for m in measured if m.name == name), None)
    if old is not None and old.us <= best.us * (1 + _NOISE):
        best = old
    return Tuned(problem, best, old, tuple(measured))
