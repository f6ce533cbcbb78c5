"""Products of 8-bit floats with scales of blocks on a GPU: every config, shapes, derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_formats import FORMATS, of_format
from gpu.gemm_call import device, implementations, split_base

import jax_tcgemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        device().compute_capability != 90, reason="wgmma is for compute capability 9.0"
    ),
]

BLOCKS = {
    "DeepSeek": ((1, 128), (128, 128)),
    "rows": ((1, 128), (1, 128)),
    "large": ((128, 128), (128, 256)),
    "odd": ((3, 384), (40, 128)),
}
# With parts by columns, by rows, swapped, ping-pong, clusters along each dimension.
CONFIGS = (
    "128x256x64_c2x1x1_co",
    "256x128x64_c1x1x1_co_t",
    "128x128x64_c2x2x1_co",
    "64x96x64_c1x1x1_pp_t",
    "64x256x64_c1x1x1_pp",
    "64x64x64_c1x1x4_pp",
)


def draw(m, n, k, blocks, batch=(), seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    x, w = (
        jax.random.normal(key, (*batch, rows, k)).astype(jnp.float8_e4m3fn)
        for key, rows in zip(keys, (m, n), strict=False)
    )
    s, t = (
        jnp.exp(jax.random.normal(key, (*batch, -(-rows // block[0]), -(-k // block[1]))))
        for key, rows, block in zip(keys[2:], (m, n), blocks, strict=True)
    )
    return x, w, s, t


def exact(x, w, s, t, blocks):
    wide = []
    for a, scales, block in ((x, s, blocks[0]), (w, t, blocks[1])):
        scales = np.repeat(np.repeat(np.asarray(scales, np.float64), block[0], -2), block[1], -1)
        own = np.asarray(a).astype(np.float64)
        wide.append(own * scales[..., : own.shape[-2], : own.shape[-1]])
    return wide[0] @ wide[1].swapaxes(-1, -2), abs(wide[0]) @ abs(wide[1]).swapaxes(-1, -2)


def product(blocks, **how):
    how = {"lhs_block": blocks[0], "rhs_block": blocks[1], "implementation": "wgmma"} | how
    return jax.jit(functools.partial(jax_tcgemm.scaled_matmul, **how))


def check(arguments, blocks, **how):
    """Within what the tensor core loses of 128 products, relative to |A| |B|."""
    expected, magnitude = exact(*arguments, blocks)
    got = np.asarray(product(blocks, **how)(*arguments)).astype(np.float64)
    assert (abs(got - expected) <= 2**-10 * magnitude).all(), abs(got - expected).max()


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config, blocks):
    check(draw(333, 417, 1100, BLOCKS[blocks]), BLOCKS[blocks], config=config)


def test_every_config():
    """What runs promoted sums runs scaled ones."""
    blocks, ran = BLOCKS["DeepSeek"], 0
    arguments = draw(270, 300, 640, blocks)
    for config in implementations()["wgmma"]:
        if split_base(config):
            continue
        try:
            check(arguments, blocks, config=config)
        except ValueError as error:
            assert "too many accumulators" in str(error)  # noqa: PT017
        else:
            ran += 1
    assert ran > 40


def test_split_k():
    blocks = BLOCKS["DeepSeek"]
    check(draw(40, 300, 4096, blocks), blocks, config="64x128x64_c1x1x1_pp_split4")


@pytest.mark.parametrize("shape", [(1, 4096, 7168), (16, 512, 2048), (128, 2112, 7168)])
def test_few_rows(shape):
    blocks = BLOCKS["DeepSeek"]
    check(draw(*shape, blocks), blocks)


def test_batches_and_odd_k():
    blocks = BLOCKS["DeepSeek"]
    check(draw(130, 200, 1000, blocks, batch=(3,)), blocks)
    check(draw(130, 200, 333, blocks), blocks)


def test_shifted_scales_are_found():
    """What `check` would not find would not be a check."""
    blocks = BLOCKS["DeepSeek"]
    x, w, s, t = draw(200, 256, 1024, blocks)
    expected, magnitude = exact(x, w, s, t, blocks)
    got = np.asarray(product(blocks)(x, w, jnp.roll(s, 1, 1), t)).astype(np.float64)
    assert not (abs(got - expected) <= 2**-10 * magnitude).all()


def test_promotion_is_needed():
    """Sums that stay in the tensor core over all of K are worse than those of 128 of it."""
    x, w = (
        abs(jax.random.normal(jax.random.key(i), (256, 16384))).astype(jnp.float8_e4m3fn)
        for i in range(2)
    )
    blocks = BLOCKS["DeepSeek"]
    ones = jnp.ones((256, 128)), jnp.ones((2, 128))
    expected, _ = exact(x, w, *ones, blocks)
    numbers = (((1,), (1,)), ((), ()))
    fast = jax_tcgemm.dot_general(
        *(x, w, numbers, "ANY_F8_ANY_F8_F32_FAST_ACCUM", jnp.float32), implementation="wgmma"
    )
    got = product(blocks)(x, w, *ones)
    errors = [abs(np.asarray(y) - expected).max() / expected.max() for y in (got, fast)]
    assert 4 * errors[0] < errors[1]


def test_quantized_layers_and_derivatives():
    keys = jax.random.split(jax.random.key(4), 3)
    x, w, g = (jax.random.normal(key, (256, 256)) for key in keys)
    w8 = jax_tcgemm.quantize(w, block=(128, 128))

    def f(x):
        x8 = jax_tcgemm.quantize(x, block=(1, 128))
        return jax_tcgemm.linear(x8, w8.mT, activation="silu")

    y, pullback = jax.vjp(jax.jit(f), x)
    wide = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    sigmoid = 1 / (1 + np.exp(-wide))
    assert np.linalg.norm(np.asarray(y) - wide * sigmoid) < 0.06 * np.linalg.norm(wide * sigmoid)
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    expected = (np.asarray(g, np.float64) * slope) @ np.asarray(w, np.float64)
    got = np.asarray(pullback(g)[0])
    assert np.linalg.norm(got - expected) < 0.1 * np.linalg.norm(expected)


# --- gated products -------------------------------------------------------------------------------

# Those that gate in their kernel, halves of their tiles being of 128 and 64 columns; others.
GATED = (
    "128x256x64_c2x1x1_co",
    "128x128x64_c2x1x1_pp",
    "64x128x64_c2x1x1_pp",
    "128x128x64_c2x2x1_co",
    "64x96x64_c1x1x1_pp_t",
    "128x128x64_c2x1x1_pp_split3",
)


def check_gated(m, n, k, blocks, **how):
    """Both products as results of the call, within what `check` allows, and the layer of them."""
    x, _, s, _ = draw(m, n, k, blocks)
    both = [draw(m, n, k, blocks, seed=i)[1::2] for i in (1, 2)]
    w, t = (jnp.stack([own[i] for own in both]) for i in (0, 1))
    bias = jax.random.normal(jax.random.key(9), (n,))

    def layer(gate, up, bias):
        return (jax.nn.silu(gate + bias) * up).astype(jnp.bfloat16), gate, up, up.max(-1)

    @jax.jit
    def f(x, s, w, t, bias):
        lhs = jax_tcgemm.QuantizedArray(x, s, block=blocks[0])
        w, t = (jnp.moveaxis(a, -1, 0) for a in (w, t))
        rhs = jax_tcgemm.QuantizedArray(w, t, block=(blocks[1][1], 1, blocks[1][0]))
        given = {"epilogue": layer, "epilogue_operands": (bias,), "implementation": "wgmma"}
        return jax_tcgemm.gated_linear(lhs, rhs, **given, **how)

    h, *products, largest = f(x, s, w, t, bias)
    for got, (own, scales) in zip(products, both, strict=True):
        expected, magnitude = exact(x, own, s, scales, blocks)
        got = np.asarray(got).astype(np.float64)
        assert (abs(got - expected) <= 2**-10 * magnitude).all(), abs(got - expected).max()
    gate, up = (np.asarray(a, np.float64) for a in products)
    np.testing.assert_array_equal(largest, np.asarray(products[1]).max(-1))
    z = gate + np.asarray(bias, np.float64)
    # exp and division are the GPU's fast ones.
    expected = z * (1 + np.tanh(z / 2)) / 2 * up
    np.testing.assert_allclose(np.asarray(h).astype(np.float64), expected, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("config", GATED)
def test_gated_configs(config, blocks):
    check_gated(333, 417, 1100, BLOCKS[blocks], config=config)


@pytest.mark.parametrize("shape", [(1, 512, 1024), (130, 1408, 2048), (4096, 2048, 2048)])
def test_gated_products_of_what_is_chosen(shape):
    check_gated(*shape, BLOCKS["DeepSeek"])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 512, 1024), (300, 1000, 1088), (1024, 2048, 4096)], ids=str)
def test_block_formats(name, shape):
    """Exact operands in bfloat16 and sums in float32,."""
    operands, expected = of_format(name, *shape)
    jax.block_until_ready(jnp.full(shape[:2], jnp.nan))
    got = jax.jit(jax_tcgemm.scaled_matmul)(*operands)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * abs(expected).max())
    rounded = functools.partial(jax_tcgemm.scaled_matmul, preferred_element_type=jnp.bfloat16)
    got = np.asarray(jax.jit(rounded)(*operands)).astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2**-8 * abs(expected).max())
