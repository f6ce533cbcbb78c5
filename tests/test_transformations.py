"""JAX transformations of the primitive, against those of jnp.matmul and lax.dot_general."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.problem.call_options import CallOptions

host_matmul = functools.partial(jax_tcgemm.matmul, implementation="host")
IMPLEMENTATIONS = pytest.mark.parametrize(
    "matmul", [jax_tcgemm.matmul, host_matmul], ids=["default", "host"]
)


def assert_same(ours, theirs):
    """Equal but for the order of float32 sums of at most a hundred terms of order 1."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), ours, theirs)


def num_ours(f, *args):
    return str(jax.make_jaxpr(f)(*args)).count("tcgemm_dot_general[")


@IMPLEMENTATIONS
@pytest.mark.parametrize("out_axes", [0, 1, 2])
@pytest.mark.parametrize("in_axes", [*itertools.product([0, 1, 2, None], repeat=2)][:-1], ids=str)
def test_vmap_over_any_axes(in_axes, out_axes, matmul):
    shapes = [[4, 5], [5, 6]]
    for shape, axis in zip(shapes, in_axes, strict=True):
        if axis is not None:
            shape.insert(axis, 3)
    a, b = normal(*shapes[0]), normal(*shapes[1], seed=1)
    mapped = [jax.vmap(f, in_axes, out_axes) for f in (matmul, jnp.matmul)]
    assert_same(mapped[0](a, b), mapped[1](a, b))
    # What was not moved by the caller's out_axes was not moved by us.
    assert num_ours(mapped[0], a, b) == 1


@IMPLEMENTATIONS
def test_nested_vmap_of_grad(matmul):
    a, b = normal(2, 4, 3, 5), normal(5, 2, 6, seed=1)

    def per_example(f):
        loss = jax.grad(lambda x, y: jnp.sum(jnp.tanh(f(x, y))), (0, 1))
        return jax.vmap(jax.vmap(loss, (0, None)), (0, 1), 1)

    assert_same(per_example(matmul)(a, b), per_example(jnp.matmul)(a, b))


def test_vmapped_rows_fold_into_one_product():
    for axis in (0, 1):
        f = jax.vmap(jax_tcgemm.matmul, (axis, None), axis)
        (call,) = jax_tcgemm.explain(f, normal(4, 4, 5), normal(5, 6), platform="cpu")
        assert (call.problem.batch, call.problem.m) == (1, 16)


def test_vmapped_columns_keep_their_memory_order():
    f = jax.vmap(jax_tcgemm.matmul, (None, 0), 0)
    jaxpr = jax.make_jaxpr(f)(normal(4, 5), normal(3, 5, 6))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["tcgemm_dot_general"]


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda a, b: jax.jvp(f, (a, b), (jnp.cos(a), jnp.sin(b))),
        lambda f: jax.grad(lambda a, b: jnp.sum(f(a, b) ** 3), (0, 1)),
        lambda f: jax.hessian(lambda a, b: jnp.sum(f(a, b) ** 3), (0, 1)),
        lambda f: jax.jacrev(f, (0, 1)),
        lambda f: jax.jacfwd(f, (0, 1)),
        lambda f: lambda a, b: jax.linearize(f, a, b)[1](jnp.cos(a), jnp.sin(b)),
        lambda f: lambda a, b: jax.linear_transpose(lambda x: f(x, b), a)(f(a, b))[0],
        lambda f: lambda a, b: jax.vjp(f, a, b)[1](f(a, b)),
        lambda f: jax.checkpoint(f),
        lambda f: jax.grad(jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(f(a, b)))), (0, 1)),
    ],
    ids=[
        *("jvp", "grad", "hessian", "jacrev", "jacfwd", "linearize", "linear_transpose", "vjp"),
        *("remat", "grad of remat"),
    ],
)
def test_derivatives(transform, matmul):
    a, b = normal(2, 4, 5), normal(5, 3, seed=1)
    assert_same(jax.jit(transform(matmul))(a, b), transform(jnp.matmul)(a, b))
    assert "dot_general[" in str(jax.make_jaxpr(transform(matmul))(a, b))
    assert " dot_general[" not in str(jax.make_jaxpr(transform(matmul))(a, b))


@IMPLEMENTATIONS
def test_control_flow(matmul):
    x, w = normal(4, 6), normal(3, 6, 6, seed=1)

    def network(f):
        def run(x, w):
            x, _ = lax.scan(lambda x, w: (jnp.tanh(f(x, w)), None), x, w)
            x = lax.cond(jnp.sum(x) > 1e6, lambda x: x, lambda x: f(x, w[0]), x)
            return lax.fori_loop(0, 2, lambda i, x: f(x, w[i]), x)

        return run

    assert_same(jax.jit(network(matmul))(x, w), network(jnp.matmul)(x, w))
    grads = [
        jax.grad(lambda x, w, f=f: jnp.sum(network(f)(x, w)), (0, 1)) for f in (matmul, jnp.matmul)
    ]
    assert_same(grads[0](x, w), grads[1](x, w))
    dynamic = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, matmul(c[1], w[0])), (0, x))
    assert_same(dynamic[1], x @ w[0] @ w[0] @ w[0])


@IMPLEMENTATIONS
def test_custom_vjp(matmul):
    @jax.custom_vjp
    def doubled(a, b):
        return matmul(a, b)

    doubled.defvjp(
        lambda a, b: (matmul(a, b), (a, b)),
        lambda saved, g: (2 * matmul(g, saved[1].T), 2 * matmul(saved[0].T, g)),
    )
    a, b = normal(4, 5), normal(5, 3, seed=1)
    got = jax.jit(jax.grad(lambda a, b: jnp.sum(doubled(a, b)), (0, 1)))(a, b)
    expected = jax.grad(lambda a, b: 2 * jnp.sum(a @ b), (0, 1))(a, b)
    assert_same(got, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("preferred", [None, "float32", "bfloat16"])
def test_cotangents_have_the_primals_dtype(dtype, preferred):
    a, b = normal(4, 5).astype(dtype), normal(5, 3, seed=1).astype("bfloat16")

    def grads(f):
        loss = lambda a, b: jnp.sum(f(a, b, preferred_element_type=preferred))  # noqa: E731
        return jax.eval_shape(jax.grad(loss, (0, 1)), a, b)

    assert grads(jax_tcgemm.matmul) == grads(jnp.matmul)


def test_derivatives_inherit_the_implementation_but_not_the_config():
    f = functools.partial(jax_tcgemm.matmul, implementation="host", config="portable")
    a, b = normal(4, 5), normal(5, 3)
    eqns = jax.make_jaxpr(jax.grad(lambda a, b: jnp.sum(f(a, b)), (0, 1)))(a, b).eqns
    params = [e.params for e in eqns if e.primitive.name == "tcgemm_dot_general"]
    configs = ["portable", None, None]
    assert [p["options"] for p in params] == [CallOptions("matmul", "host", x) for x in configs]


def test_spmd_axis_name_and_named_axes():
    a, b = normal(3, 4, 5), normal(3, 5, 6, seed=1)
    f = jax.vmap(lambda a, b: lax.psum(jax_tcgemm.matmul(a, b), "i"), axis_name="i")
    assert_same(f(a, b)[0], jnp.sum(a @ b, 0))
    assert_same(jax.vmap(jax_tcgemm.matmul, spmd_axis_name="i")(a, b), a @ b)


@pytest.mark.parametrize("check_vma", [True, False])
@IMPLEMENTATIONS
def test_shard_map_of_one_device(matmul, check_vma):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    rows, none = PartitionSpec("x"), PartitionSpec()
    f = jax.shard_map(matmul, mesh=mesh, in_specs=(rows, none), out_specs=rows, check_vma=check_vma)
    a, b = normal(4, 5), normal(5, 6, seed=1)
    assert_same(jax.jit(f)(a, b), a @ b)
    got = jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), (0, 1)))(a, b)
    assert_same(got, jax.grad(lambda a, b: jnp.sum(jnp.sin(a @ b)), (0, 1))(a, b))
