"""Operands and results of more than 2^31 elements: every offset needs 64 bits.

Needs about 20 GB of GPU memory. Operands are small integers made on the GPU, results exact, and
each test accounts for every element.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tcgemm.problem.dtypes import DTYPES
from jax_tcgemm.problem.gemm import Operand, Problem

from .gemm_call import Case, Types, accepted_layouts, call, implementations, make_inputs, rejection

pytestmark = pytest.mark.gpu

LONG, WIDE, THIN = 70000, 32768, 16
assert LONG * WIDE > 2**31

DEFAULTS = {name: configs[0] for name, configs in implementations().items()}


@pytest.fixture(autouse=True)
def enough_memory(gpu):
    stats = gpu.memory_stats() or {}
    if stats.get("bytes_limit", 0) < 40e9:
        pytest.skip("needs a GPU with 40 GB that JAX may use")


def types_of(name, out_f32):
    """bfloat16 where the implementation has it, since it is the smallest; else float32."""
    for types in (Types("bf16", "f32" if out_f32 else "bf16", "f32"), Types("f32", "f32", "f32")):
        if accepted_layouts(name, DEFAULTS[name], types):
            return types
    return pytest.fail(f"{name} runs neither bfloat16 nor float32")


def make_problem(types, m, n, k, layout="NN"):
    a = Operand(types.a, layout[0] == "T", m if layout[0] == "T" else k)
    b = Operand(types.b, layout[1] == "T", k if layout[1] == "T" else n)
    return Problem(1, 1, m, n, k, a, b, types.out, types.compute)


def product(name, problem, a, b, c):
    if reason := rejection(name, DEFAULTS[name], problem):
        pytest.fail(f"{name} refuses {problem}: {reason}")
    return call(problem, a, b, c, implementation=name, config=DEFAULTS[name])[0]


def large_operand(rows, columns, dtype):
    """A matrix of -1, 0 and 1 without a short period, so that a wrong offset shows."""
    row = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 1)
    mixed = (row * jnp.uint32(2654435761)) ^ (column * jnp.uint32(2246822519))
    return ((mixed >> 16) % 3).astype(dtype) - jnp.ones((), dtype)


@pytest.mark.parametrize("name", DEFAULTS)
def test_large_result(name):
    """The sums of all rows and of all columns are right, and so are the last rows themselves."""
    types = types_of(name, out_f32=False)
    problem = make_problem(types, LONG, WIDE, THIN)
    dtype = DTYPES[types.out]
    rng = np.random.default_rng(0)
    a = rng.integers(-1, 2, (LONG, THIN)).astype(np.float64)
    b = rng.integers(-1, 2, (THIN, WIDE)).astype(np.float64)

    @jax.jit
    def program(a, b):
        d = product(name, problem, a, b, jnp.full((1, LONG, WIDE), jnp.nan, dtype))
        # Sums of integers below 2^24, exact in float32.
        return d.sum(1, dtype=jnp.float32), d.sum(0, dtype=jnp.float32), d[-300:]

    inputs = (each.astype(DTYPES[types.inputs]) for each in (a, b))
    row_sums, column_sums, last = map(np.asarray, program(*inputs))
    np.testing.assert_array_equal(row_sums, a @ b.sum(1))
    np.testing.assert_array_equal(column_sums, a.sum(0) @ b)
    np.testing.assert_array_equal(last.astype(np.float64), a[-300:] @ b)


@pytest.mark.parametrize("layout", ["NN", "TT"])
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_large_operand(name, operand, layout):
    """Against XLA on pieces of the operand that 32 bits can index."""
    types = types_of(name, out_f32=True)
    dtype = DTYPES[types.inputs]
    # D = A B for a large A, and D^T = B^T A^T: the same product with the large operand as B.
    problem = make_problem(types, LONG, THIN, WIDE, layout)
    large_is_transposed = layout[0] == "T"
    if operand == "b":
        problem = make_problem(types, THIN, LONG, WIDE, layout)
        large_is_transposed = layout[1] == "N"
    shape = (WIDE, LONG) if large_is_transposed else (LONG, WIDE)
    small = np.random.default_rng(0).integers(-1, 2, (WIDE, THIN))
    small_is_transposed = layout[1] == "T" if operand == "a" else layout[0] == "N"
    c = jnp.full((1, problem.m, problem.n), jnp.nan, DTYPES[types.out])

    large = jax.jit(lambda: large_operand(*shape, dtype))()
    small_held = jnp.asarray(small.T if small_is_transposed else small, dtype)
    a, b = (large, small_held) if operand == "a" else (small_held, large)
    d = np.asarray(jax.jit(lambda a, b, c: product(name, problem, a, b, c))(a, b, c))
    got = d if operand == "a" else d.T

    @jax.jit
    def piece(large, start):
        axis = 1 if large_is_transposed else 0
        rows = jax.lax.dynamic_slice_in_dim(large, start, LONG // 7, axis)
        rows = (rows.T if large_is_transposed else rows).astype(jnp.float32)
        return jnp.matmul(rows, small.astype(jnp.float32), precision="highest")

    expected = [np.asarray(piece(large, start)) for start in range(0, LONG, LONG // 7)]
    np.testing.assert_array_equal(got, np.concatenate(expected))


def test_large_batch_stride(gpu):
    """Two matrices of a batch more than 2^31 elements apart, for every implementation."""
    gap = 2**31 + 2**20
    for name, config in DEFAULTS.items():
        types = types_of(name, out_f32=True)
        inputs = make_inputs(types, "NN", Case("batch_far_apart", 64, 64, 64, batch=(1, 2)))
        far = dataclasses.replace(inputs.problem.a, outer_stride=0, inner_stride=gap)
        problem = dataclasses.replace(inputs.problem, a=far)

        @jax.jit
        def program(a, b, c, problem=problem, name=name, config=config):
            first, second = a[: 64 * 64], a[64 * 64 :]
            apart = jnp.concatenate([first, jnp.zeros(gap - 64 * 64, a.dtype), second])
            return call(problem, apart, b, c, implementation=name, config=config)

        d = np.asarray(program(inputs.a, inputs.b, inputs.c))
        np.testing.assert_array_equal(d, inputs.expected, err_msg=name)
