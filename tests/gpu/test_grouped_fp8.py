"""Grouped products of 8-bit floats on a GPU: scales, layouts, derivatives, layers, sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference
from gpu.gemm_call import device

import jax_tcgemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        device().compute_capability != 90, reason="wgmma is for compute capability 9.0"
    ),
]

CONFIGS = "128x256x64_c2x1x1_co_t", "128x64x64_c1x1x1_co_t"
SIZES = [130, 0, 1, 400, 77, 260]
M = 900
# How tokens are quantized, and the matrices, as (groups, n, k).
SCALINGS = {
    "tensor": ({}, {}),
    "rows": ({"axis": 1}, {"axis": 2}),
    "DeepSeek": ({"block": (1, 128)}, {"block": (128, 128)}),
    "rows of blocks": ({"block": (1, 128)}, {"block": (1, 128)}),
}


def draw(scaling, n=264, k=384, m=M, sizes=SIZES, dtype=jnp.float8_e4m3fn):
    """Tokens and the matrices of their groups, (groups, k, n)."""
    keys = jax.random.split(jax.random.key(n + k), 2)
    x = jax.random.normal(keys[0], (m, k))
    w = jax.random.normal(keys[1], (len(sizes), n, k))
    of_x, of_w = SCALINGS[scaling]
    return jax_tcgemm.quantize(x, dtype, **of_x), jax_tcgemm.quantize(w, dtype, **of_w).mT


def exact(x, w, sizes=SIZES):
    """The product of dequantized operands in float64, and that of their absolute values."""
    x, w = (np.asarray(jax_tcgemm.dequantize(a), np.float64) for a in (x, w))
    return reference.rows(x, w, sizes), reference.rows(abs(x), abs(w), sizes)


def product(x, w, sizes=SIZES, **how):
    how = {"preferred_element_type": jnp.float32, "implementation": "wgmma"} | how
    run = jax.jit(functools.partial(jax_tcgemm.ragged_dot, **how))
    return np.asarray(run(x, w, jnp.array(sizes)), np.float64)


def check(x, w, sizes=SIZES, **how):
    """Within what the tensor core loses of 128 products, relative to |A| |B|."""
    expected, magnitude = exact(x, w, sizes)
    got = product(x, w, sizes, **how)
    assert (abs(got - expected) <= 2**-10 * magnitude).all(), abs(got - expected).max()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config, scaling):
    check(*draw(scaling), config=config)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_other_extents(scaling):
    check(*draw(scaling, n=1000, k=2048))
    check(*draw(scaling, n=64, k=16, dtype=jnp.float8_e5m2), config=CONFIGS[1])
    check(
        *draw(scaling, n=512, k=7168, m=40, sizes=[0] * 60 + [1, 3, 0, 20]),
        [0] * 60 + [1, 3, 0, 20],
    )


@pytest.mark.parametrize("scaling", ["rows", "DeepSeek"])
@pytest.mark.parametrize("seed", range(8))
def test_random_sizes(scaling, seed):
    rng = np.random.default_rng(seed)
    sizes, m = reference.random_sizes(rng)
    n, k = (
        8 * int(rng.integers(1, 70)),
        (128 if scaling == "DeepSeek" else 16) * int(rng.integers(1, 9)),
    )
    check(*draw(scaling, n=n, k=k, m=m, sizes=sizes), sizes)


@pytest.mark.parametrize("config", CONFIGS)
def test_integers(config):
    """Exact sums, alone and with scales of rows and columns."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-128, 128, s, np.int8) for s in ((M, 400), (len(SIZES), 264, 400)))
    expected = reference.rows(x, w.swapaxes(1, 2), SIZES)
    how = {"preferred_element_type": jnp.int32, "config": config}
    got = product(jnp.asarray(x), jnp.asarray(w).mT, **how)
    np.testing.assert_array_equal(got, expected)
    scales = rng.uniform(0.5, 2, (M, 1)), rng.uniform(0.5, 2, (len(SIZES), 264, 1))
    x, w = (
        jax_tcgemm.QuantizedArray(a, jnp.float32(s)) for a, s in zip((x, w), scales, strict=True)
    )
    check(x, w.mT, config=config)


def test_sums_may_stay_in_the_tensor_core():
    x, w = draw("rows")
    expected, magnitude = exact(x, w)
    got = product(x, w, precision="ANY_F8_ANY_F8_F32_FAST_ACCUM")
    assert (abs(got - expected) <= 2**-8 * magnitude).all()


def test_shifted_scales_are_found():
    """What `check` would not find would not be a check."""
    x, w = draw("DeepSeek")
    expected, magnitude = exact(x, w)
    shifted = jax_tcgemm.QuantizedArray(x.qvalue, jnp.roll(x.scale, 1, 1), block=x.block)
    assert not (abs(product(shifted, w) - expected) <= 2**-10 * magnitude).all()


def test_matrices_that_were_turned_are_not_copied():
    """They lie as (groups, n, k), which is what the kernel reads."""
    x, w = draw("DeepSeek", n=512, k=512)
    kept = w.mT

    def call(x, kept, sizes):
        return jax_tcgemm.ragged_dot(x, kept.mT, sizes, implementation="wgmma")

    text = jax.jit(call).lower(x, kept, jnp.array(SIZES)).compile().as_text()
    made = [x for x in text.splitlines() if f"= f8e4m3fn[{len(SIZES)},512,512]" in x]
    assert made
    assert all("parameter(" in x or "bitcast(" in x for x in made), made


@pytest.mark.parametrize("scaling", ["rows", "DeepSeek"])
def test_layers(scaling):
    """Bias and activation of a product, and both matrices of a gated one."""
    x, w = draw(scaling)
    bias = jax.random.normal(jax.random.key(1), (len(SIZES), 264))
    sizes = jnp.array(SIZES)
    of_row = np.repeat(np.arange(len(SIZES)), SIZES)
    acc, _ = exact(x, w)
    layer = functools.partial(jax_tcgemm.ragged_dot, activation="silu")
    got = np.asarray(jax.jit(lambda *a: layer(*a[:3], bias=a[3]))(x, w, sizes, bias), np.float64)
    z = acc[: len(of_row)] + np.asarray(bias, np.float64)[of_row]
    expected = np.zeros_like(acc)
    expected[: len(of_row)] = z / (1 + np.exp(-z))
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2 * abs(acc).max() / 8)


@pytest.mark.parametrize("scaling", ["rows", "DeepSeek"])
def test_gradient_of_tokens(scaling):
    """Through the scales, which multiply tokens: as of the dequantized product."""
    x, w = draw(scaling)
    sizes = jnp.array(SIZES)
    ct = jax.random.normal(jax.random.key(3), (M, 264))

    def loss(scale, x, w):
        own = jax_tcgemm.QuantizedArray(x.qvalue, scale, block=x.block)
        return (jax_tcgemm.ragged_dot(own, w, sizes) * ct).sum()

    def plain(scale, x, w):
        own = jax_tcgemm.QuantizedArray(x.qvalue, scale, block=x.block)
        dense = jax_tcgemm.dequantize(own), jax_tcgemm.dequantize(w)
        return (jax.lax.ragged_dot(*dense, sizes, precision="highest") * ct).sum()

    got, expected = (jax.jit(jax.grad(f))(x.scale, x, w) for f in (loss, plain))
    assert jnp.linalg.norm(got - expected) <= 1e-2 * jnp.linalg.norm(expected)


# --- sums over the tokens of each group -----------------------------------------------------------

LAST = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (1,), ())
# How both operands are quantized, tokens last.
SCALINGS_OF_SUMS = {
    "tensor": ({}, {}),
    "rows": ({"axis": -1}, {"axis": -1}),
    "blocks": ({"block": (1, 128)}, {"block": (1, 128)}),
    "large blocks": ({"block": (1, 128)}, {"block": (128, 128)}),
}


def check_sums(scaling, m=264, n=384, tokens=M, sizes=SIZES, dtype=jnp.float8_e4m3fn, **how):
    keys = jax.random.split(jax.random.key(m + n), 2)
    x, y = (
        jax_tcgemm.quantize(jax.random.normal(key, (rows, tokens)), dtype, **own)
        for key, rows, own in zip(keys, (m, n), SCALINGS_OF_SUMS[scaling], strict=True)
    )
    # Nothing of another group's tokens, nor of those of none, is in a sum.
    spoilt = x.qvalue.at[:, sum(sizes) :].set(jnp.nan)
    x = jax_tcgemm.QuantizedArray(spoilt, x.scale, block=x.block)
    how = {"preferred_element_type": jnp.float32, "implementation": "wgmma"} | how
    run = jax.jit(functools.partial(jax_tcgemm.ragged_dot_general, **how), static_argnums=3)
    got = np.asarray(run(x, y, jnp.array(sizes), LAST), np.float64)
    x, y = (np.asarray(jax_tcgemm.dequantize(a), np.float64).T for a in (x, y))
    expected = reference.contraction(x, y, sizes)
    magnitude = reference.contraction(abs(x), abs(y), sizes)
    assert (abs(got - expected) <= 2**-10 * magnitude).all(), abs(got - expected).max()


@pytest.mark.parametrize("scaling", SCALINGS_OF_SUMS)
def test_sums_of_groups(scaling):
    check_sums(scaling)
    check_sums(scaling, m=72, n=1000, dtype=jnp.float8_e5m2)
    check_sums(scaling, m=2048, n=512, tokens=9000, sizes=[0, 4000, 1, 17, 3500, 0, 900])


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
@pytest.mark.parametrize("seed", range(8))
def test_sums_of_random_groups(scaling, seed):
    rng = np.random.default_rng(seed)
    sizes, tokens = reference.random_sizes(rng)
    m, n = (int(rng.integers(1, 600)) for _ in range(2))
    check_sums(scaling, m=m, n=n, tokens=tokens, sizes=sizes)


def test_sums_of_many_batches():
    """Each with tokens of its own, and scales of them."""
    x = jax_tcgemm.quantize(jax.random.normal(jax.random.key(0), (3, 72, 400)), block=(1, 128))
    y = jax_tcgemm.quantize(jax.random.normal(jax.random.key(1), (3, 88, 400)), block=(1, 128))
    sizes = jnp.array([[100, 300], [400, 0], [7, 200]])
    product = functools.partial(jax_tcgemm.ragged_dot_general, ragged_dot_dimension_numbers=LAST)
    got = jax.jit(jax.vmap(lambda *a: product(*a[:2], group_sizes=a[2])))(x, y, sizes)
    x, y = (np.asarray(jax_tcgemm.dequantize(a), np.float64).swapaxes(1, 2) for a in (x, y))
    for i in range(3):
        expected = reference.contraction(x[i], y[i], sizes[i])
        magnitude = reference.contraction(abs(x[i]), abs(y[i]), sizes[i])
        assert (abs(got[i] - expected) <= 2**-10 * magnitude).all()


@pytest.mark.parametrize("recipe", ["current", "block128"])
def test_training(recipe):
    """A step's gradients are near those of the products in full."""
    x = jax.random.normal(jax.random.key(0), (M, 256), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (len(SIZES), 256, 384), jnp.bfloat16)
    g = jax.random.normal(jax.random.key(2), (M, 384), jnp.bfloat16)
    sizes = jnp.array(SIZES)
    product = jax_tcgemm.Fp8RaggedDot(recipe)
    for f, tolerance in ((product, 0.06), (jax_tcgemm.ragged_dot, 0.01)):
        out, pullback = jax.vjp(lambda x, w, f=f: f(x, w, sizes), x, w)
        x_bar, w_bar = jax.jit(pullback)(g)
        a, b, c = (np.asarray(each, np.float64) for each in (x, w, g))
        for got, expected in (
            (out, reference.rows(a, b, SIZES)),
            (x_bar, reference.rows(c, b.swapaxes(1, 2), SIZES)),
            (w_bar, reference.contraction(a, c, SIZES)),
        ):
            error = np.linalg.norm(np.asarray(got, np.float64) - expected)
            assert error < tolerance * np.linalg.norm(expected)
