"""Inputs of a case, and the check of every result before it is timed."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.bench.suites import Case

# What the reference is computed in: products of 16-bit operands are exact in float32.
_WIDE = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float64",
    "float64": "float64",
    "int8": "float64",
    "uint8": "float64",
    "complex64": "complex128",
    "complex128": "complex128",
}


def operand_shapes(case: Case) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """A and B as they lie in memory."""
    return (
        jax.ShapeDtypeStruct(case.a_shape, case.element_type),
        jax.ShapeDtypeStruct(case.b_shape, case.element_type),
    )


def make_inputs(case: Case, num_sets: int) -> list[tuple[jax.Array, jax.Array]]:
    """Different random operands: standard normal, integers uniform over their whole range."""
    # This generator is one instruction, so it compiles fast for every new shape.
    key = jax.random.key(0, impl="rbg")
    sets = []
    for i in range(num_sets):
        a_key, b_key = jax.random.split(jax.random.fold_in(key, i))
        sets.append(
            (
                _random(a_key, case.a_shape, case.element_type),
                _random(b_key, case.b_shape, case.element_type),
            )
        )
    return jax.block_until_ready(sets)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key, shape, element_type):
    dtype = jnp.dtype(element_type)
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        return jax.random.randint(key, shape, bounds.min, bounds.max + 1, jnp.int32).astype(dtype)
    return jax.random.normal(key, shape, dtype)


def tolerance(case: Case) -> float:
    """Largest accepted error, as :func:`errors` measures it.

    One rounding of the result, one of TF32 operands, and accumulation that grows with sqrt(K).
    It is wide enough for any order of summation and far too narrow for a wrong element.
    """
    out = jnp.dtype(case.out_type)
    if jnp.issubdtype(out, jnp.integer):
        return 0.0
    accumulator = jnp.float64 if case.element_type in ("float64", "complex128") else jnp.float32
    rounding = float(jnp.finfo(out).eps)
    operands = 2.0**-10 if case.dtype == "tf32" else 0.0
    return rounding + operands + 8 * float(jnp.finfo(accumulator).eps) * math.sqrt(max(case.k, 1))


def errors(case: Case, a: jax.Array, b: jax.Array, results: list[jax.Array]) -> list[float]:
    """Max |result - reference| / max |reference| of each result; NaN where one is not finite."""
    return [float(e) for e in checker(case, len(results))(a, b, results)]


@functools.lru_cache(maxsize=64)
def checker(case: Case, num_results: int):
    """The compiled comparison of that many results with the reference."""
    a, b = operand_shapes(case)
    shape = (case.batch, case.m, case.n) if case.batch > 1 else (case.m, case.n)
    results = [jax.ShapeDtypeStruct(shape, case.out_type)] * num_results
    lowered = jax.jit(functools.partial(_errors, case)).lower(a, b, results)
    # The reference is needed once: searching for its best algorithm would take longer than it.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    return lowered.compile(compiler_options=options)


def _errors(case: Case, a, b, results):
    wide = _WIDE[case.element_type]
    # The barrier keeps XLA from turning the wide product back into a narrow one.
    a, b = lax.optimization_barrier((a.astype(wide), b.astype(wide)))
    reference = lax.dot_general(a, b, case.dimension_numbers, precision=lax.Precision.HIGHEST)
    scale = jnp.maximum(jnp.max(jnp.abs(reference)), jnp.finfo(wide).tiny)
    return [jnp.max(jnp.abs(result.astype(wide) - reference)) / scale for result in results]
