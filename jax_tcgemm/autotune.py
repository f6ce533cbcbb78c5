"""`autotune`: measures what runs each product of a program fastest, and remembers it.

Nothing is ever measured inside a traced function: problems are collected while a program is
traced, and timed outside it, on buffers of random numbers of their own.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import _modules, local, selection, tuning
from jax_tcgemm.explain import explain
from jax_tcgemm.problem import DTYPES, Operand, Problem

BUDGET_S = 5.0
CANDIDATES = 20

# The first round tells the slow from the fast, the second tells the fast apart.
_FIRST_REPEATS, _SECOND_REPEATS = 5, 15
_FINALISTS = 5
# What is faster by less than this is noise, and the choice stays as it is.
_NOISE = 0.01
# A call that takes longer is not repeated to warm up; one that takes so many times the fastest
# call's time is not measured further.
_SLOW_S = 0.1
_FAR_BEHIND = 4.0
_HOST_CACHE_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One way to run a problem, and its median time."""

    implementation: str
    config: str
    us: float

    @property
    def name(self) -> str:
        """`implementation/config`."""
        return f"{self.implementation}/{self.config}"


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
        budget_s: float = BUDGET_S,
        candidates: int = CANDIDATES,
        cache: bool = True,
        progress: bool = True,
    ):
        self.device = device
        self.path = None
        self._options = {"budget_s": budget_s, "candidates": candidates, "progress": progress}
        self._cache = cache
        self._tuned: tuple[Tuned, ...] = ()
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
    def table(self) -> tuning.Table:
        """The result as a table of measured choices."""
        entries = {}
        for tuned in self:
            best = tuned.best
            entries[tuning.problem_key(tuned.problem)] = tuning.make_entry(
                best.implementation, best.config, best.us, selection.abi_of(best.implementation)
            )
        return tuning.Table(self.device.key, entries, "jax_tcgemm.autotune")

    def save(self, path: str | os.PathLike) -> None:
        """Writes the result as JSON, for `jax_tcgemm.tuning.load`.

        Args:
          path: the file; one that is there is replaced, at once and as a whole.

        Raises:
          OSError: when it cannot be written.
        """
        tuning.write_table(path, self.table)

    def _tune(self, found: Iterable[tuple[Problem, selection.Device]]) -> None:
        problems = dict.fromkeys(problem for problem, device in found if device == self.device)
        self._tuned = tuple(tune_problems(list(problems), self.device, **self._options))
        if not self._tuned:
            return
        if self._cache:
            self.path = tuning.save_to_cache(self.table)
        tuning.adopt(self.table, "autotune in this process")
        selection.forget()
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
      budget_s: seconds for each problem, compiling included.
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
      ValueError: inside a traced function, where nothing can be measured; for arguments without a
        function; and for a budget or number of candidates that is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> tuning = jax_tcgemm.autotune(jax_tcgemm.matmul, x, x, cache=False, progress=False)
      >>> tuning[0].problem.m, tuning[0].best.us > 0
      (64, True)
    """
    for name, value in (("budget_s", budget_s), ("candidates", candidates)):
        if not value > 0:
            raise ValueError(f"autotune: {name} must be positive, got {name}={value}; leave it out")
    if f is None and (args or kwargs):
        raise ValueError(
            f"autotune: arguments must come with a function, got {len(args) + len(kwargs)}; "
            "pass the function first, or nothing for a context manager"
        )
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    result = Tuning(selection.target_device(platform), budget_s, candidates, cache, progress)
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


# --- measuring ----------------------------------------------------------------------------------


def tune_problems(
    problems: Sequence[Problem],
    device: selection.Device,
    *,
    budget_s: float = BUDGET_S,
    candidates: int = CANDIDATES,
    progress: bool = True,
) -> list[Tuned]:
    """Measures problems, one after the other; changes no choice.

    Args:
      problems: the problems. Left out: those without arithmetic and those that add to C.
      device: this machine's default device.
      budget_s: seconds for each.
      candidates: configs to measure for each, beside cuBLASLt and XLA.
      progress: show a progress bar on standard error.

    Returns:
      One `Tuned` for each problem of which anything could be measured.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    problems = [p for p in problems if p.flops > 0 and (p.alpha, p.beta) == (1.0, 0.0)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    found = []
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("", total=len(problems))
        for problem in problems:
            bar.update(task, description=f"tuning {problem}")
            before = selection.select("autotune", problem, device)
            names = contenders(problem, device, candidates)
            measured = measure(problem, names, budget_s)
            if measured:
                found.append(_decide(problem, before, measured))
            bar.advance(task)
    return found


def _decide(problem, before: selection.Choice, measured: list[Measurement]) -> Tuned:
    best = measured[0]
    name = f"{before.implementation}/{before.config}"
    old = next((m for m in measured if m.name == name), None)
    if old is not None and old.us <= best.us * (1 + _NOISE):
        best = old
    return Tuned(problem, best, old, tuple(measured))


def contenders(problem: Problem, device: selection.Device, candidates: int) -> list[tuple]:
    """(implementation, config) worth measuring, the present choice and XLA first."""
    now = selection.select("autotune", problem, device)
    names = [(now.implementation, now.config), (selection.XLA, "default")]
    ranked = selection.ranked(problem, device)
    if any(us is not None for _, us in ranked):
        names += [(c.implementation, c.config) for c, us in ranked if us is not None][:candidates]
        names += [(c.implementation, c.config) for c, _ in ranked if c.implementation == "cublaslt"]
    else:
        # In turns, so that each implementation gets its share.
        by_name: dict[str, list] = {}
        for candidate, _ in ranked:
            by_name.setdefault(candidate.implementation, []).append(candidate.config)
        depth = max(map(len, by_name.values()), default=0)
        turns = [
            (name, configs[i])
            for i in range(depth)
            for name, configs in by_name.items()
            if i < len(configs)
        ]
        names += turns[:candidates]
    if not _is_packed(problem):
        names = [name for name in names if name[0] != selection.XLA]
    return list(dict.fromkeys(names))


def measure(problem: Problem, names: Sequence[tuple], budget_s: float) -> list[Measurement]:
    """Times contenders in turns on the default device; those that fail are left out.

    Args:
      problem: the problem.
      names: (implementation, config) of each.
      budget_s: seconds in all, compiling included; what has not compiled in half of them is left
        out.

    Returns:
      Those that were measured to the end, the fastest first.
    """
    from jax_tcgemm.bench import timing

    start = time.perf_counter()
    on_gpu = jax.default_backend() == "gpu"
    cache_bytes = _modules.cuda_device()["l2_bytes"] if on_gpu else _HOST_CACHE_BYTES
    with jax.enable_x64(True):  # Operands say their own types.
        num_sets = timing.num_input_sets(problem.a_bytes + problem.b_bytes, cache_bytes)
        sets = _make_inputs(problem, num_sets)
        runnables = _compile(problem, names, start + budget_s / 2, sets[0])
        runnables, seconds = _warm_up(runnables, sets[-1], start + budget_s * 0.6)
        if not runnables:
            return []
        filled = (problem.a_bytes + problem.b_bytes) * num_sets
        flush_bytes = 2 * cache_bytes if filled < 2 * cache_bytes else 0
        left_s = start + budget_s - time.perf_counter()

        def timed(chosen, repeats, share_s):
            each_s = statistics.fmean(seconds[r.name] for r in chosen) * len(chosen)
            repeats = max(1, min(repeats, int(share_s / each_s)))
            counts = [repeats] * len(chosen)
            try:
                timer = "trace" if on_gpu else "wall"
                times = timing.measure(chosen, sets, counts, timer=timer, flush_bytes=flush_bytes)
            except RuntimeError:  # No trace, for instance because the user takes one.
                times = timing.measure(chosen, sets, counts, timer="chained")
            return {name: timing_.percentile(50) for name, timing_ in times.items()}

        first = timed(runnables, _FIRST_REPEATS, left_s / 2)
        order = sorted(runnables, key=lambda r: first[r.name])
        asked_first = "/".join(names[0])
        finalists = [r for i, r in enumerate(order) if i < _FINALISTS or r.name == asked_first]
        left_s = start + budget_s - time.perf_counter()
        times = timed(finalists, _SECOND_REPEATS, left_s)
    rest = {r.name: first[r.name] for r in order if r.name not in times}
    found = [Measurement(*name.split("/", 1), us) for name, us in times.items()]
    slower = [Measurement(*name.split("/", 1), us) for name, us in rest.items()]
    return sorted(found, key=lambda m: m.us) + slower


def _compile(problem, names, deadline, operands) -> list:
    """The contenders that compile before the deadline, in their order; the first in any case."""
    from jax_tcgemm.bench.timing import Runnable

    def compiled(index, name):
        with jax.enable_x64(True):  # Holds for one thread.
            function = _function(problem, *name)
            function.__name__ = function.__qualname__ = module = f"tcgemm_tune_{index}"
            jitted = jax.jit(function)
            jitted.lower(*operands).compile()
        return Runnable("/".join(name), f"jit_{module}", jitted)

    pool = concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    futures = [pool.submit(compiled, index, name) for index, name in enumerate(names)]
    found = []
    for index, future in enumerate(futures):
        timeout = None if index == 0 else max(deadline - time.perf_counter(), 0)
        # What does not compile in time, or not at all, is no contender.
        with contextlib.suppress(Exception):
            found.append(future.result(timeout))
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def _warm_up(runnables, operands, deadline) -> tuple[list, dict[str, float]]:
    """Those that run and are not far behind, and the seconds that a call of each takes."""
    seconds = {}
    for index, runnable in enumerate(runnables):
        if index > 0 and time.perf_counter() > deadline:
            break
        with contextlib.suppress(Exception):
            # The first call also loads what it needs, unless it takes so long that this is nothing.
            for _ in range(2):
                start = time.perf_counter()
                jax.block_until_ready(runnable.function(*operands))
                seconds[runnable.name] = time.perf_counter() - start
                if seconds[runnable.name] > _SLOW_S:
                    break
    limit = _FAR_BEHIND * min(seconds.values(), default=0.0)
    alive = [r for r in runnables if seconds.get(r.name, np.inf) <= limit]
    return alive, seconds


def _function(problem: Problem, implementation: str, config: str):
    """The problem as a function of its flat operands."""
    if implementation == selection.XLA:
        return functools.partial(_xla, problem)
    device = selection.target_device("cpu" if implementation == "host" else "cuda")
    choice = selection.select("autotune", problem, device, implementation, config)

    def function(a, b):
        return local.local_gemm(problem, a, b, choice=choice)

    return function


def _xla(problem: Problem, a, b):
    p = problem
    is_batched = p.batch > 1
    first = int(is_batched)

    def stored(x, operand, rows, columns):
        shape = (columns, rows) if operand.transposed else (rows, columns)
        return jnp.reshape(x, (p.batch, *shape) if is_batched else shape)

    contract = (first + (not p.a.transposed), first + p.b.transposed)
    batch = (0,) if is_batched else ()
    return lax.dot_general(
        stored(a, p.a, p.m, p.k),
        stored(b, p.b, p.k, p.n),
        (((contract[0],), (contract[1],)), (batch, batch)),
        precision="highest" if p.compute in ("f32", "f64") else "default",
        preferred_element_type=DTYPES[p.out_dtype],
    )


def _is_packed(problem: Problem) -> bool:
    """Whether XLA's dot can be given the operands as they are, and computes the same."""
    p = problem
    packed = dataclasses.replace(
        p,
        batch_inner=p.batch,
        a=_packed(p.a, p.m, p.k, p.batch),
        b=_packed(p.b, p.k, p.n, p.batch),
    )
    return packed == p and p.compute != "f16"


def _packed(operand: Operand, rows: int, columns: int, batch: int) -> Operand:
    ld = rows if operand.transposed else columns
    return Operand(operand.dtype, operand.transposed, ld, 0, rows * columns if batch > 1 else 0)


def _make_inputs(problem: Problem, num_sets: int) -> list[tuple[jax.Array, jax.Array]]:
    """Sets of flat operands: standard normal, integers over their whole range."""
    key = jax.random.key(0, impl="rbg")
    sizes = (
        _num_elements(problem, problem.a, problem.m, problem.k),
        _num_elements(problem, problem.b, problem.k, problem.n),
    )
    types = (problem.a.dtype, problem.b.dtype)
    keys = jax.random.split(key, (num_sets, 2))
    return jax.block_until_ready(
        [
            tuple(_random(k, n, dtype) for k, n, dtype in zip(pair, sizes, types, strict=True))
            for pair in keys
        ]
    )


def _num_elements(problem: Problem, operand: Operand, rows: int, columns: int) -> int:
    """Elements from the first that is addressed to the last."""
    if operand.transposed:
        rows, columns = columns, rows
    outer = problem.batch // max(problem.batch_inner, 1)
    inner = problem.batch_inner
    last = (outer - 1) * operand.outer_stride + (inner - 1) * operand.inner_stride
    return last + (rows - 1) * operand.ld + columns


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key, size, dtype_name):
    dtype = DTYPES[dtype_name]
    if np.issubdtype(dtype, np.integer):
        bounds = jnp.iinfo(dtype)
        return jax.random.randint(key, (size,), bounds.min, bounds.max + 1, jnp.int32).astype(dtype)
    return jax.random.normal(key, (size,), dtype)
