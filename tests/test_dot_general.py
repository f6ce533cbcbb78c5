"""dot_general as a drop-in for lax.dot_general."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from random_arrays import normal

import jax_tcgemm

CASES = {
    "nn": ((5, 7), (7, 6), (((1,), (0,)), ((), ()))),
    "tt": ((7, 5), (6, 7), (((0,), (1,)), ((), ()))),
    "outer": ((5,), (6,), (((), ()), ((), ()))),
    "scalar": ((5, 7), (7, 5), (((0, 1), (1, 0)), ((), ()))),
    "attention scores": ((2, 16, 4, 8), (2, 20, 4, 8), (((3,), (3,)), ((0, 2), (0, 2)))),
    "attention values": ((2, 4, 16, 20), (2, 20, 4, 8), (((3,), (1,)), ((0, 1), (0, 2)))),
    "dense heads": ((2, 16, 24), (24, 4, 8), (((2,), (0,)), ((), ()))),
    "heads first": ((2, 16, 24), (4, 24, 8), (((2,), (1,)), ((), ()))),
    "two contracted": ((2, 16, 4, 8), (4, 8, 24), (((2, 3), (0, 1)), ((), ()))),
    "contracted apart": ((4, 16, 8), (8, 4, 24), (((0, 2), (1, 0)), ((), ()))),
    "batch reversed": ((2, 3, 5, 7), (3, 2, 7, 6), (((3,), (2,)), ((1, 0), (0, 1)))),
    "grouped queries": ((2, 9, 3, 2, 8), (2, 11, 3, 8), (((4,), (3,)), ((0, 2), (0, 2)))),
    "batch only": ((3, 4), (4, 3), (((), ()), ((0, 1), (1, 0)))),
    "empty": ((0, 7), (7, 6), (((1,), (0,)), ((), ()))),
    "nothing contracted": ((5, 0), (0, 6), (((1,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("implementation", ["host", "xla", None])
@pytest.mark.parametrize("case", CASES)
def test_values(case, implementation):
    lhs_shape, rhs_shape, numbers = CASES[case]
    lhs, rhs = normal(*lhs_shape), normal(*rhs_shape, seed=1)
    ours = functools.partial(
        jax_tcgemm.dot_general, dimension_numbers=numbers, implementation=implementation
    )
    with jax.enable_x64(True):
        wide = lhs.astype(jnp.float64), rhs.astype(jnp.float64)
        expected = np.asarray(lax.dot_general(*wide, numbers))
    out = jax.jit(ours)(lhs, rhs)
    assert out.dtype == jnp.float32
    # At most 160 terms of order 1, each with an error of one float32 rounding.
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_lax_gradients(case):
    lhs_shape, rhs_shape, numbers = CASES[case]
    lhs, rhs = normal(*lhs_shape), normal(*rhs_shape, seed=1)

    def loss(dot):
        return lambda x, y: jnp.sum(jnp.sin(dot(x, y, numbers)))

    ours = loss(functools.partial(jax_tcgemm.dot_general, implementation="host"))
    got = jax.grad(ours, (0, 1))(lhs, rhs)
    expected = jax.grad(loss(lax.dot_general), (0, 1))(lhs, rhs)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    jaxpr = str(jax.make_jaxpr(jax.grad(ours, (0, 1)))(lhs, rhs))
    assert "transpose" not in jaxpr
    assert jaxpr.count("tcgemm_dot_general[") == 3


def test_positional_arguments_are_those_of_lax():
    x = normal(4, 4, dtype="bfloat16")
    out = jax_tcgemm.dot_general(x, x, (((1,), (0,)), ((), ())), None, jnp.float32)
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("numbers", [[[[1], [0]], [[], []]], (((-0 + 1,), (0,)), ((), ()))])
def test_dimension_numbers_may_be_any_sequences(numbers):
    x = jnp.ones((3, 3))
    np.testing.assert_array_equal(jax_tcgemm.dot_general(x, x, numbers), np.full((3, 3), 3))


@pytest.mark.parametrize(
    "precision",
    [
        None,
        "highest",
        lax.Precision.HIGH,
        (lax.Precision.DEFAULT, "highest"),
        "F32_F32_F32",
        "TF32_TF32_F32",
        lax.DotAlgorithmPreset.F16_F16_F32,
        "BF16_BF16_F32",
        "BF16_BF16_F32_X3",
    ],
    ids=str,
)
def test_precisions(precision):
    x, y = normal(9, 40), normal(40, 5, seed=1)
    out = jax_tcgemm.dot_general(x, y, (((1,), (0,)), ((), ())), precision)
    assert out.dtype == jnp.float32
    # The coarsest preset rounds operands to bfloat16.
    np.testing.assert_allclose(out, np.asarray(x) @ np.asarray(y), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("where", ["config", "argument"])
def test_default_matmul_precision_is_canonical_in_the_jaxpr(where):
    x = jnp.ones((4, 4))
    numbers = (((1,), (0,)), ((), ()))
    with jax.default_matmul_precision("float32" if where == "config" else "default"):
        precision = None if where == "config" else "highest"
        ours = jax.make_jaxpr(lambda x: jax_tcgemm.dot_general(x, x, numbers, precision))(x)
        theirs = jax.make_jaxpr(lambda x: lax.dot_general(x, x, numbers, precision))(x)
    assert ours.eqns[0].params["precision"] == theirs.eqns[0].params["precision"]


@settings(max_examples=40, deadline=None)
@given(
    num_batch=st.integers(0, 2),
    num_contract=st.integers(0, 2),
    free=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    data=st.data(),
)
def test_any_dimension_numbers(num_batch, num_contract, free, data):
    shared = data.draw(
        st.lists(
            st.integers(1, 4), min_size=num_batch + num_contract, max_size=num_batch + num_contract
        )
    )
    shapes, batch, contract = [], [], []
    for num_free in free:
        dims = shared + data.draw(st.lists(st.integers(1, 4), min_size=num_free, max_size=num_free))
        order = data.draw(st.permutations(range(len(dims))))
        shape = [0] * len(dims)
        for extent, axis in zip(dims, order, strict=True):
            shape[axis] = extent
        shapes.append(shape)
        batch.append(tuple(order[:num_batch]))
        contract.append(tuple(order[num_batch : len(shared)]))
    # Small integers, so that float32 sums are exact.
    lhs, rhs = (
        np.random.default_rng(i).integers(-4, 5, shape).astype(np.float32)
        for i, shape in enumerate(shapes)
    )
    numbers = (tuple(contract), tuple(batch))
    out = jax_tcgemm.dot_general(lhs, rhs, numbers, implementation="host")
    np.testing.assert_array_equal(out, lax.dot_general(lhs, rhs, numbers))
