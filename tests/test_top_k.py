"""`linear_top_k`: the largest logits, beside `lax.top_k` of all of them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import draw

import jax_tcgemm

TOKENS, DEPTH, VOCABULARY = 19, 24, 301
# Of float64: 64 columns, and as many tokens as there are.
SMALL = 64 * TOKENS * 8


def operands(dtype="float64", vocabulary=VOCABULARY, seed=0):
    x, w = draw((TOKENS, DEPTH), dtype, seed), draw((vocabulary, DEPTH), dtype, seed + 1)
    return x, w, draw((vocabulary,), dtype, seed + 2)


def reference(x, w, k, bias=None, soft_cap=None):
    z = x @ w.T + (0 if bias is None else bias)
    return lax.top_k(z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap), k)


@pytest.mark.parametrize(("vocabulary", "k"), [(301, 7), (301, 100), (320, 1), (64, 64), (1, 1)])
@pytest.mark.parametrize("chunk_bytes", [None, SMALL, 1], ids=["one chunk", "chunks", "least"])
def test_values_and_indices(vocabulary, k, chunk_bytes, x64):
    x, w, _ = operands(vocabulary=vocabulary)
    f = functools.partial(jax_tcgemm.linear_top_k, k=k, chunk_bytes=chunk_bytes)
    values, indices = jax.jit(f)(x, w)
    expected = reference(x, w, k)
    assert indices.dtype == jnp.int32
    np.testing.assert_allclose(values, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(indices, expected[1])


@pytest.mark.parametrize("vocabulary_axis", [0, 1])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_bias_cap_and_kernels_of_heads(vocabulary_axis, soft_cap, x64):
    x, w, bias = operands()
    expected = reference(x, w, 9, bias, soft_cap)
    values, indices = jax_tcgemm.linear_top_k(
        *(x.reshape(1, TOKENS, DEPTH), w.T if vocabulary_axis else w, 9),
        **{"bias": bias, "soft_cap": soft_cap, "chunk_bytes": SMALL},
        vocabulary_axis=vocabulary_axis,
    )
    np.testing.assert_allclose(values[0], expected[0], rtol=1e-12)
    np.testing.assert_array_equal(indices[0], expected[1])


# Values of one dtype times integers are exact, and so is their order.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype):
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.integers(-4, 5, shape), dtype) for shape in ((19, 24), (301, 24)))
    values, indices = jax_tcgemm.linear_top_k(x, w, 20, chunk_bytes=64 * 19 * 4)
    expected = lax.top_k(x.astype("float32") @ w.T.astype("float32"), 20)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(indices, expected[1])


def test_of_equal_logits_the_first_ones():
    x, w = jnp.ones((3, DEPTH)), jnp.zeros((VOCABULARY, DEPTH)).at[jnp.array([70, 200, 290])].set(1)
    values, indices = jax_tcgemm.linear_top_k(x, w, 70, chunk_bytes=1)
    np.testing.assert_array_equal(indices, np.tile([70, 200, 290, *range(67)], (3, 1)))
    np.testing.assert_array_equal(values[:, 3:], 0)
    bias = jnp.full(VOCABULARY, -jnp.inf).at[300].set(0.0)
    values, indices = jax_tcgemm.linear_top_k(x, w, 4, bias=bias, chunk_bytes=1)
    np.testing.assert_array_equal(indices, np.tile([300, 0, 1, 2], (3, 1)))
    np.testing.assert_array_equal(values[:, 1:], -np.inf)


def test_nan_is_larger_than_all_else():
    x, w, _ = operands("float32")
    w = w.at[250, 3].set(jnp.nan)
    values, indices = jax_tcgemm.linear_top_k(x, w, 5, chunk_bytes=64 * TOKENS * 4)
    expected = lax.top_k(jnp.matmul(x, w.T), 5)
    np.testing.assert_array_equal(indices[:, 0], 250)
    assert np.all(np.isnan(values[:, 0]))
    np.testing.assert_array_equal(indices, expected[1])


@pytest.mark.parametrize(
    ("vocabulary_axis", "chunk_bytes", "soft_cap"),
    [(0, SMALL, None), (1, SMALL, 3.0), (0, None, 3.0)],
)
def test_derivatives(vocabulary_axis, chunk_bytes, soft_cap, x64):
    x, w, bias = operands()
    weights = draw((TOKENS, 9), "float64", 8)

    def total(f, x, w, bias):
        return jnp.vdot(weights, f(x, w, bias)[0])

    def ours(x, w, bias):
        w = w.T if vocabulary_axis else w
        how = {"soft_cap": soft_cap, "vocabulary_axis": vocabulary_axis, "chunk_bytes": chunk_bytes}
        return jax_tcgemm.linear_top_k(x, w, 9, bias=bias, **how)

    def plain(x, w, bias):
        return reference(x, w, 9, bias, soft_cap)

    arguments = x, w, bias
    for moving in ((0, 1, 2), (0,), (1,)):
        found, expected = (
            jax.jit(jax.grad(functools.partial(total, f), moving))(*arguments)
            for f in (ours, plain)
        )
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    tangents = tuple(draw(a.shape, "float64", 20 + i) for i, a in enumerate(arguments))
    found, expected = (
        jax.jvp(lambda *given, f=f: f(*given)[0], arguments, tangents)[1] for f in (ours, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_second_derivatives(x64):
    x, w, _ = operands()
    weights, tangents = draw((TOKENS, 9), "float64", 8), (w[:TOKENS], w[::-1])

    def second(f):
        def total(x, w):
            return jnp.vdot(weights, f(x, w, 9, soft_cap=3.0)[0])

        return jax.jvp(jax.grad(total, (0, 1)), (x, w), tangents)[1]

    for a, b in zip(second(jax_tcgemm.linear_top_k), second(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_many_chosen_ones_are_differentiated_by_chunks(x64):
    x, w, _ = operands()
    weights = draw((TOKENS, 25), "float64", 8)
    bound = 10 * x.size * 8  # ten at once of 25

    def total(x, w):
        return jnp.vdot(weights, jax_tcgemm.linear_top_k(x, w, 25, chunk_bytes=bound)[0])

    found = jax.grad(total, (0, 1))(x, w)
    expected = jax.grad(lambda x, w: jnp.vdot(weights, reference(x, w, 25)[0]), (0, 1))(x, w)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_under_vmap(x64):
    x, w, _ = operands()
    many = jnp.stack([x, 2 * x, x[::-1]])
    f = functools.partial(jax_tcgemm.linear_top_k, k=6, chunk_bytes=SMALL)
    values, indices = jax.vmap(f, (0, None))(many, w)
    for i in range(3):
        expected = reference(many[i], w, 6)
        np.testing.assert_allclose(values[i], expected[0], rtol=1e-12)
        np.testing.assert_array_equal(indices[i], expected[1])


def test_nothing_has_the_size_of_the_logits():
    tokens, vocabulary, k = 2048, 16384, 8
    x, w = jnp.ones((tokens, 64)), jnp.ones((vocabulary, 64))

    def largest(chunk_bytes):
        f = functools.partial(jax_tcgemm.linear_top_k, k=k, chunk_bytes=chunk_bytes)
        text = jax.jit(f).lower(x, w).compile().as_text()
        sizes = re.findall(r"(?:f32|s32|pred)\[([\d,]+)\]", text)
        return max(np.prod([int(n) for n in size.split(",")]) for size in sizes)

    assert largest(None) >= tokens * vocabulary
    assert largest(1 << 22) <= max(w.size, 1 << 20)


def test_no_tokens():
    values, indices = jax_tcgemm.linear_top_k(jnp.zeros((0, 4)), jnp.ones((9, 4)), 3)
    assert values.shape == indices.shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": 0}, "k must be from 1 up to the vocabulary, 301, got k=0"),
        ({"k": 302}, "k must be from 1 up to the vocabulary, 301, got k=302"),
        ({"k": 1.5}, "k must be an integer, got k of type float"),
        ({"w": jnp.ones((DEPTH, 301))}, "x and w must have shapes (..., k) and (vocabulary, k)"),
        ({"soft_cap": -1}, "soft_cap must be above 0 and finite, got soft_cap=-1.0"),
        ({"bias": jnp.ones(3)}, "bias must have a number for each entry of the vocabulary, shape"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(change, says):
    x, w, _ = operands("float32")
    with pytest.raises((TypeError, ValueError), match=re.escape(f"linear_top_k: {says}")):
        jax_tcgemm.linear_top_k(**{"x": x, "w": w, "k": 3} | change)


@pytest.mark.parametrize("k", [5, 60])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_of_a_divided_vocabulary(k, soft_cap, x64):
    """k is less and more than what one device has of it."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, w, bias = operands(vocabulary=160)
    x = x[:18]
    # Equal logits on two devices, and on one.
    w = w.at[130].set(w[50]).at[51].set(w[50])
    bias = bias.at[jnp.array([50, 51, 130])].set(bias.max())
    weights = draw((18, k), "float64", 8)

    def divided(x, w, bias):
        f = functools.partial(
            jax_tcgemm.linear_top_k, k=k, soft_cap=soft_cap, axis_name="model", chunk_bytes=SMALL
        )
        specs = P("data"), P("model"), P("model")
        own = jax.shard_map(
            lambda x, w, bias: f(x, w, bias=bias),
            **{"mesh": mesh, "in_specs": specs, "out_specs": P("data")},
        )
        return own(x, w, bias)

    def plain(x, w, bias):
        return reference(x, w, k, bias, soft_cap)

    found, expected = (jax.jit(f)(x, w, bias) for f in (divided, plain))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found[1], expected[1])
    derivatives = (
        jax.jit(jax.grad(lambda *given, f=f: jnp.vdot(weights, f(*given)[0]), (0, 1, 2)))(
            x, w, bias
        )
        for f in (divided, plain)
    )
    for a, b in zip(*derivatives, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_axes_that_are_not_manual_are_refused():
    x, w, _ = operands("float32")
    with pytest.raises(ValueError, match="linear_top_k: axis_name must be a mesh axis that is man"):
        jax_tcgemm.linear_top_k(x, w, 3, axis_name="model")


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Explicit,))
    x, w, _ = operands("float32", vocabulary=304)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P("model")))
        with pytest.raises(ValueError, match="linear_top_k: w must not be sharded over explicit"):
            jax.jit(functools.partial(jax_tcgemm.linear_top_k, k=3))(x, w)
