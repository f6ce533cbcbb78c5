"""Gated grouped products of quantized operands: values, transformations, what runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import QuantizedArray, dequantize, quantize

SIZES = np.array([7, 0, 30, 2, 9, 1, 6, 5], np.int32)  # 60 of 64 rows
M, N, K, GROUPS = 64, 128, 256, len(SIZES)
# How tokens are quantized, and matrices as (groups, k, 2, n).
SCALINGS = {
    "rows": ({"axis": -1}, {"axis": 1}),
    "blocks": ({"block": (1, 128)}, {"block": (1, 128, 1, 128)}),
    "one for both": ({"block": (1, 128)}, {"block": (1, 128, 2, 32)}),
    "each column": ({"block": (1, 128)}, {"block": (1, 128, 1, 1)}),
}


def operands(scaling="blocks", n=N):
    of_x, of_w = SCALINGS[scaling]
    w = normal(GROUPS, K, 2, n, seed=1) / 8
    return quantize(normal(M, K), **of_x), quantize(w, **of_w)


def exact(x):
    return np.asarray(dequantize(x) if hasattr(x, "qvalue") else x).astype(np.float64)


def near(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(exact(got), expected, rtol=0, atol=tolerance * abs(expected).max())


def products(x, w, sizes=SIZES):
    """Gate and up of dequantized operands, in float64."""
    return [ragged_reference.rows(exact(x), exact(w)[:, :, i], sizes) for i in (0, 1)]


def silu(z):
    return z / (1 + np.exp(-z))


def scaled(q, scale):
    return QuantizedArray(q.qvalue, scale, None, q.qtype, q.block)


@pytest.mark.parametrize("n", [N, 72])  # Of which a last block of columns is short.
@pytest.mark.parametrize("scaling", SCALINGS)
def test_values(scaling, n):
    x, w = operands(scaling, n)
    bias = normal(GROUPS, 2, n, seed=2)
    gate, up = products(x, w)
    of_row = np.repeat(np.arange(GROUPS), SIZES)
    z, u = (a[: len(of_row)] + exact(bias)[of_row, i] for i, a in enumerate((gate, up)))
    expected = np.zeros_like(gate)
    expected[: len(of_row)] = silu(z) * u
    f = functools.partial(jax_tcgemm.gated_ragged_linear, bias=bias)
    near(jax.jit(f)(x, w, SIZES), expected)
    near(f(x, w, SIZES, preferred_element_type="bfloat16"), expected, 2**-8)
    order = np.random.default_rng(0).permutation(M)
    turned = jax.tree.map(lambda a: a[np.argsort(order)], x)
    near(f(turned, w, SIZES, gather_indices=jnp.asarray(order)), expected)
    kept = lambda gate, up: (jnp.maximum(gate, 0) * up, gate)  # noqa: E731
    found = jax_tcgemm.gated_ragged_linear(x, w, SIZES, epilogue=kept)
    for got, wanted in zip(found, (np.maximum(gate, 0) * up, gate), strict=True):
        near(got, wanted)


@pytest.mark.parametrize("n", [N, 72])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_derivatives(scaling, n):
    """By scales of both operands, forwards and backwards."""
    x, w = operands(scaling, n)
    ct = normal(M, n, seed=3)

    def loss(s, t):
        return (jax_tcgemm.gated_ragged_linear(scaled(x, s), scaled(w, t), SIZES) * ct).sum()

    def plain(s, t):
        a, b = dequantize(scaled(x, s)), dequantize(scaled(w, t))
        product = functools.partial(jax.lax.ragged_dot, group_sizes=SIZES, precision="highest")
        return (jax.nn.silu(product(a, b[:, :, 0])) * product(a, b[:, :, 1]) * ct).sum()

    got, expected = (jax.grad(f, (0, 1))(x.scale, w.scale) for f in (loss, plain))
    for own, wanted in zip(got, expected, strict=True):
        near(own, exact(wanted), 1e-4)
    _, tangent = jax.jvp(loss, (x.scale, w.scale), (x.scale, w.scale))
    along = sum(jnp.vdot(a, b) for a, b in zip(expected, (x.scale, w.scale), strict=True))
    near(tangent, exact(along), 1e-3)


def test_mapped():
    """Over tokens with their scales, over matrices, and over scales alone."""
    x, w = operands()
    gate, up = products(x, w)
    stack = lambda tree: jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), tree)  # noqa: E731
    for axes in ((0, None), (None, 0), (0, 0)):
        given = [stack(a) if axis == 0 else a for a, axis in zip((x, w), axes, strict=True)]
        f = lambda x, w: jax_tcgemm.gated_ragged_linear(x, w, SIZES)  # noqa: E731
        near(jax.vmap(f, axes)(*given)[0], silu(gate) * up)
    f = lambda scale: jax_tcgemm.gated_ragged_linear(x, scaled(w, scale), SIZES)  # noqa: E731
    near(jax.vmap(f)(jnp.stack([w.scale, 2 * w.scale]))[1], silu(2 * gate) * 2 * up)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("scaling", "specs"),
    [
        ("blocks", (P("x"), P())),
        ("blocks", (P(), P("x"))),
        ("each column", (P(), P(None, None, None, "x"))),
    ],
    ids=str,
)
def test_divided(axis_type, scaling, specs):
    """Tokens, groups, and columns that have scales of their own."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices("cpu")[:4])
    x, w = operands(scaling)
    gate, up = products(x, w)
    with jax.set_mesh(mesh):
        placed = [
            jax.tree.map(lambda a, spec=spec: jax.device_put(a, NamedSharding(mesh, spec)), each)
            for each, spec in zip((x, w), specs, strict=True)
        ]
        got = jax.jit(jax_tcgemm.gated_ragged_linear)(*placed, SIZES)
    near(got, silu(gate) * up)


# --- what runs them -------------------------------------------------------------------------------

CONFIG = "256x128x64_c1x2x1_co_t"


def layer(x, w, sizes, gather=None, **how):
    """Of matrices that are kept as (groups, 2, n, k)."""
    qvalue, scale = (jnp.moveaxis(a, -1, 1) for a in (w.qvalue, w.scale))
    block = None if w.block is None else (w.block[0], w.block[3], *w.block[1:3])
    turned = QuantizedArray(qvalue, scale, None, w.qtype, block)
    return jax_tcgemm.gated_ragged_linear(x, turned, sizes, gather_indices=gather, **how)


def large(of_x, of_w, dtype="float8_e4m3fn", tokens=8192):
    """Types of tokens, matrices and sizes of groups."""
    shapes = (tokens, 1024), (8, 2, 2048, 1024)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    of_x, of_w = (functools.partial(quantize, dtype=dtype, **own) for own in (of_x, of_w))
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    return jax.eval_shape(of_x, x), jax.eval_shape(of_w, w), sizes


ROWS = {"axis": -1}, {"axis": -1}
BLOCKS = {"block": (1, 128)}, {"block": (1, 1, 128, 128)}


def calls(f, *args, **how):
    return list(jax_tcgemm.explain(functools.partial(f, **how), *args, platform="cuda"))


def test_one_call_of_the_kernel():
    (call,) = calls(layer, *large(*BLOCKS), preferred_element_type=jnp.bfloat16)
    assert (call.implementation, call.config) == ("wgmma", CONFIG)
    assert call.copies == ("rhs transposed to (groups, 2, n, k)",)
    assert call.problem.gated
    assert call.problem.b_transposed
    a, b = call.problem.scales
    assert (a.rows, a.depth, a.inner_stride) == (1, 128, 0)
    assert (b.rows, b.depth, b.inner_stride) == (128, 128, 8 * 16)
    assert "scaled 1x128 by 128x128, gated" in str(call.problem)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_scales_of_rows_follow(dtype):
    (call,) = calls(layer, *large(*ROWS, dtype=dtype))
    assert (call.implementation, call.config) == ("wgmma", CONFIG)
    assert (call.problem.n, call.problem.gated, call.problem.scales) == (2048, True, None)


def test_few_tokens_are_by_both_matrices_as_one():
    found = calls(layer, *large(*BLOCKS, tokens=64))
    (call,) = (call for call in found if call.problem is not None)
    assert call.config == "128x64x64_c1x1x1_co_t"
    assert (call.problem.n, call.problem.gated) == (4096, False)


def test_gathered():
    """Rows of few bytes are taken before; a kernel that is asked for by name says why it cannot."""
    indices = jax.ShapeDtypeStruct((9000,), jnp.int32)
    (call,) = calls(layer, *large(*BLOCKS), indices)
    assert (call.implementation, call.problem.m) == ("wgmma", 9000)
    assert (call.problem.gated, call.problem.gathered) == (True, False)
    with pytest.raises(
        ValueError, match=r"b must lie as \(groups, k, n\) where a has gathered rows"
    ):
        calls(layer, *large(*ROWS), indices, implementation="wgmma")


def test_kernels_that_are_asked_for_run_or_refuse():
    how = {"implementation": "wgmma"}
    (call,) = calls(layer, *large(*BLOCKS), config=CONFIG, **how)
    assert call.config == CONFIG
    with pytest.raises(ValueError, match="config 128x256x64_c2x1x1_co_t has no gated product"):
        calls(layer, *large(*BLOCKS), config="128x256x64_c2x1x1_co_t", **how)
    with pytest.raises(ValueError, match="a multiple of 128 of k, got 64"):
        calls(layer, *large({"block": (1, 64)}, BLOCKS[1]), **how)

    def bare(x, w, sizes):
        return jax_tcgemm.ragged_dot(x, w.mT, sizes, config=CONFIG, **how)

    x, _, sizes = large(*BLOCKS)
    one = jax.eval_shape(
        lambda w: quantize(w, block=(128, 128)), jax.ShapeDtypeStruct((8, 2048, 1024), jnp.float32)
    )
    with pytest.raises(ValueError, match=r"reads b as \(groups, n, k\) only of gated products"):
        calls(bare, x, one, sizes)
