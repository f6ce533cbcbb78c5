"""Weights quantized to block formats, bit for bit what NumPy and ml_dtypes make of them."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from packed_cases import unpack

import jax_tcgemm
from jax_tcgemm import pack_mxfp4, pack_mxfp8, pack_nvfp4


def codes_of(x):
    """By ml_dtypes, which rounds to nearest, ties to even."""
    x = np.clip(x.astype(np.float32), np.float32(-6), np.float32(6))
    return x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def mxfp4(w):
    """Codes, scales and no column scale of a weight (k, n)."""
    quotients, scale = _mx(w, 2)
    return codes_of(quotients), scale, None


def mxfp8(w, dtype="float8_e4m3fn"):
    """Elements and scales of a weight (k, n), and no column scale."""
    largest = float(ml_dtypes.finfo(dtype).max)
    quotients, scale = _mx(w, int(np.log2(largest)))
    return quotients.clip(-largest, largest).astype(np.float32).astype(dtype), scale, None


def _mx(w, largest_exponent):
    """A weight divided by the scales of its blocks, of the shape of w, and the bits of these."""
    blocks = w.astype(np.float64).reshape(-1, 32, w.shape[1])
    _, exponent = np.frexp(abs(blocks).max(1))
    exponent = np.where(blocks.any(1), exponent - 1 - largest_exponent, -127).clip(-127)
    return (blocks / 2.0 ** exponent[:, None]).reshape(w.shape), (exponent + 127).astype(np.uint8)


def nvfp4(w):
    """The same of NVFP4, computed in float32."""
    blocks, f32 = w.astype(np.float32).reshape(-1, 16, w.shape[1]), np.float32
    largest = abs(blocks).max(1)
    whole = max(largest.max() / f32(6 * 448), f32(2**-117))
    scale = np.clip(largest / (f32(6) * whole), f32(2**-9), f32(448))
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
    q = codes_of(blocks / (scale.astype(np.float32) * whole)[:, None])
    return q.reshape(w.shape), scale.view(np.uint8), whole


E5M2 = {"dtype": "float8_e5m2"}
PACKS = {
    "mxfp4": (pack_mxfp4, mxfp4, 32),
    "mxfp8": (pack_mxfp8, mxfp8, 32),
    "mxfp8_e5m2": (functools.partial(pack_mxfp8, **E5M2), functools.partial(mxfp8, **E5M2), 32),
    "nvfp4": (pack_nvfp4, nvfp4, 16),
}


def drawn(dtype, *shape, seed=0):
    """Blocks of many magnitudes, some of zeros."""
    rng = np.random.default_rng([seed, *shape])
    w = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 5, (*shape[:-1], 1)) * 1.7
    w[..., 16:48, :3] = 0
    return w.astype(jnp.dtype(dtype))


def check(w, reference, expected):
    """The same codes and scales as of a weight (k, n)."""
    q, scale, column_scale = reference(expected)
    own = unpack(w)
    shape = (-1, expected.shape[1])
    got = np.asarray(own.q).reshape(expected.shape)
    np.testing.assert_array_equal(got.view(np.uint8), q.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(own.scale).reshape(shape).view(np.uint8), scale)
    if column_scale is None:
        assert own.column_scale is None
    else:
        np.testing.assert_array_equal(np.asarray(own.column_scale), column_scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PACKS)
def test_bit_for_bit(name, dtype):
    pack, reference, size = PACKS[name]
    w = drawn(dtype, 160, 40)
    for f in (pack, jax.jit(pack)):
        packed = f(jnp.asarray(w))
        assert (packed.shape, packed.format.group_size) == ((160, 40), size)
        check(packed, reference, w)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_ties_and_saturation(name):
    """All middles between codes, what is above 6, and numbers beside these."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 6.5, 7, 7.5, 0], np.float32)
    beside = [np.nextafter(middles, np.float32(far)) for far in (0, 9)]
    values = np.concatenate([middles, *beside])
    values = np.concatenate([values, -values])
    w = np.full((32, len(values)), 7.75 if name == "mxfp4" else 6, np.float32)
    w[1], w[17] = values, values
    if name == "nvfp4":
        w[1::16] = np.clip(w[1::16], -6, 6)
        w[0, 0] = 6 * 448  # A tensor scale of 1.
    check(PACKS[name][0](jnp.asarray(w)), PACKS[name][1], w)


@pytest.mark.parametrize("name", PACKS)
def test_extreme_magnitudes(name):
    pack, reference, _ = PACKS[name]
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    for least, largest in ((0, 0), (tiny, 8 * tiny), (2.0**-110, 2.0**100), (1, huge)):
        w = drawn("float32", 64, 24) * 0 + least
        w[5, 7] = -largest
        w[40:, 3] = largest / 3
        check(pack(jnp.asarray(w)), reference, w)


@pytest.mark.parametrize("name", PACKS)
def test_gated_and_stacked(name):
    pack, reference, _ = PACKS[name]
    w = drawn("float32", 64, 48)
    gated = pack(jnp.asarray(w.reshape(64, 2, 24)))
    assert gated.shape == (64, 2, 24)
    np.testing.assert_array_equal(gated.values, pack(jnp.asarray(w)).values)
    experts = np.stack([drawn("float32", 64, 48, seed=seed) * (1 + seed) for seed in range(3)])
    how = functools.partial(pack, stacked=True)
    for packed in (
        how(jnp.asarray(experts)),
        jax.jit(how)(jnp.asarray(experts)),
        jax.vmap(pack)(jnp.asarray(experts)),
        jax_tcgemm.stack_packed([pack(jnp.asarray(w)) for w in experts]),
    ):
        assert packed.shape == (3, 64, 48)
        for i, w in enumerate(experts):
            check(jax.tree.map(lambda leaf, i=i: leaf[i], packed), reference, w)
    packed = how(jnp.asarray(experts.reshape(3, 64, 2, 24)))
    assert packed.shape == (3, 64, 2, 24)
    np.testing.assert_array_equal(packed.values, how(jnp.asarray(experts)).values)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_ties_and_saturation_of_float8(name):
    """Middles between two floats, numbers beside these, and numbers above the largest float."""
    pack, reference, _ = PACKS[name]
    dtype = "float8_e5m2" if name.endswith("e5m2") else "float8_e4m3fn"
    numbers = np.arange(0x78, dtype=np.uint8).view(dtype).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
    largest = float(ml_dtypes.finfo(dtype).max)
    w = np.full((32, len(values) + 1), largest, np.float32)
    w[1, :-1], w[17, :-1], w[1, -1] = values, -values, largest * 1.1
    check(pack(jnp.asarray(w)), reference, w)


PRODUCT_ERRORS = [
    ("mxfp4", 0.05, 0.14),
    ("nvfp4", 0.05, 0.11),
    ("mxfp8", 0.01, 0.04),
    ("mxfp8_e5m2", 0.03, 0.08),
]


@pytest.mark.parametrize(("name", "least", "most"), PRODUCT_ERRORS)
def test_error_of_a_product(name, least, most):
    """About a tenth of random weights in 4 bits; a shifted scale is far off."""
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((256, 64)), rng.standard_normal((8, 256))
    packed = PACKS[name][0](jnp.asarray(w))
    x = jnp.asarray(x, jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ w

    def error(packed):
        got = np.asarray(jax_tcgemm.matmul(x, packed), np.float64)
        return np.linalg.norm(got - exact) / np.linalg.norm(exact)

    assert least < error(packed) < most
    assert error(PACKS[name][0](jnp.asarray(np.roll(w, 32, 0)))) > 1


def test_values_that_are_not_finite_in_jit_are_nan():
    w = np.ones((64, 16), np.float32)
    w[3, 4], w[50, 5] = np.inf, np.nan
    got = np.asarray(jax.jit(pack_mxfp4)(jnp.asarray(w)).dequantize(jnp.float32))
    expected = w.copy()
    expected[:32, 4] = expected[32:, 5] = np.nan
    np.testing.assert_array_equal(got, expected)
    got = np.asarray(jax.jit(pack_mxfp8)(jnp.asarray(w)).dequantize(jnp.float32))
    assert np.isnan(got[:32, 4]).all()
    assert np.isnan(got[32:, 5]).all()
    got = np.asarray(jax.jit(pack_nvfp4)(jnp.asarray(w)).dequantize(jnp.float32))
    assert np.isnan(got).all()


W = jnp.ones((48, 16))
REFUSALS = {
    "integers": (
        lambda: pack_mxfp4(W.astype(jnp.int8)),
        "pack_mxfp4: w must be of a real floating-point dtype, got w.dtype=int8",
    ),
    "rows": (lambda: pack_mxfp4(W), "pack_mxfp4: k must be a multiple of 32, got k=48 of w.shape="),
    "rows of experts": (
        lambda: pack_nvfp4(jnp.ones((16, 8, 16)), stacked=True),
        "pack_nvfp4: k must be a multiple of 16, got k=8 of w.shape=(16, 8, 16)",
    ),
    "no experts": (
        lambda: pack_nvfp4(W, stacked=True),
        "pack_nvfp4: w must have 3 dimensions at least and an element with stacked=True, got",
    ),
    "a vector": (lambda: pack_mxfp4(W[0]), "pack_mxfp4: w must have 2 dimensions at least"),
    "infinity": (
        lambda: pack_nvfp4(W.at[3, 4].set(jnp.inf)),
        "pack_nvfp4: w must be finite in float32, got w with NaN or infinity",
    ),
    "a dtype": (
        lambda: pack_mxfp8(jnp.ones((32, 16)), dtype=jnp.float8_e4m3b11fnuz),
        "pack_mxfp8: dtype must be float8_e4m3fn or float8_e5m2, got",
    ),
    "a flag": (
        lambda: pack_nvfp4(W, stacked="yes"),
        "pack_nvfp4: stacked must be True or False, got stacked of type str",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name):
    call, says = REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(says)}"):
        call()
