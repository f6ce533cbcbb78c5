"""`accelerate` of programs with others inside: control flow, remat, derivatives of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import (
    EPILOGUE,
    LAYER,
    check,
    check_every_product,
    equations,
    groups,
    layer,
    names,
    num_theirs,
)
from jax import lax
from random_arrays import normal

import jax_tcgemm

# A program that is not rewritten is a warning.
pytestmark = pytest.mark.filterwarnings("error:accelerate:RuntimeWarning")


def test_control_flow():
    w = normal(8, 8) / 4

    def scanned(x, w):
        def body(x, w):
            return x + jnp.tanh(x @ w), jnp.sum(x)

        return lax.scan(body, x, w)

    def looped(x, w):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1] @ w)), (0, x))

    def branched(x, w):
        return lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ w), lambda: x)

    x, ws = normal(4, 8), jnp.stack([w, w.T, w])
    for f, args in ((scanned, (x, ws)), (looped, (x, w)), (branched, (x, w))):
        check(f, *args)
        check_every_product(f, *args)
        assert EPILOGUE in str(jax.make_jaxpr(jax_tcgemm.accelerate(f))(*args))
    step = jax.value_and_grad(lambda ws: jnp.sum(scanned(x, ws)[0] ** 2))
    check(step, ws, tolerance=1e-4)
    check_every_product(step, ws)


def test_remat():
    block = jax.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w))

    def f(x, w):
        return jnp.sum(block(block(x, w), w) ** 2)

    x, w = normal(4, 8), normal(8, 8) / 4
    for g in (f, jax.value_and_grad(f, (0, 1))):
        check(g, x, w)
        check_every_product(g, x, w)
    policy = jax.checkpoint_policies.dots_saveable

    def saved(x, w):
        return jnp.sum(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)), policy=policy)(x, w))

    # A policy still sees the primitives that it knows.
    check(saved, x, w)
    inside = str(jax.make_jaxpr(jax.grad(jax_tcgemm.accelerate(saved)))(x, w))
    outside = str(jax.make_jaxpr(jax.grad(saved))(x, w))
    assert num_theirs(inside) == num_theirs(outside)


@jax.custom_vjp
def doubling(x, w):
    return jnp.sin(x @ w)


doubling.defvjp(
    lambda x, w: (jnp.sin(x @ w), (x, w)),
    lambda kept, g: (2 * g @ kept[1].T, 2 * kept[0].T @ g),
)


@jax.custom_jvp
def halving(x, w):
    return jnp.sin(x @ w)


halving.defjvp(lambda primals, tangents: (halving(*primals), 0.5 * tangents[0] @ primals[1]))


@pytest.mark.parametrize("f", [doubling, halving])
def test_functions_with_derivatives_of_their_own(f):
    x, w = normal(4, 8), normal(8, 8)
    check(f, x, w)
    check_every_product(f, x, w)

    def total(x, w):
        return jnp.sum(f(x, w) ** 2)

    check(jax.grad(total), x, w)
    check_every_product(jax.grad(total), x, w)
    # And where it is differentiated afterwards.
    np.testing.assert_allclose(
        jax.grad(jax_tcgemm.accelerate(total))(x, w), jax.grad(total)(x, w), rtol=1e-5, atol=1e-5
    )


@jax.custom_vjp
def scaled_gelu(x, w, scale):
    return jax.nn.gelu(x @ w) * scale


def scaled_gelu_forward(x, w, scale):
    z = x @ w
    return jax.nn.gelu(z) * scale, (x, w, z, scale)


def scaled_gelu_backward(kept, g):
    x, w, z, scale = kept
    dz = jax.vjp(jax.nn.gelu, z)[1](g * scale)[0]
    return jnp.tanh(dz @ w.T), x.T @ dz, None


scaled_gelu.defvjp(scaled_gelu_forward, scaled_gelu_backward)


def test_derivatives_that_are_taken_later_are_accelerated():
    args = normal(4, 8), normal(8, 8), 2.0

    def total(x, w, scale):
        return jnp.sum(scaled_gelu(x, w, scale) ** 2)

    gradient = jax.grad(jax_tcgemm.accelerate(total), (0, 1))
    for run in (gradient, jax.jit(gradient)):
        got, expected = run(*args), jax.grad(total, (0, 1))(*args)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * abs(b).max())
    text = str(jax.make_jaxpr(gradient)(*args))
    assert not num_theirs(text)
    # Gelu and its argument of the first one, tanh of the gradient of x.
    assert text.count(f" {EPILOGUE}[") == 2
    second = jax.grad(lambda x, w: jnp.sum(gradient(x, w, 2.0)[0] ** 2), (0, 1))(*args[:2])
    expected = jax.grad(lambda x, w: jnp.sum(jax.grad(total)(x, w, 2.0) ** 2), (0, 1))(*args[:2])
    for a, b in zip(second, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(b).max())


def test_activations_keep_their_derivatives():
    """relu has half of none of it at zero."""

    def f(x, w):
        return jnp.sum(jax.nn.relu(x @ w))

    x, w = jnp.zeros((4, 8)), normal(8, 8)
    (eqn,) = groups(lambda x, w: jax.nn.relu(x @ w), x, w)
    assert names(eqn.params["function"]) == ["custom_jvp_call"]
    got = jax.grad(jax_tcgemm.accelerate(f))(x, w)
    np.testing.assert_array_equal(got, jax.grad(f)(x, w))


def test_transformations_around_it():
    fast = jax_tcgemm.accelerate(layer)
    x, w, bias, residual = LAYER
    for argnums in (0, 1, 2, 3):
        got, expected = (
            jax.grad(lambda *args, f=f: jnp.sum(f(*args) ** 2), argnums)(*LAYER)
            for f in (fast, layer)
        )
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    stacked = jnp.stack([x, 2 * x])
    for f in (jax.vmap, lambda f, *how: jax.jit(jax.vmap(f, *how))):
        got, expected = (
            f(g, (0, None, None, None))(stacked, w, bias, residual) for g in (fast, layer)
        )
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    got, expected = (jax.jvp(f, LAYER, LAYER) for f in (fast, layer))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)
    check(lambda *args: fast(*args) + 1, *LAYER)  # and inside of itself
    check(jax.jit(layer), *LAYER)
    check(jax.vmap(layer, (0, None, None, None)), stacked, w, bias, residual)


def test_donation_is_kept():
    @functools.partial(jax.jit, donate_argnums=0)
    def inner(x, w):
        return jnp.sin(x @ w)

    x, w = normal(8, 8), normal(8, 8)
    (eqn,) = equations(inner, x, w)
    assert eqn.primitive.name == "jit"
    assert eqn.params["donated_invars"] == (True, False)
    assert eqn.params["name"] == "inner"


def test_effects_stay_as_they_are():
    seen = []

    def f(x, w):
        jax.debug.callback(lambda x: seen.append(("before", float(x))), x[0, 0], ordered=True)
        z = x @ w
        y = jnp.sin(z)
        jax.debug.callback(lambda z: seen.append(("between", float(z))), z[0, 0], ordered=True)
        out = y @ w + 1
        jax.debug.callback(lambda z: seen.append(("after", float(z))), out[0, 0], ordered=True)
        return out

    x = jnp.eye(4)
    check(f, x, x)
    jax.effects_barrier()
    assert len(seen) == 9
    assert seen[:3] == seen[3:6] == seen[6:]
    assert [name for name, _ in seen[:3]] == ["before", "between", "after"]


def test_ragged_products():
    sizes = jnp.array([2, 4], jnp.int32)

    def f(x, w):
        return jnp.sum(jax.nn.relu(lax.ragged_dot(x, w, sizes)) ** 2)

    args = normal(6, 5), normal(2, 5, 4)
    for g in (f, jax.grad(f, (0, 1))):
        check(g, *args, tolerance=1e-4)
        text = str(jax.make_jaxpr(jax_tcgemm.accelerate(g))(*args))
        assert "tcgemm_ragged_dot" in text
        assert " ragged_dot_general[" not in text
