"""Sums that a product leaves to be taken, and operands whose gradients are such sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import assert_close, compiled, is_ours, mesh_of, normal

import jax_tcgemm
from jax_tcgemm import tensor

EXPLICIT = functools.partial(mesh_of, AxisType.Explicit)


def put(mesh, *values_and_specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in values_and_specs]


def summed(x):
    return jax.sharding.reshard(x, P(*[None] * x.ndim))


def patched_einsum(x, y, out_sharding):
    with jax_tcgemm.patch(implementation="host"):
        return jnp.einsum("ij,jk->ik", x, y, out_sharding=out_sharding)


DOT = functools.partial(jax_tcgemm.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
PRODUCTS = {
    "patch": patched_einsum,
    "dot_general": functools.partial(DOT, implementation="host"),
    "matmul": functools.partial(jax_tcgemm.matmul, implementation="host"),
    "alpha": functools.partial(jax_tcgemm.linear, alpha=1.0, implementation="host"),
    "einsum": functools.partial(tensor.einsum, "ij,jk->ik", implementation="gemm"),
    "xla": functools.partial(DOT, implementation="xla"),
}

# Shardings of x (m, k), y (k, n) and the result (m, n).
CASES = {
    "k": (P(None, "x"), P("x"), P(unreduced={"x"})),
    "k, m": (P("y", "x"), P("x"), P("y", unreduced={"x"})),
    "k over two, n": (
        P(None, ("x", "y")),
        P(("x", "y"), "z"),
        P(None, "z", unreduced={"x", "y"}),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_sum_is_left_to_whoever_needs_it(name, case):
    x_spec, y_spec, out = case
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh := EXPLICIT()):
        x, y = put(mesh, (a, x_spec), (b, y_spec))
        f = functools.partial(PRODUCTS[name], out_sharding=out)
        text, collectives = compiled(f, x, y)
        assert not collectives
        assert is_ours(text) == (name != "xla")
        got = jax.jit(f)(x, y)
        assert jax.typeof(got).sharding.spec.unreduced == out.unreduced
        value = summed(got)

        def loss(x, y):
            return jnp.sum(jnp.sin(summed(f(x, y))))

        grads = jax.jit(jax.grad(loss, (0, 1)))(x, y)
    wide = a.astype(np.float64), b.astype(np.float64)
    g = np.cos(wide[0] @ wide[1])
    assert_close((value, grads), (wide[0] @ wide[1], (g @ wide[1].T, wide[0].T @ g)))


def test_batched_sums():
    a, b = normal(16, 24, seed=0), normal(3, 24, 32, seed=1)
    with jax.set_mesh(mesh := EXPLICIT()):
        x, y = put(mesh, (a, P(None, "x")), (b, P(None, "x")))
        f = functools.partial(patched_einsum, out_sharding=P(unreduced={"x"}))
        got = jax.jit(jax.vmap(f, (None, 0)))(x, y)
        assert jax.typeof(got).sharding.spec.unreduced == {"x"}
        assert_close(summed(got), a.astype(np.float64) @ b)


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_a_reduced_operand_are_left_to_be_summed(name):
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh := EXPLICIT()):
        x, y = put(mesh, (a, P("x")), (b, P(None, "y", reduced={"x"})))

        def loss(x, y):
            return jnp.sum(jnp.sin(PRODUCTS[name](x, y, out_sharding=P("x", "y"))))

        gradient = jax.grad(loss, 1)
        text, collectives = compiled(gradient, x, y)
        assert not collectives
        assert is_ours(text) == (name != "xla")
        got = jax.jit(gradient)(x, y)
        assert jax.typeof(got).sharding.spec == P(None, "y", unreduced={"x"})
        value = summed(got)
    wide = a.astype(np.float64), b.astype(np.float64)
    assert_close(value, wide[0].T @ np.cos(wide[0] @ wide[1]))


SIZES = np.array([3, 0, 11], np.int32)


def test_grouped_products():
    """Which lax.ragged_dot has not."""
    rows, experts = normal(16, 24, seed=0), normal(3, 24, 32, seed=1)
    with jax.set_mesh(mesh := EXPLICIT()):
        x, w, sizes = put(
            mesh, (rows, P("x")), (experts, P(None, None, "y", reduced={"x"})), (SIZES, P())
        )

        def loss(x, w):
            return jnp.sum(jax_tcgemm.ragged_dot(x, w, sizes, implementation="host"))

        got = jax.jit(jax.grad(loss, 1))(x, w)
        assert jax.typeof(got).sharding.spec == P(None, None, "y", unreduced={"x"})
        ones = np.ones((16, 32))
        assert_close(summed(got), ragged_reference.contraction(rows, ones, SIZES))

        x, w = put(mesh, (rows, P(None, "x")), (experts, P(None, "x")))
        out = P(unreduced={"x"})
        f = functools.partial(jax_tcgemm.ragged_dot, out_sharding=out, implementation="host")
        _, collectives = compiled(f, x, w, sizes)
        assert not collectives
        assert_close(summed(jax.jit(f)(x, w, sizes)), ragged_reference.rows(rows, experts, SIZES))


def test_a_mesh_of_one_device_has_nothing_to_sum():
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh := EXPLICIT((1,), ("x",))):
        x, y = put(mesh, (a, P(None, "x")), (b, P("x")))
        f = functools.partial(patched_einsum, out_sharding=P(unreduced={"x"}))
        assert_close(summed(jax.jit(f)(x, y)), a.astype(np.float64) @ b)


def test_explain_sees_the_part_of_one_device():
    with jax.set_mesh(mesh := EXPLICIT()):
        x, y = put(mesh, (np.ones((16, 24)), P(None, "x")), (np.ones((24, 32)), P("x")))
        f = functools.partial(jax_tcgemm.matmul, out_sharding=P(unreduced={"x"}))
        (call,) = jax_tcgemm.explain(f, x, y)
    assert (call.problem.m, call.problem.n, call.problem.k) == (16, 32, 12)
