"""Grouped products that train in 8 bits: values, gradients, what they keep and what runs them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from random_arrays import normal
from test_fp8_dot_general import near, rounded

import jax_tcgemm
from jax_tcgemm import Fp8RaggedDot

RECIPES = {
    "current": ({}, {"axis": (1, 2)}),
    "block128": ({"block": (1, 128)}, {"block": (128, 128)}),
}
M, K, N = 300, 256, 136
SIZES = np.array([100, 0, 7, 150], np.int32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients(recipe):
    """Exactly the products of operands that are quantized along what each of them contracts."""
    x, w, g = normal(M, K), normal(4, K, N, seed=1), normal(M, N, seed=2)
    w = w * jnp.array([1.0, 1.0, 100.0, 0.01])[:, None, None]
    of_rows, of_matrices = RECIPES[recipe]
    product = Fp8RaggedDot(recipe)
    out, pullback = jax.vjp(lambda x, w: product(x, w, SIZES), x, w)
    x_bar, w_bar = pullback(g)
    # Rows of no group count as zeros.
    x, g = (each.at[SIZES.sum() :].set(0) for each in (x, g))
    matrices = rounded(w, **of_matrices)
    near(out, reference.rows(rounded(x, **of_rows), matrices, SIZES))
    near(product(x, w, SIZES), np.asarray(out, np.float64))
    near(x_bar, reference.rows(rounded(g, **of_rows), matrices.swapaxes(1, 2), SIZES))
    columns = [rounded(each.T, **of_rows).T for each in (x, g)]
    near(w_bar, reference.contraction(*columns, SIZES))
    exact = jax.vjp(lambda w: jax.lax.ragged_dot(x, w, SIZES), w)[1](g)[0]
    assert jnp.linalg.norm(w_bar - exact) < 0.1 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("offset", [None, 1])
def test_rows_of_no_group_count_as_zeros(recipe, padding, offset):
    """Neither they nor their cotangents are part of a scale, nor of blocks with other rows."""
    first, last = (0 if offset is None else SIZES[0]), SIZES.sum()
    row = np.arange(M)[:, None]
    is_there = (row >= first) & (row < last)
    x, g = (np.asarray(a) for a in (normal(M, K), normal(M, N, seed=2)))
    w = normal(4 - (offset or 0), K, N, seed=1)
    product = Fp8RaggedDot(recipe)

    def both(x, g):
        f = lambda x, w: product(x, w, SIZES, group_offset=offset)  # noqa: E731
        out, pullback = jax.vjp(f, x, w)
        return out, *pullback(g)

    found = both(*(jnp.where(is_there, a, padding) for a in (x, g)))
    expected = both(*(jnp.where(is_there, a, 0) for a in (x, g)))
    exact = reference.rows(np.where(is_there, x, 0), w, SIZES, offset or 0)
    assert np.linalg.norm(found[0] - exact) < 0.1 * np.linalg.norm(exact)
    gradient = reference.contraction(*(np.where(is_there, a, 0) for a in (x, g)), SIZES)[
        offset or 0 :
    ]
    assert np.linalg.norm(found[2] - gradient) < 0.1 * np.linalg.norm(gradient)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_offset_and_dtypes():
    x, w = normal(M, K, dtype="bfloat16"), normal(2, K, N, seed=1)
    product = Fp8RaggedDot("block128")

    def f(x, w):
        return product(x, w, SIZES, None, "bfloat16", 2)

    out, pullback = jax.vjp(f, x, w)
    assert out.dtype == jnp.bfloat16
    assert not np.asarray(out, np.float32)[:100].any()
    exact = jax.lax.ragged_dot(x, jnp.concatenate([0 * w, w]), SIZES)
    near(out, np.asarray(exact, np.float64), 0.1)
    x_bar, w_bar = pullback(out)
    assert (x_bar.dtype, w_bar.dtype, w_bar.shape) == (jnp.bfloat16, jnp.float32, w.shape)
    near(w_bar, reference.contraction(x, out, SIZES)[2:], 0.15)


def test_products_of_a_step_are_of_8_bits():
    types = [
        jax.ShapeDtypeStruct(*x)
        for x in (((8192, 1024), jnp.bfloat16), ((8, 1024, 2048), jnp.float32), ((8,), jnp.int32))
    ]

    def loss(x, w, sizes):
        y = Fp8RaggedDot("block128")(x, w, sizes, None, jnp.bfloat16)
        return (y.astype(jnp.float32) ** 2).sum()

    found = jax_tcgemm.explain(jax.grad(loss, (0, 1)), *types, platform="cuda")
    products = [call for call in found if "groups" in str(call.problem)]
    assert [call.problem.form for call in products] == ["rows", "rows", "contraction"]
    for call in products:
        assert (call.implementation, call.problem.in_dtype) == ("wgmma", "f8e4m3fn")


def test_what_is_kept_is_of_8_bits():
    x, w = normal(M, K), normal(4, K, N, seed=1)
    policy = jax.checkpoint_policies.save_only_these_names("fp8_operands")
    f = jax.checkpoint(lambda x, w: Fp8RaggedDot()(x, w, SIZES).sum(), policy=policy)
    _, pullback = jax.vjp(f, x, w)
    kept = [
        a for a in jax.tree.leaves(pullback) if a.ndim > 1 and a.shape not in (x.shape, w.shape)
    ]
    assert {(a.shape, a.dtype.itemsize) for a in kept if a.size >= M * K} == {((K, M), 1)}
    whole = [a for a in jax.tree.leaves(pullback) if a.shape == w.shape and a.dtype.itemsize == 1]
    assert len(whole) == 1


def test_bad_input():
    x, w = normal(M, K), normal(4, K, N, seed=1)
    with pytest.raises(ValueError, match="^Fp8RaggedDot: recipe must be current or block128, got"):
        Fp8RaggedDot("delayed")
    with pytest.raises(TypeError, match="^Fp8RaggedDot: lhs must be of a real floating-point"):
        Fp8RaggedDot()(x.astype(int), w, SIZES)
    with pytest.raises(ValueError, match="^Fp8RaggedDot: rhs must have 3 dimensions"):
        Fp8RaggedDot()(x, w[0], SIZES)
    with pytest.raises(ValueError, match="^Fp8RaggedDot: group_sizes must have one dimension, got"):
        Fp8RaggedDot()(x, w, SIZES[None])
    with pytest.raises(ValueError, match="^ragged_dot: rhs must have shape"):
        Fp8RaggedDot()(x, w[:, 1:], SIZES)
