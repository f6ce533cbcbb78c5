"""`gram`: values, derivatives and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm


def draw(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def symmetric(*shape, dtype=np.float32, seed=1):
    c = draw(*shape, seed=seed)
    return (c + jnp.swapaxes(c, -1, -2)).astype(dtype)


def exact(x, alpha=1.0, beta=0.0, c=None, *, transpose=False):
    x = np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)
    x = np.swapaxes(x, -1, -2) if transpose else x
    found = alpha * (x @ np.swapaxes(x, -1, -2))
    return found if c is None else found + beta * np.asarray(c).astype(np.float64)


def close(got, expected, dtype=None):
    eps = float(jnp.finfo(dtype or got.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(got).astype(expected.dtype),
        expected,
        rtol=4 * eps,
        atol=8 * eps * np.abs(expected).max(initial=0),
    )


@pytest.mark.parametrize("shape", [(5, 7), (3, 40, 24), (2, 3, 8, 5), (300, 16), (4, 0), (0, 4)])
@pytest.mark.parametrize("transpose", [False, True])
def test_values(shape, transpose):
    x = draw(*shape)
    close(jax_tcgemm.gram(x, transpose=transpose), exact(x, transpose=transpose))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
def test_dtypes(dtype):
    x = draw(30, 20).astype(dtype)
    if dtype == jnp.complex64:
        x = x + 1j * draw(30, 20, seed=2)
    got = jax.jit(jax_tcgemm.gram)(x)
    assert got.dtype == dtype
    close(got, exact(x))
    wide = jax_tcgemm.gram(x, preferred_element_type=jnp.promote_types(dtype, jnp.float32))
    close(wide, exact(x), jnp.float32)


def test_integers():
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (20, 12)), jnp.int8)
    got = jax_tcgemm.gram(x, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(got, np.asarray(x, np.int32) @ np.asarray(x, np.int32).T)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_terms(dtype, traced):
    x, c = draw(2, 40, 24, dtype=dtype), symmetric(2, 40, 40, dtype=dtype)

    def f(x, c, alpha, beta):
        return jax_tcgemm.gram(x, alpha=alpha, beta=beta, c=c)

    given = jax.jit(f) if traced else f
    close(given(x, c, 1.5, -2), exact(x, 1.5, -2, c))
    close(jax_tcgemm.gram(x, alpha=-0.5), exact(x, -0.5))


def test_gradients():
    x, c = draw(20, 12), symmetric(20, 20)

    def ours(x, c, alpha, beta):
        return jnp.sum(jnp.sin(jax_tcgemm.gram(x, alpha=alpha, beta=beta, c=c)))

    def theirs(x, c, alpha, beta):
        return jnp.sum(jnp.sin(alpha * jnp.matmul(x, x.T, precision="highest") + beta * c))

    args = x, c, jnp.float32(0.5), jnp.float32(2)
    for got, expected in zip(
        jax.grad(ours, (0, 1, 2, 3))(*args), jax.grad(theirs, (0, 1, 2, 3))(*args), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    hessian = jax.hessian(lambda x: ours(x, c, 1.0, 0.5))(x)
    expected = jax.hessian(lambda x: theirs(x, c, 1.0, 0.5))(x)
    np.testing.assert_allclose(hessian, expected, rtol=2e-3, atol=2e-3)


def test_mapped():
    x, c = draw(3, 20, 12), symmetric(20, 20)
    got = jax.vmap(lambda x: jax_tcgemm.gram(x, beta=2, c=c))(x)
    close(got, exact(x, 1, 2, c))


def test_derivative_is_one_product():
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def loss(x):
        return jnp.sum(jnp.sin(jax_tcgemm.gram(x).astype(jnp.float32)))

    first, second = jax_tcgemm.explain(jax.grad(loss), x, platform="cuda")
    assert first.problem.symmetric
    assert not second.problem.symmetric


def test_symmetric_operands_follow_in_the_kernel():
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    (call,) = jax_tcgemm.explain(
        lambda x, c: jax_tcgemm.gram(x, alpha=2, beta=0.5, c=c), x, x, platform="cuda"
    )
    assert call.problem.symmetric
    assert call.implementation == "wgmma"
    assert call.epilogue == ("mul", "add")


def test_c_is_not_read_beside_a_beta_of_0():
    x = draw(5, 4)
    close(jax_tcgemm.gram(x, beta=0, c=jnp.full((5, 5), jnp.nan)), exact(x))


def test_rows_over_explicit_axes_need_a_sharding():
    """Devices may divide the rows of the result, as they do those of any product."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(draw(16, 8), jax.NamedSharding(mesh, jax.P("d")))
        with pytest.raises(Exception, match="^gram: .*illegally sharded"):
            jax.jit(jax_tcgemm.gram)(x)
        got = jax.jit(lambda x: jax_tcgemm.gram(x, out_sharding=jax.P("d", None)))(x)
        assert got.sharding.spec == jax.P("d", None)
        close(got, exact(x))

        def loss(x):
            return jnp.sum(jax_tcgemm.gram(x, out_sharding=jax.P("d", None)) ** 2)

        gradient = jax.jit(jax.grad(loss))(x)
        assert gradient.sharding.spec == jax.P("d", None)
        close(gradient, 4 * exact(x) @ np.asarray(x, np.float64))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"x": jnp.ones(3)}, "x must have two dimensions or more"),
        ({"x": "x"}, "x must be"),
        ({"beta": 1.0}, "beta must be 0 without c"),
        ({"c": jnp.ones((4, 4)), "beta": 1.0}, "c must have the shape of the result"),
        ({"alpha": jnp.ones(2)}, "alpha must be a number or a 0-D array"),
        ({"transpose": 3}, "transpose must be"),
        ({"implementation": "magic"}, "implementation must be"),
    ],
)
def test_errors(given, says):
    with pytest.raises((TypeError, ValueError), match=f"^gram: {says}"):
        jax_tcgemm.gram(given.pop("x", jnp.ones((3, 4))), **given)
