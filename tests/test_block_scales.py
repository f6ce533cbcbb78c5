"""Products of operands with scales of blocks: folding, transformations, devices, refusals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_formats import E2M1, E4M3, E5M2, E8M0, FORMATS, exact, of_format
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm
from jax_tcgemm.problem.operands.block_scales import BlockScales


def draw(seed, *shape, dtype=E4M3):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def positive(seed, *shape):
    return jnp.exp(jax.random.normal(jax.random.key(seed), shape))


def spread(scales, shape, block):
    """A scale for each element of (..., rows, k), in NumPy."""
    *batch, rows, depth = shape
    scales = np.repeat(np.repeat(exact(scales), block[0], -2), block[1], -1)[..., :rows, :depth]
    return np.broadcast_to(scales, (*batch, rows, depth))


def dequantized(x, scales, block):
    return exact(x) * spread(scales, x.shape, block)


def near(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(exact(got), expected, rtol=0, atol=tolerance * abs(expected).max())


# --- where scales lie -----------------------------------------------------------------------------

# Extents of the batch and of rows, those of the scales in front of the last two, and blocks.
FOLDED = {
    "a matrix": ((), (7,), (), (1, 3)),
    "short blocks": ((), (7,), (), (2, 4)),
    "many rows": ((), (75,), (), (2, 4)),
    "a batch of many rows": ((3,), (40,), (3,), (1, 4)),
    "one for all rows": ((), (7,), (), (9, 4)),
    "rows of rows": ((), (3, 8), (3,), (1, 5)),
    "blocks that divide rows": ((), (3, 8), (3,), (4, 5)),
    "blocks that do not": ((), (3, 7), (3,), (4, 5)),
    "the same for all in front": ((), (3, 8), (1,), (4, 5)),
    "one in all": ((), (3, 8), (1,), (8, 10)),
    "a batch": ((4,), (6,), (4,), (2, 5)),
    "a batch that shares them": ((4,), (6,), (1,), (2, 5)),
    "a batch of two dimensions": ((2, 3), (6,), (2, 1), (4, 5)),
    "a batch and rows of rows": ((2,), (3, 5), (2, 3), (2, 5)),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("batch_inner", [1, "all"])
def test_scales_lie_where_they_are_said_to(name, batch_inner):
    batch, rows, front, block = FOLDED[name]
    depth = 10
    shape = *batch, *rows, depth
    own = *front, -(-rows[-1] // block[0]), -(-depth // block[1])
    values = positive(0, *own)
    scales = BlockScales(shape, own, block, len(batch))
    num_batch, num_rows = int(np.prod(batch)), int(np.prod(rows))
    batch_inner = num_batch if batch_inner == "all" else batch_inner
    flat, strides = exact(scales.folded(values)).ravel(), scales.scale_strides(batch_inner)
    got = np.zeros((num_batch, num_rows, depth))
    for b, r, k in itertools.product(*map(range, got.shape)):
        place = b // batch_inner * strides.outer_stride + b % batch_inner * strides.inner_stride
        place += r // strides.rows * strides.row_stride + k // strides.depth * strides.k_stride
        got[b, r, k] = flat[place]
    np.testing.assert_array_equal(got.reshape(shape), spread(values, shape, block))
    whole = np.broadcast_to(exact(scales.repeated_to_elements(values)), shape)
    np.testing.assert_array_equal(whole, spread(values, shape, block))


# --- values ---------------------------------------------------------------------------------------

DEEPSEEK = ((1, 128), (128, 128))


@pytest.mark.parametrize("blocks", [DEEPSEEK, ((1, 128), (1, 128)), ((16, 100), (7, 150))])
def test_blocks_that_end_short(blocks):
    x, w = draw(0, 3, 33, 300), draw(1, 150, 300, dtype=E5M2)
    s, t = (
        positive(
            2 + i, *a.shape[:-2], *(-(-n // b) for n, b in zip(a.shape[-2:], own, strict=True))
        )
        for i, (a, own) in enumerate(zip((x, w), blocks, strict=True))
    )
    f = functools.partial(jax_tcgemm.scaled_matmul, lhs_block=blocks[0], rhs_block=blocks[1])
    expected = dequantized(x, s, blocks[0]) @ dequantized(w, t, blocks[1]).T
    near(jax.jit(f)(x, w, s, t), expected)
    rounded = f(x, w, s, t, preferred_element_type="bfloat16")
    assert rounded.dtype == jnp.bfloat16
    near(rounded, expected, 2**-8)


def case():
    """Operands of a product with DeepSeek's blocks, and that in float64."""
    x, w, s, t = draw(0, 24, 256), draw(1, 256, 256), positive(2, 24, 2), positive(3, 2, 2)
    return (x, w, s, t), dequantized(x, s, DEEPSEEK[0]) @ dequantized(w, t, DEEPSEEK[1]).T


@pytest.mark.parametrize(
    "mapped", [p for p in itertools.product([0, 1], repeat=4) if any(p)], ids=str
)
def test_vmap(mapped):
    """Over any of the operands: entry by entry the same."""
    arguments, _ = case()
    stacked = [
        jnp.stack([x, x[::-1], -x]) if m else x for x, m in zip(arguments, mapped, strict=True)
    ]
    axes = tuple(0 if m else None for m in mapped)
    got = jax.jit(jax.vmap(jax_tcgemm.scaled_matmul, axes))(*stacked)
    for i in range(3):
        own = [x[i] if m else x for x, m in zip(stacked, mapped, strict=True)]
        x, w, s, t = own
        near(got[i], dequantized(x, s, DEEPSEEK[0]) @ dequantized(w, t, DEEPSEEK[1]).T)


def test_vmap_of_a_batch():
    (x, w, s, t), expected = case()
    batched = [jnp.stack([a, a]) for a in (x, w, s, t)]
    got = jax.vmap(jax_tcgemm.scaled_matmul)(*(jnp.stack([a, a, a]) for a in batched))
    assert got.shape == (3, 2, 24, 256)
    near(got, np.broadcast_to(expected, got.shape))


def test_derivatives():
    """Of the second order too, by what the scales are."""
    (x, w, s, t), _ = case()
    g = jax.random.normal(jax.random.key(5), (24, 256))

    def f(s, t):
        return jnp.vdot(jnp.sin(jax_tcgemm.scaled_matmul(x, w, s, t) / 50), g)

    def reference(s, t):
        wide = [
            jnp.asarray(exact(a)) * jnp.repeat(jnp.repeat(b, rows, 0), 128, 1)
            for a, b, rows in ((x, s, 1), (w, t, 128))
        ]
        return jnp.vdot(jnp.sin(wide[0] @ wide[1].T / 50), exact(g))

    ours = jax.grad(f, (0, 1))(s, t), jax.jvp(jax.grad(f, (0, 1)), (s, t), (s, t))[1]
    with jax.enable_x64(True):
        s, t = (jnp.asarray(exact(a)) for a in (s, t))
        theirs = jax.grad(reference, (0, 1))(s, t)
        theirs = theirs, jax.jvp(jax.grad(reference, (0, 1)), (s, t), (s, t))[1]
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        near(got, exact(expected), 1e-4)


def test_cotangents_of_operands_are_not_rounded_before():
    """To 8 bits only at the end, as their dtype asks."""
    (x, w, s, t), _ = case()
    g = jax.random.normal(jax.random.key(5), (24, 256)) / 64
    x_bar, _ = jax.vjp(lambda x, w: jax_tcgemm.scaled_matmul(x, w, s, t), x, w)[1](g)
    assert x_bar.dtype == E4M3
    expected = exact(g) @ dequantized(w, t, DEEPSEEK[1]) * spread(s, x.shape, DEEPSEEK[0])
    # Half of a unit in the last of three bits, and what is below the least normal number.
    np.testing.assert_allclose(exact(x_bar), expected, rtol=2**-4 + 1e-4, atol=2**-10 + 1e-4)


# --- block formats --------------------------------------------------------------------------------

FORMAT = pytest.mark.parametrize("name", FORMATS)


@FORMAT
def test_block_formats(name):
    operands, expected = of_format(name)
    near(jax.jit(jax_tcgemm.scaled_matmul)(*operands), expected, 1e-6)
    (call,) = calls(jax_tcgemm.scaled_matmul, *operands)
    assert (call.implementation, call.problem.scales) == ("wgmma", None)
    assert str(call.problem).startswith("24x56x192 NT bf16->f32")
    got = jax_tcgemm.scaled_matmul(*operands, preferred_element_type=jnp.bfloat16)
    near(got, expected, 2**-8)


@FORMAT
def test_dequantized_block_formats_are_exact(name):
    """Each product of an element and a scale is one, in a product with the identity matrix."""
    *dtypes, scale_dtype, block = FORMATS[name]
    rng, k = np.random.default_rng(0), 2 * FORMATS[name][-1]
    for dtype in dtypes:
        bits = jax.dtypes.finfo(dtype).bits
        codes = rng.integers(0, 2**bits, (64, k), np.uint8)
        x = jnp.asarray(codes.view(dtype) if bits == 8 else codes.astype(np.int8).astype(dtype))
        scales = jnp.asarray(rng.integers(90, 160, (64, 2), np.uint8).view(scale_dtype))
        x = jnp.where(jnp.isfinite(x.astype(jnp.float32)), x.astype(jnp.float32), 0).astype(dtype)
        scales = jnp.abs(jnp.nan_to_num(scales.astype(jnp.float32), posinf=1)).astype(scale_dtype)
        identity = jnp.eye(k).astype(dtype), jnp.ones((k, 2), scale_dtype)
        got = jax_tcgemm.scaled_matmul(x, identity[0], scales, identity[1])
        np.testing.assert_array_equal(exact(got), dequantized(x, scales, (1, block)))


def test_deep_blocks_with_scales_of_8_bits_stay_in_8_bits():
    (x, w, s, t), _ = case()
    s, t = (jnp.exp2(jnp.round(jnp.log2(a))).astype(E8M0) for a in (s, t))
    (call,) = calls(jax_tcgemm.scaled_matmul, x, w, s, t)
    assert call.problem.scales
    expected = dequantized(x, s, DEEPSEEK[0]) @ dequantized(w, t, DEEPSEEK[1]).T
    near(jax_tcgemm.scaled_matmul(x, w, s, t), expected)


def test_four_bits_with_scales_of_rows_are_multiplied_in_8():
    x, w = draw(0, 24, 64, dtype=E2M1), draw(1, 32, 64, dtype=E2M1)
    s, t = positive(2, 24, 1), positive(3, 32, 1)
    (call,) = calls(jax_tcgemm.scaled_matmul, x, w, s, t)
    assert str(call.problem).startswith("24x32x64 NT f8e4m3fn")
    near(jax_tcgemm.scaled_matmul(x, w, s, t), exact(x) * exact(s) @ (exact(w) * exact(t)).T)


def test_block_formats_in_a_layer():
    (x, w, s, t), expected = of_format("MXFP8")
    x, w = jax_tcgemm.QuantizedArray(x, s), jax_tcgemm.QuantizedArray(w, t).mT
    f = lambda x, w: jax_tcgemm.linear(x, w, jnp.ones(56), activation="relu")  # noqa: E731
    (call,) = calls(f, x, w)
    assert str(call.problem).startswith("24x56x192 NT bf16")
    got = f(x, w)
    assert got.dtype == jnp.float32
    near(got, np.maximum(expected + 1, 0))


@FORMAT
def test_transformations_of_block_formats(name):
    (x, w, s, t), expected = of_format(name)
    stacked = [jnp.stack([a, a]) for a in (x, s)]
    got = jax.vmap(jax_tcgemm.scaled_matmul, (0, None, 0, None))(stacked[0], w, stacked[1], t)
    near(got, np.stack([expected, expected]), 1e-6)
    g = jax.random.normal(jax.random.key(5), (24, 56))
    x_bar = jax.vjp(lambda x: jax_tcgemm.scaled_matmul(x, w, s, t), x)[1](g)[0]
    assert x_bar.dtype == x.dtype


# --- what runs ------------------------------------------------------------------------------------


def calls(f, *arguments, platform="cuda"):
    return jax_tcgemm.explain(f, *arguments, platform=platform)


@pytest.mark.parametrize("rows", [(24,), (2, 12), (1, 1, 24)])
def test_one_call(rows):
    (x, w, s, t), _ = case()
    x, s = x.reshape(*rows, 256), s.reshape(*rows, 2)
    (call,) = calls(jax_tcgemm.scaled_matmul, x, w, s, t)
    assert call.implementation == "wgmma"
    assert not call.copies
    a, b = call.problem.scales
    assert (a.rows, a.depth, b.rows, b.depth) == (1, 128, 128, 128)
    assert call.problem.m == 24
    assert "scaled 1x128 by 128x128" in str(call.problem)


def test_quantized_operands_with_an_epilogue_are_one_call():
    (x, w, s, t), product = case()
    x, w = jax_tcgemm.QuantizedArray(x, s), jax_tcgemm.QuantizedArray(w, t).mT
    f = lambda x, w: jax_tcgemm.linear(x, w, jnp.ones(256), activation="relu")  # noqa: E731
    (call,) = calls(f, x, w)
    assert call.implementation == "wgmma"
    assert call.problem.scales
    near(f(x, w), np.maximum(product + 1, 0))


def test_products_of_epilogues_that_no_kernel_computes_are_one_call():
    (x, w, s, t), product = case()
    x, w = jax_tcgemm.QuantizedArray(x, s), jax_tcgemm.QuantizedArray(w, t).mT
    f = functools.partial(jax_tcgemm.matmul, epilogue=lambda acc: jnp.cumsum(acc, 1))
    (call,) = calls(f, x, w)
    assert (call.implementation, call.problem.out_dtype) == ("wgmma", "f32")
    assert call.problem.scales
    near(f(x, w), np.cumsum(product, 1))


def test_derivatives_of_layers_are_lowered_for_gpus():
    """With the accumulator as a second result, and a function of it."""
    (x, w, s, t), _ = case()
    weights = jax_tcgemm.QuantizedArray(w, t).mT

    def f(s):
        x8 = jax_tcgemm.QuantizedArray(x, s)
        return jax_tcgemm.linear(x8, weights, activation="silu").sum()

    text = jax.jit(jax.grad(f)).trace(s).lower(lowering_platforms=("cuda",)).as_text()
    assert "tcgemm_gemm" in text
    assert "scales = dense<[1, 128, 2, 1, 0, 0, 128, 128, 2, 1, 0, 0]>" in text


def test_other_blocks_are_multiplied_before():
    (x, w, _, _), _ = case()
    s, t = positive(4, 24, 4), positive(5, 2, 4)
    (call,) = calls(jax_tcgemm.scaled_matmul, x, w, s, t)
    assert call.implementation == "xla"
    assert "its product: scales are of blocks of K, by which XLA multiplies" in call.why
    forced = functools.partial(jax_tcgemm.scaled_matmul, implementation="wgmma")
    with pytest.raises(ValueError, match=r"^scaled_matmul: .* multiple of 128 of k, got 64"):
        calls(forced, x, w, s, t)
    wide = [a.astype(jnp.float32) for a in (x, w)]
    (call,) = calls(jax_tcgemm.scaled_matmul, *wide, positive(4, 24, 2), positive(5, 2, 2))
    assert call.implementation == "xla"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lhs_block": 128}, "lhs_block must be None or the two extents of a block"),
        ({"rhs_block": (0, 128)}, "rhs_block must be None or the two extents of a block"),
        ({"lhs_block": (2, 128)}, r"lhs_scales must have the shape \(12, 2\).*=\(24, 2\)"),
        ({"rhs_block": (128, 100)}, r"rhs_scales must have the shape \(2, 3\).*=\(2, 2\)"),
        ({"lhs_scales": jnp.ones((24, 3))}, "lhs_scales must have .* or give lhs_block where"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change, says):
    (x, w, s, t), _ = case()
    arguments = {"lhs_scales": s, "rhs_scales": t} | change
    with pytest.raises(ValueError, match=f"^scaled_matmul: {says}"):
        jax_tcgemm.scaled_matmul(x, w, **arguments)


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis_type", "of_weights"),
    [(AxisType.Auto, P()), (AxisType.Auto, P("x")), (AxisType.Explicit, P())],
    ids=str,
)
def test_divided(axis_type, of_weights):
    """Rows stay where they are; weights are gathered, in 8 bits."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices("cpu")[:4])
    (x, w, s, t), expected = case()
    specs = P("x"), of_weights, P("x"), P()
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip((x, w, s, t), specs, strict=True)
        ]
        f = jax.jit(jax_tcgemm.scaled_matmul)
        got = f(*placed)
        text = f.lower(*placed).compile().as_text()
    near(got, expected)
    assert got.sharding.spec[0] == "x"
    assert "all-reduce" not in text
    assert ("all-gather" in text) == (of_weights != P())
