"""Fused layers on a GPU beside JAX in float64, forwards and backwards, and what they save."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm.problem.activations import ACTIVATIONS, canonical_activation

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [None, "wgmma", "mma_sync"])
# Aligned, odd everywhere, and fewer rows than a tile.
SHAPES = pytest.mark.parametrize(
    ("rows", "k", "hidden", "n"),
    [(512, 256, 384, 256), (333, 136, 200, 72), (5, 64, 520, 64)],
    ids=["aligned", "odd", "few_rows"],
)


def draw(shapes, dtype):
    """Inputs of order 1, and weights that keep them so."""
    rng = np.random.default_rng(3)
    scale = {name: shape[0] ** -0.5 if name in ("up", "down") else 1.0 for name, shape in shapes}
    return {
        name: jnp.asarray(rng.standard_normal(shape) * scale[name], dtype) for name, shape in shapes
    }


def exact(f, *args):
    """The value of an expression in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        args = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), args)
        return jax.tree.map(np.asarray, f(*args))


def assert_near(got, expected, roundings):
    """Within some bfloat16 roundings of the largest element; a wrong element is far outside."""

    def check(x, y):
        x = np.asarray(x, np.float64)
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=roundings * 2**-8 * np.abs(y).max())

    jax.tree.map(check, got, expected)


def block(x, params, residual, *, activation):
    f = ACTIVATIONS[canonical_activation("test", activation)]
    z = jnp.tensordot(x, params["up"], 1) + params["up_bias"]
    h = f(z) if z.ndim == 2 else f(z[:, 0]) * z[:, 1]
    return h @ params["down"] + params["down_bias"] + residual


def arguments(rows, k, hidden, n, gated):
    pair = (2,) if gated else ()
    shapes = [("x", (rows, k)), ("up", (k, *pair, hidden)), ("up_bias", (*pair, hidden))]
    shapes += [("down", (hidden, n)), ("down_bias", (n,)), ("residual", (rows, n))]
    given = draw(shapes, jnp.bfloat16)
    x, residual = given.pop("x"), given.pop("residual")
    return x, given, residual


@IMPLEMENTATIONS
@SHAPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(activation, rows, k, hidden, n, implementation):
    x, params, _ = arguments(rows, k, hidden, n, gated=False)
    residual = jnp.flip(draw([("r", (rows, hidden))], jnp.bfloat16)["r"], 0)
    f = functools.partial(jax_tcgemm.linear, activation=activation, implementation=implementation)
    got = jax.jit(lambda *a: f(*a[:3], residual=a[3]))(x, params["up"], params["up_bias"], residual)

    def expected(x, w, bias, residual):
        return ACTIVATIONS[activation](x @ w + bias) + residual

    # A kernel rounds once. XLA, which may run what is left to the choice, rounds each operation.
    roundings = 1 if implementation else 3
    assert_near(got, exact(expected, x, params["up"], params["up_bias"], residual), roundings)


@IMPLEMENTATIONS
@SHAPES
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_block_and_its_gradients(activation, gated, rows, k, hidden, n, implementation):
    args = arguments(rows, k, hidden, n, gated)
    cotangent = jnp.flip(args[2], 0)

    def run(f, *args):
        out, pull = jax.vjp(f, *args[:-1])
        return out, pull(args[-1].astype(out.dtype))

    def ours(x, params, residual):
        return jax_tcgemm.mlp(
            x, params, activation=activation, residual=residual, implementation=implementation
        )

    got = jax.jit(functools.partial(run, ours))(*args, cotangent)
    expected = exact(
        functools.partial(run, functools.partial(block, activation=activation)), *args, cotangent
    )
    assert_near(got, expected, 4)


@pytest.mark.parametrize("pair", [False, True], ids=["array", "pair"])
def test_gated_weights_are_not_copied(pair, gpu):
    x = jnp.ones((512, 256), jnp.bfloat16)
    gate, up = (jnp.full((256, 384), v, jnp.bfloat16) for v in (0.5, 0.25))
    weights = (gate, up) if pair else jnp.stack((gate, up), 1)
    compiled = jax.jit(jax_tcgemm.gated_linear).lower(x, weights).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="tcgemm_gemm"') == 1
    assert " copy(" not in text
    assert " transpose(" not in text
    # silu(256 / 2) * 256 / 4 is exact in bfloat16.
    np.testing.assert_array_equal(np.asarray(compiled(x, weights), np.float32), 128 * 64)


def test_gradients_accumulate_in_place(gpu):
    x, params, _ = arguments(512, 256, 384, 256, gated=True)
    buffers = {name: jnp.full(params[name].shape, 0.5, jnp.float32) for name in ("up", "down")}

    def value(buffers, x):
        out = jax_tcgemm.mlp(x, params, activation="silu", accumulate=buffers)
        return jnp.sum(out.astype(jnp.float32))

    def expected(x, params, residual):
        loss = lambda p: jnp.sum(block(x, p, residual, activation="silu"))  # noqa: E731
        gradient = jax.grad(loss)(params)
        return {name: gradient[name] + 0.5 for name in ("up", "down")}

    wanted = exact(expected, x, params, jnp.zeros((512, 256)))
    compiled = jax.jit(jax.grad(value), donate_argnums=0).lower(buffers, x).compile()
    nbytes = sum(b.nbytes for b in buffers.values())
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes
    assert_near(compiled(buffers, x), wanted, 4)


def test_a_block_is_six_calls_and_needs_less_memory_than_the_expression(gpu):
    args = arguments(2048, 1024, 4096, 1024, gated=True)

    def step(f, derivative=jax.grad):
        def loss(x, params, residual):
            return jnp.sum(f(x, params, residual).astype(jnp.float32))

        return jax.jit(derivative(loss, (0, 1)))

    def ours(x, params, residual):
        return jax_tcgemm.mlp(x, params, activation="silu", residual=residual)

    calls = jax_tcgemm.explain(step(ours, jax.value_and_grad), *args)
    assert len(calls) == 6
    assert "xla" not in {call.implementation for call in calls}
    sizes = [
        step(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for f in (ours, functools.partial(block, activation="silu"))
    ]
    assert sizes[0] <= sizes[1]
