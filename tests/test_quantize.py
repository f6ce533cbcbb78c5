"""Quantized arrays: their values and scales, against float64, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import QuantizedArray

E4M3, E5M2, INT8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
LARGEST = {E4M3: 448, E5M2: 57344, INT8: 127}
# Shapes of x, how it is quantized, the extents of what has one scale.
SCALINGS = {
    "one for all": ((50, 70), {}, (50, 70)),
    "rows": ((50, 70), {"axis": -1}, (1, 70)),
    "columns": ((50, 70), {"axis": 0}, (50, 1)),
    "two axes": ((5, 7, 9), {"axis": (0, 2)}, (5, 1, 9)),
    "blocks of rows": ((50, 256), {"block": (1, 128)}, (1, 128)),
    "blocks": ((256, 384), {"block": (128, 128)}, (128, 128)),
    "short blocks": ((130, 300), {"block": (128, 128)}, (128, 128)),
    "one block": ((50, 70), {"block": (128, 128)}, (128, 128)),
    "blocks of a batch": ((3, 8, 64), {"block": (1, 32)}, (1, 1, 32)),
    "blocks of all": ((4, 8, 64), {"block": (2, 8, 32)}, (2, 8, 32)),
}


def exact(x):
    return np.asarray(x).astype(np.float64)


def per_element(scale, shape, tile):
    """Scales of blocks, each where it belongs, without what the library does for that."""
    index = np.ix_(*(np.arange(extent) // size for extent, size in zip(shape, tile, strict=True)))
    return exact(scale)[index]


def check(q, x, tile, dtype):
    """Scales are of the largest number of each block, and values those nearest to x / scale."""
    x = exact(x)
    counts = tuple(-(-extent // size) for extent, size in zip(x.shape, tile, strict=True))
    assert (q.shape, q.qvalue.dtype, q.qtype) == (x.shape, dtype, dtype)
    assert (q.scale.shape, q.scale.dtype, q.zero_point) == (counts, jnp.float32, None)
    for block in np.ndindex(*counts):
        where = tuple(slice(i * size, (i + 1) * size) for i, size in zip(block, tile, strict=True))
        largest = abs(x[where]).max()
        np.testing.assert_allclose(exact(q.scale)[block], largest / LARGEST[dtype], rtol=1e-6)
    scale = per_element(q.scale, x.shape, tile)
    if dtype == INT8:
        bound = scale / 2
    else:
        bits, smallest = jnp.finfo(dtype).nmant, float(jnp.finfo(dtype).smallest_subnormal)
        bound = np.maximum(abs(x) * 2.0 ** -(bits + 1), scale * smallest / 2)
    got = exact(q.qvalue) * scale
    assert (abs(got - x) <= bound * (1 + 1e-5)).all()
    np.testing.assert_allclose(exact(jax_tcgemm.dequantize(q)), got, rtol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", LARGEST)
def test_values_and_scales(name, dtype):
    shape, how, tile = SCALINGS[name]
    x = normal(*shape) * 3e-5
    check(jax.jit(lambda x: jax_tcgemm.quantize(x, dtype, **how))(x), x, tile, dtype)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_carried_by_its_scale(name, dtype, special):
    """Whatever has one scale with it is NaN, and so are products; the rest is what it was."""
    shape, how, tile = SCALINGS[name]
    x = normal(*shape)
    finite = jax_tcgemm.quantize(x, dtype, **how)
    where = tuple(extent // 2 for extent in shape)
    block = np.zeros(finite.scale.shape, bool)
    block[tuple(i // size for i, size in zip(where, tile, strict=True))] = True
    is_off = per_element(block, shape, tile) != 0
    for run in (lambda f: f, jax.jit):
        found = run(lambda x: jax_tcgemm.quantize(x, dtype, **how))(x.at[where].set(special))
        scale = exact(found.scale)
        np.testing.assert_array_equal(scale[~block], exact(finite.scale)[~block])
        assert (np.isnan(scale[block]) if np.isnan(special) else np.isposinf(scale[block])).all()
        got, expected = (exact(jax_tcgemm.dequantize(q)) for q in (found, finite))
        assert np.isnan(got[is_off]).all()
        np.testing.assert_array_equal(got[~is_off], expected[~is_off])
        if len(shape) == 2:
            out = exact(jax_tcgemm.matmul(found, jnp.ones((shape[1], 3), jnp.float32)))
            np.testing.assert_array_equal(np.isnan(out[:, 0]), is_off.any(1))


def test_narrower_arrays():
    x = normal(20, 30).astype(jnp.bfloat16)
    check(jax_tcgemm.quantize(x, axis=-1), x, (1, 30), E4M3)


@pytest.mark.parametrize("name", ["one for all", "rows", "blocks of rows", "short blocks"])
@pytest.mark.parametrize("dtype", LARGEST)
def test_transposes_have_scales_of_their_own(name, dtype):
    shape, how, _ = SCALINGS[name]
    x = normal(*shape)
    q, transposed = jax_tcgemm.quantize(x, dtype, **how, with_transpose=True)
    for got, expected in (
        (q, jax_tcgemm.quantize(x, dtype, **how)),
        (transposed, jax_tcgemm.quantize(x.T, dtype, **how)),
    ):
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    tile = how.get("block", shape[::-1] if "axis" not in how else (1, shape[0]))
    check(transposed, x.T, tile, dtype)


def test_zeros_and_tiny_numbers():
    x = jnp.array([[0.0, 0.0], [1e-38, -1e-38], [1.0, 2.0]])
    q = jax_tcgemm.quantize(x, axis=1)
    assert (exact(q.qvalue)[0] == 0).all()
    assert np.isfinite(exact(q.qvalue)).all()
    np.testing.assert_array_equal(exact(q.qvalue)[2], [224, 448])
    assert (q.scale > 0).all()
    assert jax_tcgemm.quantize(jnp.ones((0, 128)), block=(1, 64)).shape == (0, 128)


def test_zero_points():
    """As asymmetric quantizers of other libraries have them."""
    values = jnp.arange(-8, 8, dtype=jnp.int8).reshape(2, 8)
    q = QuantizedArray(values, jnp.array([[0.5, 2.0]]), jnp.array([[3], [-1]], jnp.int8))
    expected = exact(values) - np.array([[3], [-1]])
    expected *= np.repeat([[0.5, 2.0]], 4, 1)
    np.testing.assert_array_equal(exact(jax_tcgemm.dequantize(q)), expected)
    assert q.qtype == jnp.int8


def test_transformations_of_arrays():
    x = normal(3, 130, 256)
    q = jax.vmap(lambda x: jax_tcgemm.quantize(x, block=(128, 128)))(x)
    assert q.scale.shape == (3, 2, 2)
    back = jax.vmap(jax_tcgemm.dequantize)(q)
    for i in range(3):
        one = jax_tcgemm.quantize(x[i], block=(128, 128))
        np.testing.assert_array_equal(back[i], jax_tcgemm.dequantize(one))
        np.testing.assert_array_equal(jax_tcgemm.dequantize(one.mT), back[i].T)
    _, scanned = jax.lax.scan(lambda _, q: (None, jax_tcgemm.dequantize(q)), None, q)
    np.testing.assert_array_equal(scanned, back)


def test_blocks_are_transposed_too():
    q = jax_tcgemm.quantize(normal(130, 300), block=(64, 128))
    assert (q.block, q.mT.block) == ((64, 128), (128, 64))
    np.testing.assert_array_equal(jax_tcgemm.dequantize(q.mT), jax_tcgemm.dequantize(q).T)
    row = jax_tcgemm.quantize(normal(130, 300), block=(128,))
    np.testing.assert_array_equal(jax_tcgemm.dequantize(row.mT), jax_tcgemm.dequantize(row).T)


@pytest.mark.parametrize(
    "how", [{"axis": -1}, {"block": (1, 32)}, {"with_transpose": True}], ids=str
)
def test_derivatives_go_straight_through(how):
    """Forwards and backwards, in the dtype of the values: e5m2 has two bits of mantissa."""
    x, g = normal(32, 64), normal(32, 64, seed=1)

    def f(x):
        made = jax_tcgemm.quantize(x, E5M2, **how)
        return [q.qvalue for q in made] if "with_transpose" in how else [made.qvalue]

    made = jax_tcgemm.quantize(x, E5M2, **how)
    scale = exact((made[0] if "with_transpose" in how else made).scale)
    scale = np.repeat(scale, 64 // scale.shape[1], 1)
    out, vjp = jax.vjp(f, x)
    cotangents = [g if i == 0 else g.T for i in range(len(out))]
    cotangents = [ct.astype(E5M2) for ct in cotangents]
    expected = sum(exact(ct) if i == 0 else exact(ct).T for i, ct in enumerate(cotangents)) / scale
    np.testing.assert_allclose(exact(vjp(cotangents)[0]), expected, rtol=1e-5)
    _, (moved, *rest) = jax.jvp(f, (x,), (g / 16,))
    np.testing.assert_allclose(exact(moved), exact(g) / 16 / scale, rtol=2**-2.9, atol=2**-16)
    assert all((exact(each) == exact(moved).T).all() for each in rest)
    scale_bar = jax.grad(lambda x: jnp.sum(jax_tcgemm.quantize(x).scale))(x)
    assert (scale_bar == 0).all()


def test_integers_have_no_derivatives():
    x = normal(8, 8)
    f = lambda x: jnp.sum(jax_tcgemm.dequantize(jax_tcgemm.quantize(x, INT8)))  # noqa: E731
    assert (jax.grad(f)(x) == 0).all()


WRONG = {
    "integers": ({"x": jnp.ones(3, int)}, TypeError, "x must be of a real floating-point dtype"),
    "wide dtype": ({"dtype": jnp.int16}, TypeError, "dtype must be float8_e4m3fn, float8_e5m2 or"),
    "no dtype": ({"dtype": "magic"}, TypeError, "dtype must be float8_e4m3fn, float8_e5m2 or int8"),
    "an axis": ({"axis": 2}, ValueError, "axis must be among the 2 dimensions of x"),
    "no axes": ({"axis": ()}, ValueError, "axis must be among the 2 dimensions of x"),
    "half an axis": ({"axis": 0.5}, TypeError, "axis must be an integer, several or None"),
    "both": ({"axis": 0, "block": (1, 2)}, ValueError, "axis must be None for scales of blocks"),
    "a block": ({"block": (0, 2)}, ValueError, "block must have an extent of at least 1 for each"),
    "too many": ({"block": (1, 1, 2)}, ValueError, "block must have an extent of at least 1 for"),
    "one number": ({"block": 128}, TypeError, "block must be a tuple of integers or None"),
    "a vector": (
        {"x": jnp.ones(3), "with_transpose": True},
        ValueError,
        "x must have two dimensions at least",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_quantized_is_named(name):
    changed, kind, message = WRONG[name]
    with pytest.raises(kind, match=f"^quantize: {message}.*, got .*; "):
        jax_tcgemm.quantize(**{"x": jnp.ones((2, 3))} | changed)


WRONG_ARRAYS = {
    "an array": (jnp.ones(3), TypeError, "x must be a quantized array"),
    "ranks": (QuantizedArray(jnp.ones((2, 4), E4M3), jnp.ones(2)), ValueError, "x.scale must have"),
    "blocks": (
        QuantizedArray(jnp.ones((2, 4), E4M3), jnp.ones((1, 3))),
        ValueError,
        "x.scale must have",
    ),
    "short blocks": (
        QuantizedArray(jnp.ones((2, 4), E4M3), jnp.ones((1, 3)), block=(3,)),
        ValueError,
        "x.scale must have",
    ),
    "a block": (
        QuantizedArray(jnp.ones((2, 4), E4M3), jnp.ones((1, 2)), block=2),
        TypeError,
        "x.block must be",
    ),
    "integer scales": (
        QuantizedArray(jnp.ones((2, 4), E4M3), jnp.ones((1, 1), int)),
        TypeError,
        "x.scale must be of a real",
    ),
    "zero points": (
        QuantizedArray(jnp.ones((2, 4), INT8), jnp.ones((1, 1)), jnp.ones((1, 3), INT8)),
        ValueError,
        "x.zero_point must have",
    ),
    "a table": (
        QuantizedArray(jnp.ones((2, 4), jnp.uint8), jnp.ones((1, 1)), None, "nf4"),
        TypeError,
        "x must have real numbers as its qvalue",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_what_is_no_quantized_array_is_named(name):
    x, kind, message = WRONG_ARRAYS[name]
    with pytest.raises(kind, match=f"^dequantize: {message}.*, got .*; "):
        jax_tcgemm.dequantize(x)
