"""Gated products of operands with scales of blocks: values, transformations, what runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import dequantize, quantize

M, K, N = 24, 256, 384
ROWS, BLOCKS = {"block": (1, 128)}, {"block": (128, 1, 128)}
WEIGHTS = "array", "short", "pair"


def operands(kind="array"):
    """Tokens and weights, of which one dimension may have a last block that is short."""
    n = 200 if kind == "short" else N
    x = quantize(normal(2, M // 2, K), **ROWS)
    w = normal(K, 2, n, seed=1) / 8
    if kind == "pair":
        return x, tuple(quantize(w[:, i], block=(128, 128)) for i in (0, 1))
    return x, quantize(w, **BLOCKS)


def exact(x):
    return np.asarray(dequantize(x) if hasattr(x, "qvalue") else x).astype(np.float64)


def products(x, weights):
    """Gate and up of dequantized operands, in float64."""
    if not isinstance(weights, tuple):
        return [exact(x) @ exact(weights)[:, i] for i in (0, 1)]
    return [exact(x) @ exact(w) for w in weights]


def near(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(exact(got), expected, rtol=0, atol=tolerance * abs(expected).max())


def silu(z):
    return z / (1 + np.exp(-z))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_values(kind):
    x, weights = operands(kind)
    gate, up = products(x, weights)
    n = gate.shape[-1]
    bias, residual = normal(2, n, seed=2), normal(2, M // 2, n, seed=3)
    expected = silu(gate + exact(bias)[0]) * (up + exact(bias)[1]) + exact(residual)
    f = functools.partial(jax_tcgemm.gated_linear, bias=bias, residual=residual)
    near(jax.jit(f)(x, weights), expected)
    near(f(x, weights, preferred_element_type="bfloat16"), expected, 2**-8)
    kept = lambda gate, up: (jnp.maximum(gate, 0) * up, gate, up.sum(-1))  # noqa: E731
    found = jax_tcgemm.gated_linear(x, weights, epilogue=kept)
    for got, wanted in zip(found, (np.maximum(gate, 0) * up, gate, up.sum(-1)), strict=True):
        near(got, wanted)


def test_scales_of_the_pair_may_be_shared_and_weights_alone_quantized():
    x, w = operands()
    shared = quantize(normal(K, 2, N, seed=1), block=(128, 2, 128))
    assert shared.scale.shape == (2, 1, 3)
    gate, up = products(x, shared)
    near(jax_tcgemm.gated_linear(x, shared), silu(gate) * up)
    # Of unlike scales, and without rows, both are products by themselves.
    pair = quantize(normal(K, N), block=(128, 128)), quantize(normal(K, N, seed=1), block=(64, 128))
    gate, up = products(x, pair)
    near(jax_tcgemm.gated_linear(x, pair), silu(gate) * up)
    row = quantize(normal(K), block=(128,))
    gate, up = products(row, w)
    near(jax_tcgemm.gated_linear(row, w), silu(gate) * up)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_vmap(mapped):
    x, w = operands()
    stack = lambda tree: jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), tree)  # noqa: E731
    given = [stack(a) if axis == 0 else a for a, axis in zip((x, w), mapped, strict=True)]
    got = jax.vmap(jax_tcgemm.gated_linear, mapped)(*given)
    for i in range(2):
        each = [
            jax.tree.map(lambda a: a[i], a) if axis == 0 else a  # noqa: B023
            for a, axis in zip(given, mapped, strict=True)
        ]
        gate, up = products(*each)
        near(got[i], silu(gate) * up)


def test_vmap_of_what_follows():
    x, w = operands()
    bias = normal(3, 2, N)
    got = jax.vmap(lambda bias: jax_tcgemm.gated_linear(x, w, bias=bias))(bias)
    gate, up = products(x, w)
    near(got, np.stack([silu(gate + b[0]) * (up + b[1]) for b in exact(bias)]))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_derivatives(kind):
    """By scales of both operands and a bias, forwards and backwards, and of the second order."""
    x, weights = operands(kind)
    n = (weights[0] if kind == "pair" else weights).shape[-1]
    g, bias = normal(2, M // 2, n, seed=5), normal(2, n, seed=6)

    def scaled(q, scale):
        return jax_tcgemm.QuantizedArray(q.qvalue, scale, None, q.qtype, q.block)

    def scales(tree):
        is_leaf = lambda a: hasattr(a, "qvalue")  # noqa: E731
        return jax.tree.map(lambda q: q.scale, tree, is_leaf=is_leaf)

    def loss(f, s, t, bias):
        is_leaf = lambda a: hasattr(a, "qvalue")  # noqa: E731
        own = jax.tree.map(scaled, weights, t, is_leaf=is_leaf)
        return jnp.vdot(jnp.sin(f(scaled(x, s), own, bias)), g)

    def ours(x, weights, bias):
        return jax_tcgemm.gated_linear(x, weights, bias=bias)

    def reference(x, weights, bias):
        def wide(q):
            spread = q.scale
            for axis, extent in enumerate(q.shape):
                spread = jnp.repeat(
                    spread,
                    -(-extent // spread.shape[axis]) if q.block is None else q.tile[axis],
                    axis,
                )
                spread = jax.lax.slice_in_dim(spread, 0, extent, axis=axis)
            return jnp.asarray(np.asarray(q.qvalue).astype(np.float64)) * spread

        both = [wide(w) for w in weights] if kind == "pair" else wide(weights)
        both = both if kind == "pair" else (both[:, 0], both[:, 1])
        gate, up = (wide(x) @ w + b for w, b in zip(both, bias, strict=True))
        return jax.nn.silu(gate) * up

    def all_of(f, *arguments):
        gradient = jax.grad(functools.partial(loss, f), (0, 1, 2))
        return gradient(*arguments), jax.jvp(gradient, arguments, arguments)[1]

    given = scales(x), scales(weights), bias
    got = all_of(ours, *given)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), given)
        expected = all_of(reference, *wide)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        near(a, exact(b), 2e-4)


# --- what runs ------------------------------------------------------------------------------------


def calls(f, *arguments):
    return list(jax_tcgemm.explain(f, *arguments, platform="cuda"))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_one_call(kind):
    x, weights = operands(kind)
    f = functools.partial(
        jax_tcgemm.gated_linear, bias=jnp.ones((2, 200 if kind == "short" else N))
    )
    (call,) = calls(f, x, weights)
    assert call.implementation == "wgmma"
    assert (call.problem.m, call.problem.k) == (M, K)
    assert call.problem.epilogue.gated
    assert call.problem.epilogue.up_offset == call.problem.n * K
    assert "scaled 1x128 by 128x128 gated" in str(call.problem)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_products_of_epilogues_that_no_kernel_computes_are_one_call(kind):
    x, weights = operands(kind)
    f = functools.partial(
        jax_tcgemm.gated_linear, epilogue=lambda gate, up: jnp.cumsum(gate * up, 1)
    )
    (call,) = calls(f, x, weights)
    assert (call.implementation, call.problem.m) == ("wgmma", M)
    assert "scaled 1x128 by" in str(call.problem)
    gate, up = products(x, weights)
    near(f(x, weights), np.cumsum(gate * up, 1))


def test_configs_that_cannot_gate_leave_it_to_another_kernel():
    x, weights = operands()
    for config in ("64x96x64_c1x1x1_pp_t", "128x128x64_c2x1x1_pp_split2"):
        f = functools.partial(jax_tcgemm.gated_linear, implementation="wgmma", config=config)
        (call,) = calls(f, x, weights)
        assert (call.config, call.workspace_bytes >= 2 * M * N * 4) == (config, True)


def test_refusals_are_named():
    x, weights = quantize(normal(M, K), block=(1, 64)), quantize(normal(K, 2, N), block=(64, 1, 64))
    (call,) = calls(jax_tcgemm.gated_linear, x, weights)
    assert call.implementation == "xla"
    forced = functools.partial(jax_tcgemm.gated_linear, implementation="wgmma")
    with pytest.raises(ValueError, match=r"^gated_linear.* multiple of 128 of k, got 64"):
        calls(forced, x, weights)


def test_derivatives_keep_both_products_as_results_of_the_call():
    x, weights = operands()

    def loss(s):
        own = jax_tcgemm.QuantizedArray(x.qvalue, s)
        return jax_tcgemm.gated_linear(own, weights).sum()

    first, *_ = calls(jax.grad(loss), x.scale)
    assert first.implementation == "wgmma"
    assert len(first.problem.epilogue.function.results) == 3
    assert first.problem.epilogue.gated


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_divided(axis_type):
    """Rows stay where they are."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices("cpu")[:4])
    x, w = quantize(normal(M, K), **ROWS), operands()[1]
    gate, up = products(x, w)
    with jax.set_mesh(mesh):
        place = lambda tree, spec: jax.tree.map(  # noqa: E731
            lambda a: jax.device_put(a, NamedSharding(mesh, spec)), tree
        )
        f = jax.jit(jax_tcgemm.gated_linear)
        got = f(place(x, P("x")), place(w, P()))
    near(got, silu(gate) * up)
    assert got.sharding.spec[0] == "x"
