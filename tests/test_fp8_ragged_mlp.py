"""Experts' feed-forward blocks that train in 8 bits: values, gradients, what runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from random_arrays import normal
from test_fp8_dot_general import rounded
from test_fp8_mlp import near

import jax_tcgemm
from jax_tcgemm import Fp8RaggedDot, Fp8RaggedMlp

RECIPES = "current", "block128"
M, K, N = 300, 256, 192
SIZES = np.array([100, 0, 7, 150], np.int32)


def block(hidden=256, groups=4, dtype="float32"):
    """x and params, of experts that are of different sizes."""
    x, size = normal(M, K, dtype=dtype), jnp.array([1.0, 1.0, 30.0, 0.1])[-groups:, None, None]
    up = normal(groups, K, 2, hidden, seed=1) / 16 * size[..., None]
    down = normal(groups, hidden, N, seed=2) / 16
    return x, {"up": up.astype(dtype), "down": down.astype(dtype)}


def by_layers(recipe, **how):
    """The same of `Fp8RaggedDot`, what lies between the products being JAX's."""
    product = Fp8RaggedDot(recipe)

    def f(x, params):
        groups, k, _, hidden = params["up"].shape
        both = product(x, params["up"].reshape(groups, k, -1), SIZES, **how)
        h = jax.nn.silu(both[:, :hidden]) * both[:, hidden:]
        return product(h, params["down"], SIZES, **how)

    return f


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hidden", [256, 200])
def test_values_and_gradients(recipe, hidden):
    """Those of the layers, but for what 8 bits round to a neighbor."""
    arguments, g = block(hidden), normal(M, N, seed=4)

    def ours(x, params):
        return Fp8RaggedMlp(recipe)(x, params, SIZES, activation="silu")

    out, pullback = jax.vjp(jax.jit(ours), *arguments)
    expected, pull_back = jax.vjp(by_layers(recipe), *arguments)
    near(out, expected, 1e-3)
    assert not np.asarray(out)[SIZES.sum() :].any()
    pairs = zip(*map(jax.tree.leaves, (pullback(g), pull_back(g))), strict=True)
    for got, wanted in pairs:
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        near(got, wanted, 5e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("padding", [np.nan, 1e30])
def test_rows_of_no_group_count_as_zeros(recipe, padding):
    """Neither they nor their cotangents are part of a scale, nor of blocks with other rows."""
    (x, params), g = block(), normal(M, N, seed=4)
    is_there = np.arange(M)[:, None] < SIZES.sum()

    def both(x, g):
        f = functools.partial(Fp8RaggedMlp(recipe), group_sizes=SIZES, activation="silu")
        out, pullback = jax.vjp(f, x, params)
        return out, *pullback(g)

    found, expected = (
        jax.tree.leaves(both(*(jnp.where(is_there, a, own) for a in (x, g))))
        for own in (padding, 0)
    )
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(a).all()
        assert np.asarray(a).any()
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_values_of_dequantized_operands():
    """In float64: 8 bits alone are lost."""
    x, params = block()
    of_rows, of_matrices = {"block": (1, 128)}, {"block": (128, 128)}
    up = rounded(params["up"].reshape(4, K, -1), **of_matrices)
    gate, up = np.split(reference.rows(rounded(x, **of_rows), up, SIZES), 2, axis=1)
    h = jnp.asarray(gate / (1 + np.exp(-gate)) * up, jnp.float32)
    down = rounded(params["down"], **of_matrices)
    expected = reference.rows(rounded(h, **of_rows), down, SIZES)
    near(Fp8RaggedMlp("block128")(x, params, SIZES, activation="silu"), expected, 1e-3)


@pytest.mark.parametrize("activation", ["gelu", None, "relu"])
def test_near_the_exact_blocks(activation):
    """Of groups from an offset on, in bfloat16."""
    x, params = block(groups=2, dtype="bfloat16")

    def exact(x, params):
        h = jax_tcgemm.gated_ragged_linear(x, params["up"], SIZES, activation, group_offset=2)
        return jax_tcgemm.ragged_dot(h, params["down"], SIZES, group_offset=2)

    def ours(x, params):
        how = {"activation": activation, "group_offset": 2}
        return Fp8RaggedMlp("block128")(x, params, SIZES, **how)

    loss = lambda f, *arguments: jnp.vdot(normal(M, N, seed=4), f(*arguments))  # noqa: E731
    got, expected = (jax.grad(functools.partial(loss, f), (0, 1))(x, params) for f in (ours, exact))
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert (a.dtype, a.shape) == (jnp.bfloat16, b.shape)
        near(a, b, 0.2)


def test_what_is_kept_under_remat_is_of_8_bits():
    x, params = block()
    policy = jax.checkpoint_policies.save_only_these_names("fp8_operands")
    f = lambda params: jnp.sin(Fp8RaggedMlp()(x, params, SIZES)).sum()  # noqa: E731
    _, pullback = jax.vjp(jax.checkpoint(f, policy=policy), params)
    kept = [a for a in jax.tree.leaves(pullback) if a.size >= M * N and a.dtype.itemsize == 1]
    assert {a.shape for a in kept} == {(K, M), (4, K, 512), (256, M), (4, 256, N)}
    for a, b in zip(*map(jax.tree.leaves, (pullback(1.0)[0], jax.grad(f)(params))), strict=True):
        near(a, b, 1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_lies_between_is_part_of_the_products(recipe):
    """One gated call with three results, and one with the cotangents of gate and up."""
    types = [
        jax.ShapeDtypeStruct(*x)
        for x in (
            ((8192, 1024), jnp.bfloat16),
            ((8, 1024, 2, 2048), jnp.bfloat16),
            ((8, 2048, 1024), jnp.bfloat16),
            ((8,), jnp.int32),
        )
    ]

    def loss(x, up, down, sizes):
        y = Fp8RaggedMlp(recipe)(x, {"up": up, "down": down}, sizes, activation="silu")
        return y.astype(jnp.float32).sum()

    calls = jax_tcgemm.explain(jax.value_and_grad(loss, (0, 1, 2)), *types, platform="cuda")
    products = [call for call in calls if call.implementation != "quantize"]
    assert [call.implementation for call in products] == ["wgmma"] * 6
    assert {call.problem.in_dtype for call in products} == {"f8e4m3fn"}
    first, _, derivative, *_ = (call.problem for call in products)
    assert "gated" in str(first)
    assert [len(problem.function.results) for problem in (first, derivative)] == [3, 2]


def test_what_does_not_fit_is_named():
    x, params = block()
    for change in ({"down": None}, {"up_bias": jnp.ones((4, 2, 256))}):
        own = {name: value for name, value in (params | change).items() if value is not None}
        with pytest.raises(ValueError, match="^Fp8RaggedMlp: params must have up and down, got"):
            Fp8RaggedMlp()(x, own, SIZES)
    for change in ({"up": params["up"][:, :, 0]}, {"down": params["down"][:2]}):
        with pytest.raises(ValueError, match=r"^Fp8RaggedMlp: x must have shape \(m, k\), up"):
            Fp8RaggedMlp()(x, params | change, SIZES)
    with pytest.raises(TypeError, match="^Fp8RaggedMlp: x must be of a real floating-point"):
        Fp8RaggedMlp()(x.astype(int), params, SIZES)
    with pytest.raises(ValueError, match="^Fp8RaggedMlp: recipe must be current or block128, got"):
        Fp8RaggedMlp("delayed")
