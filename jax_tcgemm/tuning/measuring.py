"""Measurement of the contenders of one problem, in turns, on buffers of random numbers."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import numbers
import os
import statistics
import time
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm import selection
from jax_tcgemm.device.call import call
from jax_tcgemm.device.fusion.results import result_arrays
from jax_tcgemm.kernels import CompileError, Instance, compile_kernels
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPES, wide_dtype
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.system.routing import routing
from jax_tcgemm.tuning import timing

# Configs that come before cuBLASLt's when there is not the time for all.
_FAVOURITES = 6
# The first round tells the slow from the fast, the second tells the fast apart.
_FIRST_REPEATS, _SECOND_REPEATS = 5, 15
_FINALISTS = 5
# A call that takes longer is not repeated to warm up; one that takes so many times the fastest
# call's time is not measured further.
_SLOW_S = 0.1
_FAR_BEHIND = 4.0


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


def check_positive(op: str, name: str, value) -> None:
    """Raise ValueError unless the value is a positive, finite number."""
    if not isinstance(value, numbers.Real) or not 0 < value < math.inf:
        raise ValueError(
            f"{op}: {name} must be a positive, finite number, got {name}={value!r}; leave it out"
        )


def check_fits(op: str, problem: Problem) -> None:
    """Raise ValueError for a problem that is too large for the memory of the default device."""
    stats = jax.devices()[0].memory_stats() or {}
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory_bytes = stats.get("bytes_limit", host_bytes)
    # Inputs are rotated, of which there are two sets at least.
    needed = problem.bytes + problem.a_bytes + problem.b_bytes
    if needed > memory_bytes:
        raise ValueError(
            f"{op}: a problem must fit in the memory of {memory_bytes / 1e9:.4g} GB, got {problem} "
            f"of {needed / 1e9:.4g} GB; measure a smaller one"
        )


def contenders(
    problem: Problem, device: selection.Device, candidates: int, xla: bool = True
) -> list[tuple[str, str]]:
    """(implementation, config) worth measuring, the present choice and XLA first.

    Args:
      problem: the problem.
      device: where it runs.
      candidates: configs beside the present choice, cuBLASLt's and XLA.
      xla: whether XLA takes part where it need not.
    """
    now = selection.select(CallOptions("autotune"), problem, device)
    names = [(now.implementation, now.config), (selection.XLA, "default")]
    ranked = selection.ranked(problem, device)
    if any(us is not None for _, us in ranked):
        ours = [(c.implementation, c.config) for c, _ in ranked if c.implementation == "wgmma"]
        ours = ours[:candidates]
        theirs = [(c.implementation, c.config) for c, _ in ranked if c.implementation == "cublaslt"]
        names += ours[:_FAVOURITES] + theirs + ours[_FAVOURITES:]
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
    if not _xla_computes(problem) or not (xla or now.implementation == selection.XLA):
        names = [name for name in names if name[0] != selection.XLA]
    return list(dict.fromkeys(names))


@functools.cache
def start_up(device: selection.Device) -> None:
    """Load compilers and libraries, so that the first measurement does not include the load."""
    operand = Operand("bf16", False, 16, 0, 0)
    tiny = Problem(1, 1, 16, 16, 16, operand, operand, "bf16", "f32")
    measure(tiny, contenders(tiny, device, candidates=1), budget_s=10.0)


def measure(
    problem: Problem, names: Sequence[tuple], budget_s: float, *, quiet: bool = False
) -> list[Measurement]:
    """Time contenders in turns on the default device; contenders that fail are skipped.

    Args:
      problem: the problem.
      names: (implementation, config) of each contender.
      budget_s: seconds in total, including the programs' compilation; programs that do not compile
        in half of the budget are skipped. Kernels that are not cached are compiled before, in
        parallel, and do not count.
      quiet: whether to omit the warning that most programs did not compile in time.

    Returns:
      The measurements, the fastest first.
    """
    compile_kernels_of(problem, names)
    start = time.perf_counter()
    on_gpu = jax.default_backend() == "gpu"
    cache_bytes = timing.cache_bytes()
    # 64-bit operands keep their dtypes, and inside `patch`, XLA's own dot is still measured.
    with jax.enable_x64(True), routing(None):
        num_sets = timing.num_input_sets(problem.a_bytes + problem.b_bytes, cache_bytes)
        sets = _make_inputs(problem, num_sets)
        runnables = _compile(problem, names, start + budget_s / 2, sets[0])
        if 2 * len(runnables) < len(names) and not quiet:
            warnings.warn(
                f"jax_tcgemm: {len(runnables)} of {len(names)} ways to run {problem} compiled in "
                f"{budget_s / 2:g} s, half of the budget; give it more, or the machine less to do",
                stacklevel=2,
            )
        runnables, seconds = _warm_up(runnables, sets[-1], start + budget_s * 0.6)
        if not runnables:
            return []
        filled = (problem.a_bytes + problem.b_bytes) * num_sets
        flush_bytes = 2 * cache_bytes if filled < 2 * cache_bytes else 0
        left_s = start + budget_s - time.perf_counter()

        def timed(chosen, repeats, share_s):
            each_s = statistics.fmean(seconds[r.name] for r in chosen) * len(chosen)
            repeats = max(1, min(repeats, int(share_s / each_s)))
            times = _times(chosen, sets, [repeats] * len(chosen), flush_bytes, on_gpu)
            return {name: found.percentile(50) for name, found in times.items()}

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


def compile_kernels_of(problem: Problem, names: Sequence[tuple]) -> None:
    """Compile the kernels of the contenders. A kernel that fails here fails its contender later."""
    kernels = []
    for name in names:
        with contextlib.suppress(ValueError):
            kernels += kernels_of(problem, *name)
    with contextlib.suppress(CompileError):
        compile_kernels(kernels)


def kernels_of(problem: Problem, implementation: str, config: str) -> tuple[Instance, ...]:
    """Return the embedded cubins that a contender's program needs.

    Raises:
      ValueError: if the contender cannot run the problem.
    """
    if implementation == selection.XLA:
        return ()
    with selection.unseen():
        return _choice(problem, implementation, config).kernels


def _times(runnables, sets, repeats, flush_bytes, on_gpu) -> dict:
    """Timings by name: device time from a trace if there is one, else wall-clock time."""
    if not on_gpu:
        return timing.measure(runnables, sets, repeats, timer="wall")
    # No trace can start while the user takes one. Other failures repeat with wall-clock time.
    return timing.measure_device_time(
        runnables, sets, repeats, flush_bytes=flush_bytes, lost=RuntimeError
    )


def _compile(problem, names, deadline, operands) -> list:
    """Compile contenders and return, in order, the first and all that finish by the deadline."""

    def compiled(index, name):
        with jax.enable_x64(True):  # Holds for one thread.
            function = _function(problem, *name)
            function.__name__ = function.__qualname__ = module = f"tcgemm_tune_{index}"
            jitted = jax.jit(function)
            jitted.lower(*operands).compile()
        return timing.Runnable("/".join(name), f"jit_{module}", jitted)

    pool = concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    futures = [pool.submit(compiled, index, name) for index, name in enumerate(names)]
    found = []
    for index, future in enumerate(futures):
        timeout = None if index == 0 else max(deadline - time.perf_counter(), 0)
        # What does not compile in time, or not at all, is no contender.
        with contextlib.suppress(Exception):
            found.append(future.result(timeout))
    # Compilations still running may run candidates on the GPU, which must not disturb the timing.
    pool.shutdown(wait=True, cancel_futures=True)
    return found


def _warm_up(runnables, operands, deadline) -> tuple[list, dict[str, float]]:
    """Run the contenders once; return those not far behind the fastest, and seconds per call.

    The first contender is the baseline and is always returned if it runs.
    """
    seconds = {}
    for index, runnable in enumerate(runnables):
        if index > 0 and time.perf_counter() > deadline:
            break
        with contextlib.suppress(Exception):
            # The first call includes loading kernels, which does not matter for slow calls. The
            # host may delay either of the others.
            times = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(runnable.function(*operands))
                times.append(time.perf_counter() - start)
                if times[-1] > _SLOW_S:
                    break
            seconds[runnable.name] = min(times[1:] or times)
    limit = _FAR_BEHIND * min(seconds.values(), default=0.0)
    ran = [(i, r) for i, r in enumerate(runnables) if r.name in seconds]
    return [r for i, r in ran if i == 0 or seconds[r.name] <= limit], seconds


def _function(problem: Problem, implementation: str, config: str):
    """Return the problem as a function of its operands, in the order of `_operand_shapes`."""
    if implementation == selection.XLA:
        return functools.partial(_xla, problem)
    choice = _choice(problem, implementation, config)
    return lambda *operands: call(problem, choice, operands, result_arrays(problem))


def _choice(problem: Problem, implementation: str, config: str) -> selection.Choice:
    device = selection.target_device("cpu" if implementation == "host" else "cuda")
    options = CallOptions("autotune", implementation, config)
    return selection.select(options, problem, device)


def _xla_computes(problem: Problem) -> bool:
    """Whether XLA's own dot runs on the operands as stored and computes the same function."""
    return problem.is_packed and problem.function is None and problem.compute != "f16"


def _xla(problem: Problem, a, b, c=None):
    """Run the problem with XLA's own dot."""
    p = problem
    out_dtype = DTYPES[p.out_dtype]
    if p.is_bare:
        return _xla_product(p, a, b, out_dtype)
    out = p.alpha * _xla_product(p, a, b, wide_dtype(out_dtype))
    if c is not None:
        out = out + p.beta * jnp.reshape(c, out.shape).astype(out.dtype)
    return out.astype(out_dtype)


def _xla_product(problem: Problem, a, b, dtype):
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
        stored(b, p.b, p.k, p.b_columns),
        (((contract[0],), (contract[1],)), (batch, batch)),
        precision="highest" if p.compute in ("f32", "f64") else "default",
        preferred_element_type=dtype,
    )


def _operand_shapes(problem: Problem) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of each operand of a call; A and B are one-dimensional."""
    p = problem
    a = (_num_elements(p, p.a, p.m, p.k),), p.a.dtype
    b = (_num_elements(p, p.b, p.k, p.b_columns),), p.b.dtype
    shapes = [a, b, b] if p.num_b == 2 and not p.epilogue.up_offset else [a, b]
    if p.beta:
        shapes.append((p.d_shape, p.out_dtype))
    if p.function is not None:
        shapes += p.function.operand_shapes(p.batch, p.batch_inner, p.m, p.n)
    return shapes


def _make_inputs(problem: Problem, num_sets: int) -> list[tuple[jax.Array, ...]]:
    """Make sets of operands: standard normal numbers, or integers over their whole range."""
    shapes = _operand_shapes(problem)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), (num_sets, len(shapes)))
    return jax.block_until_ready(
        [tuple(map(_random, own, *zip(*shapes, strict=True))) for own in keys]
    )


def _num_elements(problem: Problem, operand: Operand, rows: int, columns: int) -> int:
    """Number of elements from the first addressed element to the last."""
    if operand.transposed:
        rows, columns = columns, rows
    outer = problem.batch // max(problem.batch_inner, 1)
    inner = problem.batch_inner
    last = (outer - 1) * operand.outer_stride + (inner - 1) * operand.inner_stride
    return last + (rows - 1) * operand.ld + columns


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key, shape, dtype_name):
    dtype = DTYPES[dtype_name]
    if np.issubdtype(dtype, np.integer):
        bounds = jnp.iinfo(dtype)
        return jax.random.randint(key, shape, bounds.min, bounds.max + 1, jnp.int32).astype(dtype)
    return jax.random.normal(key, shape, dtype)
