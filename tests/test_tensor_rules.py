"""tensor: derivatives, batching and sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from random_arrays import draw

import jax_tcgemm
from jax_tcgemm import tensor

pytestmark = pytest.mark.usefixtures("x64")


# --- derivatives --------------------------------------------------------------------------------


@pytest.mark.parametrize("conj", ["identity", "conj"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_of_a_contraction(dtype, conj):
    """By its three operands, twice, forward and reverse, against finite differences."""
    a, b, c = draw((2, 4), dtype), draw((4, 2, 3), dtype, 1), draw((3, 2), dtype, 2)
    alpha = 1.1 if dtype == "float64" else 1.1 - 0.3j

    def f(a, b, c):
        return tensor.contract("bj,jbk->kb", a, b, c=c, alpha=alpha, beta=0.9, op_a=conj, op_b=conj)

    check_grads(jax.jit(f), (a, b, c), 2, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("f", [
    lambda a: tensor.permute("ijk->kij", a, alpha=2),
    lambda a: tensor.permute("ijk->kij", a, op_a="tanh"),
    lambda a: tensor.reduce("ijk->kj", a, alpha=2, c=jnp.ones((2, 3)), beta=3),
    lambda a: tensor.reduce("ijk->j", a, op="mul", op_a="cos"),
    lambda a: tensor.reduce("ijk->j", a, op="max"),
    lambda a: tensor.reduce("ijk->j", a, op="min"),
    lambda a: tensor.elementwise_binary("ijk,kj->jik", a, a[0].T, op="mul"),
    lambda a: tensor.elementwise_binary("ijk,kj->jik", a, a[0].T, op="max", op_a="sin"),
    lambda a: tensor.elementwise_trinary("ijk,jk,ik->ijk", a, a[0], a[:, 0], op_ab="mul"),
    lambda a: tensor.einsum("ijk,ljk,lm->im", a, a, a[0, :2]),
    lambda a: tensor.einsum("ijk,ijk->", a, a),
])  # fmt: skip
def test_derivatives(f):
    check_grads(jax.jit(f), (draw((2, 3, 2)),), 2, atol=1e-5, rtol=1e-5)


def test_cotangents_are_as_wide_as_the_result():
    """Rounded to float16 first, they would be infinite."""
    a, b = 1e-3 * draw((3, 4), "float16"), 1e-3 * draw((4, 2), "float16", 1)

    def gradients(einsum, a, b):
        def loss(a, b):
            return 1e5 * einsum("ij,jk->ik", a, b, preferred_element_type="float32").sum()

        return jax.grad(loss, (0, 1))(a, b)

    wide = a.astype("float64"), b.astype("float64")
    expected = gradients(lambda *args, **_: jnp.einsum(*args), *wide)
    for got, wanted in zip(gradients(tensor.einsum, a, b), expected, strict=True):
        assert got.dtype == "float16"
        np.testing.assert_allclose(got, wanted, rtol=3e-3, atol=0.1)


def test_gradient_by_c_alone():
    a, c = draw((3, 4)), draw((3, 3))
    loss = lambda c: (tensor.contract("ij,kj->ik", a, a, c=c, beta=2) * c).sum()  # noqa: E731
    expected = a @ a.T + 4 * c
    np.testing.assert_allclose(jax.grad(loss)(c), expected, rtol=1e-13)


def test_derivatives_of_a_product_asked_for_by_name():
    """Those by which nothing is contracted are products, too, of one column by one row."""
    a, x = draw((3, 4)), draw((4,))
    f = lambda a, x: tensor.contract("ij,j->i", a, x, implementation="gemm")  # noqa: E731
    calls = jax_tcgemm.explain(jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1)), a, x)
    assert [call.implementation for call in calls] == ["gemm"] * 3
    check_grads(jax.jit(f), (a, x), 1, atol=1e-6, rtol=1e-6)


# --- batching -----------------------------------------------------------------------------------


def test_vmap_of_a_contraction_without_modes():
    a, c = draw((5,)), draw((5,), seed=1)
    f = lambda a, c: tensor.contract(",->", a, 3.0, c=c, beta=2)  # noqa: E731
    np.testing.assert_allclose(jax.vmap(f)(a, c), 3 * a + 2 * c, rtol=1e-14)


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 1, 0), (2, 0, None), (None, None, 1)])
def test_vmap_is_a_mode(in_axes):
    """One call, as before, and the values of a loop."""
    shapes = [(3, 4), (4, 5), (5, 3)]
    size = 2
    args = [
        draw(shape if axis is None else (*shape[:axis], size, *shape[axis:]), "float64", i)
        for i, (shape, axis) in enumerate(zip(shapes, in_axes, strict=True))
    ]

    def f(a, b, c):
        return tensor.contract("ij,jk->ki", a, b, c=c, alpha=2, beta=3)

    mapped = jax.vmap(f, in_axes)
    got = mapped(*args)
    for index in range(size):
        one = [
            x if axis is None else jnp.take(x, index, axis)
            for x, axis in zip(args, in_axes, strict=True)
        ]
        np.testing.assert_allclose(got[index], f(*one), rtol=1e-12)
    assert str(jax.make_jaxpr(mapped)(*args)).count("tcgemm_contract") == 1


@pytest.mark.parametrize("in_axes", [0, 1, 2])
@pytest.mark.parametrize("f", [
    lambda a: tensor.permute("ij->ji", a, alpha=2),
    lambda a: tensor.reduce("ij->j", a, op="max"),
    lambda a: tensor.reduce("ij->i", a, c=a[:, 0], beta=2),
    lambda a: tensor.elementwise_binary("ij,j->ji", a, a[0]),
    lambda a: tensor.elementwise_trinary("ij,j,ji->ji", a, jnp.ones(4), a.T, op_abc="mul"),
    lambda a: tensor.einsum("ij,kj,kl->il", a, a, a),
])  # fmt: skip
def test_vmap_and_its_gradient(f, in_axes):
    shape = (3, 4)
    a = draw((*shape[:in_axes], 5, *shape[in_axes:]))
    rows = jnp.moveaxis(a, in_axes, 0)
    got = jax.vmap(f, in_axes)(a)
    np.testing.assert_allclose(got, jnp.stack([f(x) for x in rows]), rtol=1e-12)
    gradient = jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()), in_axes, in_axes)(a)
    expected = jnp.stack([jax.grad(lambda x: (f(x) ** 2).sum())(x) for x in rows], in_axes)
    np.testing.assert_allclose(gradient, expected, rtol=1e-11, atol=1e-12)


# --- several devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P("x", "y")], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded(axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    a, b, c = draw((8, 16)), draw((16, 6), seed=1), draw((6, 8), seed=2)
    out = P(None, spec[0]) if axis_type == AxisType.Explicit else None

    def f(a, b, c):
        return tensor.contract("ij,jk->ki", a, b, c=c, alpha=2, beta=3, out_sharding=out)

    with jax.set_mesh(mesh):
        sharded = jax.device_put(a, jax.NamedSharding(mesh, spec))
        got = jax.jit(f)(sharded, b, c)
        np.testing.assert_allclose(got, 2 * (a @ b).T + 3 * c, rtol=1e-12)
        rows = jax.jit(lambda a: tensor.reduce("ij->i", a, op="max"))(sharded)
        np.testing.assert_array_equal(rows, a.max(1))
        moved = jax.jit(lambda a: tensor.permute("ij->ji", a, op_a="neg"))(sharded)
        np.testing.assert_array_equal(moved, -a.T)


def test_in_shard_map():
    mesh = jax.make_mesh((4,), ("x",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(None, "x"))
    def f(a, b):
        a = tensor.elementwise_binary("ij,j->ij", a, b[:, 0])
        return tensor.contract("ij,jk->ki", a, b)

    a, b = draw((8, 16)), draw((16, 6), seed=1)
    with jax.set_mesh(mesh):
        divided = jax.device_put(a, jax.NamedSharding(mesh, P("x")))
        np.testing.assert_allclose(f(divided, b), ((a + b[:, 0]) @ b).T, rtol=1e-12)
        gradient = jax.grad(lambda b: f(divided, b).sum())(b)
    expected = jax.grad(lambda b: ((a + b[:, 0]) @ b).sum())(b)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)
