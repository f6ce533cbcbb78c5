"""Inputs of a case or workload, and the check of every result before it is timed."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.bench.suites import Case
from jax_tcgemm.bench.workload import Workload

# What the reference is computed in: products of 8-bit and 16-bit floats are exact in float32.
_WIDE = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float64",
    "float64": "float64",
    "float8_e4m3fn": "float32",
    "int8": "float64",
    "uint8": "float64",
    "complex64": "complex128",
    "complex128": "complex128",
}


def make_inputs(case: Case | Workload, num_sets: int) -> list[tuple[jax.Array, ...]]:
    """Different random operands: standard normal, integers uniform over their whole range."""
    # This generator is one instruction, so it compiles fast for every new shape.
    key = jax.random.key(0, impl="rbg")
    draw = getattr(case, "draw", None)
    sets = []
    for i in range(num_sets):
        own_key = jax.random.fold_in(key, i)
        if draw is not None:
            sets.append(tuple(draw(own_key)))
            continue
        keys = jax.random.split(own_key, len(case.operands))
        sets.append(
            tuple(random(k, x.shape, x.dtype) for k, x in zip(keys, case.operands, strict=True))
        )
    return jax.block_until_ready(sets)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Standard normal numbers; integers uniform over their whole range."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        return jax.random.randint(key, shape, bounds.min, bounds.max + 1, jnp.int32).astype(dtype)
    return jax.random.normal(key, shape, dtype)


def random_quantized(
    key: jax.Array, shape: tuple[int, ...], bits: int, group_size: int, dtype
) -> tuple[jax.Array, jax.Array]:
    """Integers of a weight [k, ...], and scales in `dtype` by which products are of order 1."""
    of_q, of_scale = jax.random.split(key)
    k, *columns = shape
    q = jax.random.randint(of_q, shape, -(2 ** (bits - 1)), 2 ** (bits - 1), jnp.int8)
    scale = jax.random.uniform(of_scale, (k // group_size, *columns), jnp.float32, 0.5, 1.5)
    return q, (scale * k**-0.5 / 2 ** (bits - 2)).astype(dtype)


def tolerance(case: Case | Workload) -> float:
    """Largest accepted error, as :func:`errors` measures it.

    A workload says its own. Of a product: one rounding of the result, one of TF32 operands, and
    accumulation that grows with sqrt(K). It is wide enough for any order of summation and far too
    narrow for a wrong element. With 8-bit floats whose accumulators are not promoted, the tensor
    core adds every 32 elements of K in 13 bits, and the error is as many truncations of the largest
    accumulator.
    """
    if isinstance(case, Workload):
        return case.tolerance
    out = jnp.dtype(case.out_type)
    if jnp.issubdtype(out, jnp.integer):
        return 0.0
    accumulator = jnp.float64 if case.element_type in ("float64", "complex128") else jnp.float32
    rounding = float(jnp.finfo(out).eps)
    operands = 2.0**-10 if case.dtype == "tf32" else 0.0
    if case.dtype == "f8_fast_accum":
        operands = case.k / 32 * 2.0**-13
    return rounding + operands + 8 * float(jnp.finfo(accumulator).eps) * math.sqrt(max(case.k, 1))


def errors(case: Case | Workload, operands: tuple, results: list) -> list[float]:
    """Max |result - reference| / max |reference| of each result; NaN where one is not finite.

    Of a result of several arrays, the largest such error of one of them.
    """
    references = _reference(case)(operands)
    return [
        max(jax.tree.leaves(jax.tree.map(_error, result, references)), key=_nan_last)
        for result in results
    ]


def prepare(case: Case | Workload, results: list) -> None:
    """Compile what :func:`errors` runs on results of such shapes."""
    references = _reference(case).out_info
    for result in results:
        jax.tree.map(_prepare_error, result, references)


@functools.lru_cache(maxsize=64)
def _reference(case):
    """The compiled reference of a case, a function of its operands."""
    lowered = jax.jit(functools.partial(_wide_reference, case)).lower(case.operands)
    # The reference is needed once: searching for its best algorithm would take longer than it.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    return lowered.compile(compiler_options=options)


def _wide_reference(case, operands):
    # The barrier keeps XLA from turning the wide product back into a narrow one.
    kept = getattr(case, "kept", ())
    dtypes = [
        x.dtype if i in kept else _WIDE.get(x.dtype.name, x.dtype) for i, x in enumerate(operands)
    ]
    wide = [x.astype(dtype) for x, dtype in zip(operands, dtypes, strict=True)]
    return case.reference(*lax.optimization_barrier(wide))


# Arrays of at most so many elements are compared by NumPy, within milliseconds and in float64: a
# program for each shape would take longer to compile. Larger ones are compared where they are.
_FEW_ELEMENTS = 1 << 20


def _error(result: jax.Array, reference: jax.Array) -> float:
    """Max |result - reference| / max |reference|."""
    if reference.size > _FEW_ELEMENTS:
        return float(_comparison(_struct(result), _struct(reference))(result, reference))
    dtype = np.promote_types(_compared_dtype(reference), np.float64)
    result, expected = (np.asarray(x).astype(dtype) for x in (result, reference))
    scale = max(np.max(np.abs(expected)), jnp.finfo(_compared_dtype(reference)).tiny)
    with np.errstate(invalid="ignore"):
        return float(np.max(np.abs(result - expected)) / scale)


def _prepare_error(result, reference) -> None:
    if reference.size > _FEW_ELEMENTS:
        _comparison(_struct(result), _struct(reference))


@functools.lru_cache(maxsize=64)
def _comparison(result: jax.ShapeDtypeStruct, reference: jax.ShapeDtypeStruct):
    """The compiled :func:`_error` of large arrays."""

    def error(result, reference):
        dtype = _compared_dtype(reference)
        scale = jnp.maximum(jnp.max(jnp.abs(reference)), jnp.finfo(dtype).tiny)
        return jnp.max(jnp.abs(result.astype(dtype) - reference)) / scale

    return jax.jit(error).lower(result, reference).compile()


def _compared_dtype(reference) -> np.dtype:
    return jnp.promote_types(reference.dtype, jnp.float32)


def _nan_last(error: float) -> tuple[bool, float]:
    """Orders errors so that NaN is the largest."""
    return math.isnan(error), error


def _struct(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# The loops below compile to one product, however many groups there are: each takes as many rows as
# the largest group has.


def rows_of_groups(product, sizes: np.ndarray, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """``product(rows of a group, its weights)`` of every group, one after the other."""
    block, begins = _blocks(sizes)
    rows = jnp.pad(rows, ((0, block), (0, 0)))
    columns = jax.eval_shape(product, rows[:block], weights[0]).shape[-1]

    def one(group, out):
        taken = lax.dynamic_slice_in_dim(rows, begins[group], block)
        # What lies past the group is written again by the next one.
        return lax.dynamic_update_slice_in_dim(
            out, product(taken, weights[group]), begins[group], 0
        )

    out = jnp.zeros((len(rows), columns), rows.dtype)
    return lax.fori_loop(0, len(sizes), one, out)[: sizes.sum()]


def sums_of_groups(product, sizes: np.ndarray, *rows: jax.Array) -> jax.Array:
    """``product`` of the rows that each array has of a group, zeros after them; stacked."""
    block, begins = _blocks(sizes)
    padded = [jnp.pad(x, ((0, block), (0, 0))) for x in rows]
    ours = np.arange(block)[:, None]

    def one(each):
        begin, size = each
        taken = [lax.dynamic_slice_in_dim(x, begin, block) for x in padded]
        return product(*(jnp.where(ours < size, x, 0) for x in taken))

    return lax.map(one, (begins, jnp.asarray(sizes, jnp.int32)))


def _blocks(sizes: np.ndarray) -> tuple[int, jax.Array]:
    """Rows of the largest group, and where each begins."""
    return max(int(sizes.max()), 1), jnp.asarray(np.cumsum(sizes) - sizes, jnp.int32)
