"""Feed-forward blocks that train in 8 bits: values, gradients, what runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import Fp8DotGeneral, Fp8Mlp, dequantize, quantize

RECIPES = "current", "block128"
M, K, N = 48, 256, 192


def block(hidden=384, dtype="float32"):
    """x, params and residual."""
    x, residual = normal(2, M // 2, K, dtype=dtype), normal(2, M // 2, N, seed=1, dtype=dtype)
    up, down = normal(K, 2, hidden, seed=2) / 16, normal(hidden, N, seed=3) / 16
    return x, {"up": up.astype(dtype), "down": down.astype(dtype)}, residual


def by_layers(recipe, grad_dtype=jnp.float8_e5m2):
    """The same of `Fp8DotGeneral`, what lies between the products being JAX's."""
    product = Fp8DotGeneral(recipe, grad_dtype)

    def f(x, params, residual):
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        both = product(x, params["up"], numbers)
        h = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
        return residual + product(h, params["down"], numbers)

    return f


def near(got, expected, tolerance):
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hidden", [384, 200])
def test_values_and_gradients(recipe, hidden):
    """Those of the layers, but for what 8 bits round to a neighbor."""
    arguments, g = block(hidden), normal(2, M // 2, N, seed=4)
    ours = functools.partial(Fp8Mlp(recipe), activation="silu")
    run = lambda x, params, residual: ours(x, params, residual=residual)  # noqa: E731
    out, pullback = jax.vjp(jax.jit(run), *arguments)
    expected, pull_back = jax.vjp(by_layers(recipe), *arguments)
    near(out, expected, 1e-3)
    near(run(*arguments), out, 1e-6)
    pairs = zip(*map(jax.tree.leaves, (pullback(g), pull_back(g))), strict=True)
    for got, wanted in pairs:
        assert got.dtype == wanted.dtype
        near(got, wanted, 5e-3)


def test_values_of_dequantized_operands():
    """Of the first product and its derivative, in float64: 8 bits alone are lost."""
    x, params, _ = block()
    of_rows, of_weights = {"block": (1, 128)}, {"block": (128, 128)}

    def rounded(x, dtype=jnp.float8_e4m3fn, **how):
        return np.asarray(dequantize(quantize(x, dtype, **how))).astype(np.float64)

    rows, up = x.reshape(-1, K), rounded(params["up"].reshape(K, -1), **of_weights)
    gate, up = np.moveaxis((rounded(rows, **of_rows) @ up).reshape(M, 2, -1), 1, 0)
    h = jnp.asarray(gate / (1 + np.exp(-gate)) * up, jnp.float32)
    expected = rounded(h, **of_rows) @ rounded(params["down"], **of_weights)
    near(Fp8Mlp("block128")(x, params, activation="silu").reshape(M, N), expected, 1e-3)


@pytest.mark.parametrize("activation", ["gelu", None, "relu"])
def test_near_the_exact_block(activation):
    x, params, residual = block(dtype="bfloat16")

    def loss(f, *arguments):
        x, params = arguments
        return jnp.sin(f(x, params, activation=activation, residual=residual)).sum()

    got = jax.grad(functools.partial(loss, Fp8Mlp("block128")), (0, 1))(x, params)
    expected = jax.grad(functools.partial(loss, jax_tcgemm.mlp), (0, 1))(x, params)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert a.dtype == jnp.bfloat16
        near(a, b, 0.16)


def test_vmap_and_remat():
    x, params, residual = block()
    f = functools.partial(Fp8Mlp("block128"), activation="silu")
    got = jax.vmap(lambda x, r: f(x, params, residual=r))(x, residual)
    near(got, f(x, params, residual=residual), 1e-6)
    policy = jax.checkpoint_policies.save_only_these_names("fp8_operands")
    loss = lambda f, params: jnp.sin(f(x, params)).sum()  # noqa: E731
    got = jax.grad(functools.partial(loss, jax.checkpoint(f, policy=policy)))(params)
    expected = jax.grad(functools.partial(loss, f))(params)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        near(a, b, 1e-6)


@pytest.mark.parametrize("hidden", [1024, 1000])
def test_what_lies_between_is_part_of_the_products(hidden):
    """One gated call with three results, and one with both cotangents beside each other."""
    x = jax.ShapeDtypeStruct((4, 1024, 512), jnp.bfloat16)
    up, down = ((512, 2, hidden), (hidden, 512))
    params = {
        "up": jax.ShapeDtypeStruct(up, jnp.bfloat16),
        "down": jax.ShapeDtypeStruct(down, jnp.bfloat16),
    }

    def loss(x, params):
        run = Fp8Mlp("block128")
        return run(x, params, activation="silu", residual=x).astype(jnp.float32).sum()

    calls = jax_tcgemm.explain(jax.value_and_grad(loss, (0, 1)), x, params, platform="cuda")
    products = [call for call in calls if call.implementation != "quantize"]
    assert [call.implementation for call in products] == ["wgmma"] * 6
    first, _, derivative, *_ = (call.problem for call in products)
    assert first.epilogue.gated
    assert len(first.function.results) == 3
    assert [x.over for x in derivative.function.results] == ["", "beside"]
    assert all(call.problem.scales for call in products)


def test_what_does_not_fit_is_named():
    x, params, _ = block()
    for change in ({"up": params["up"][:, 0]}, {"up_bias": jnp.ones((2, 384))}):
        with pytest.raises(ValueError, match=r"^Fp8Mlp: params must have up of shape \(k, 2, j\)"):
            Fp8Mlp()(x, params | change)
    with pytest.raises(ValueError, match="^Fp8Mlp: recipe must be current or block128"):
        Fp8Mlp("none")
    with pytest.raises(TypeError, match="^Fp8Mlp: grad_dtype must be"):
        Fp8Mlp(grad_dtype="float32")
    with pytest.raises(ValueError, match="^Fp8Mlp: residual must"):
        Fp8Mlp()(x, params, residual=jnp.ones(7))
