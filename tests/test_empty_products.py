"""FP8 layers, losses and the largest logits of no rows, no features or no columns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import Fp8DotGeneral, Fp8Mlp, Fp8RaggedDot, Fp8RaggedMlp, quantize
from jax_tcgemm.quantization.flax import DelayedFp8DotGeneral

NN = (((1,), (0,)), ((), ()))
SHAPES = [(0, 8, 4), (4, 0, 4), (4, 8, 0), (0, 0, 0)]
RECIPES = pytest.mark.parametrize("recipe", ["current", "block128"])


def check_zeros(f, *args):
    """Results and gradients have the shapes of what they are of and are zero throughout."""
    out, pullback = jax.vjp(f, *args)
    np.testing.assert_array_equal(f(*args), np.zeros(out.shape))
    np.testing.assert_array_equal(jax.jit(f)(*args), np.zeros(out.shape))
    gradients = pullback(jnp.ones_like(out))
    for x, own in zip(jax.tree.leaves(args), jax.tree.leaves(gradients), strict=True):
        assert (own.dtype, own.shape) == (x.dtype, x.shape)
        assert not np.asarray(own).any()
    return out


@RECIPES
@pytest.mark.parametrize("shape", SHAPES)
def test_dot_general(recipe, shape):
    m, k, n = shape
    f = lambda x, w: Fp8DotGeneral(recipe)(x, w, NN)  # noqa: E731
    assert check_zeros(f, normal(m, k), normal(k, n)).shape == (m, n)
    batched = lambda x, w: Fp8DotGeneral(recipe)(x, w, (((2,), (1,)), ((0,), (0,))))  # noqa: E731
    assert check_zeros(batched, normal(0, 5, 8), normal(0, 8, 3)).shape == (0, 5, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_delayed_scaling(shape):
    m, k, n = shape
    product, x, w = DelayedFp8DotGeneral(amax_history_length=4), normal(m, k), normal(k, n)
    variables = product.init(jax.random.key(0), x, w, NN)
    f = functools.partial(product.apply, dimension_numbers=NN)
    out, pullback = jax.vjp(lambda v, x, w: f(v, x, w), variables, x, w)
    np.testing.assert_array_equal(out, np.zeros((m, n)))
    state, *gradients = pullback(out)
    assert [g.shape for g in gradients] == [x.shape, w.shape]
    assert not any(np.asarray(g).any() for g in gradients)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(state))


@RECIPES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hidden", [16, 0])
def test_mlp(recipe, shape, hidden):
    m, k, n = shape
    params = {"up": normal(k, 2, hidden), "down": normal(hidden, n)}
    f = lambda x, params: Fp8Mlp(recipe)(x, params)  # noqa: E731
    assert check_zeros(f, normal(2, m, k), params).shape == (2, m, n)


@RECIPES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", [3, 0])
def test_groups(recipe, shape, groups):
    m, k, n = shape
    sizes = jnp.array([m, 0, 0][:groups], jnp.int32)
    f = lambda x, w: Fp8RaggedDot(recipe)(x, w, sizes)  # noqa: E731
    assert check_zeros(f, normal(m, k), normal(groups, k, n)).shape == (m, n)
    for hidden in (16, 0):
        params = {"up": normal(groups, k, 2, hidden), "down": normal(groups, hidden, n)}
        f = lambda x, params: Fp8RaggedMlp(recipe)(x, params, sizes)  # noqa: E731
        assert check_zeros(f, normal(m, k), params).shape == (m, n)


def test_scales_of_nothing():
    for x, axis, shape in (((0, 3), None, (1, 1)), ((2, 0), -1, (2, 1)), ((0, 3), 0, (1, 3))):
        found = quantize(jnp.ones(x), axis=axis, with_transpose=False)
        assert found.shape == x
        np.testing.assert_array_equal(found.scale, np.full(shape, np.finfo(np.float32).tiny))


# --- losses -----------------------------------------------------------------------------------


def expected_losses(x, w, bias, labels):
    """Losses of tokens in float64, of whole logits."""
    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(bias, np.float64)
    lse = np.log(np.exp(z).sum(-1))
    return lse - np.take_along_axis(z, np.asarray(labels)[..., None], -1)[..., 0]


@pytest.mark.parametrize("tokens", [4, 0])
@pytest.mark.parametrize("features", [8, 0])
@pytest.mark.parametrize("chunk_bytes", [None, 1], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("vocabulary_axis", [0, 1])
def test_losses(tokens, features, chunk_bytes, vocabulary_axis):
    """Of no features logits are the bias; of no tokens sums are 0."""
    x, w, bias = normal(2, tokens, features), normal(70, features, seed=1), normal(70, seed=2)
    labels = jnp.asarray(np.random.default_rng(0).integers(0, 70, (2, tokens)), jnp.int32)
    w = w.T if vocabulary_axis else w
    how = {"chunk_bytes": chunk_bytes, "vocabulary_axis": vocabulary_axis}
    exact = expected_losses(x, w.T if vocabulary_axis else w, bias, labels)
    z = np.asarray(x, np.float64) @ np.asarray(w if vocabulary_axis else w.T, np.float64)
    p = np.exp(z + np.asarray(bias, np.float64))
    p /= p.sum(-1, keepdims=True)
    of_bias = (p - np.eye(70)[np.asarray(labels)]).reshape(-1, 70).sum(0)

    def loss(own, x, w, bias):
        return jax_tcgemm.linear_cross_entropy(x, w, labels, bias=bias, **own)

    for reduction in ("sum", "mean", "none"):
        for recompute in (False, True):
            own = how | {"reduction": reduction, "recompute": recompute}
            out, pullback = jax.vjp(functools.partial(loss, own), x, w, bias)
            number = max(1, exact.size) if reduction == "mean" else 1
            expected = exact if reduction == "none" else exact.sum() / number
            np.testing.assert_allclose(out, expected, rtol=1e-5)
            gradients = pullback(jnp.ones_like(out))
            assert [g.shape for g in gradients] == [a.shape for a in (x, w, bias)]
            np.testing.assert_allclose(gradients[2], of_bias / number, atol=1e-5)

    def log_prob(x, w, bias):
        own = {"bias": bias, "with_entropy": True, **how}
        return jax_tcgemm.linear_log_prob(x, w, labels, **own)

    (found, entropy), pullback = jax.vjp(log_prob, x, w, bias)
    np.testing.assert_allclose(found, -exact, rtol=1e-5)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)
    gradients = pullback((jnp.ones_like(found), jnp.zeros_like(entropy)))
    np.testing.assert_allclose(gradients[2], -of_bias, atol=1e-5)


@pytest.mark.parametrize("tokens", [4, 0])
@pytest.mark.parametrize("features", [8, 0])
@pytest.mark.parametrize("chunk_bytes", [None, 1], ids=["one chunk", "chunks"])
def test_top_k(tokens, features, chunk_bytes):
    x, w, bias = normal(2, tokens, features), normal(70, features, seed=1), normal(70, seed=2)

    def f(x, w, bias):
        return jax_tcgemm.linear_top_k(x, w, 5, bias=bias, chunk_bytes=chunk_bytes)

    z = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T + np.asarray(bias, np.float64)
    expected = np.argsort(-z, -1, kind="stable")[..., :5]
    (values, indices), pullback = jax.vjp(f, x, w, bias)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(values, np.take_along_axis(z, expected, -1), rtol=1e-5)
    zeros = np.zeros(indices.shape, jax.dtypes.float0)
    of_bias = pullback((jnp.ones_like(values), zeros))[2]
    np.testing.assert_array_equal(of_bias, np.bincount(expected.ravel(), minlength=70))
