"""Gated grouped products of 8 bits on a GPU: scales, sizes of groups, layouts, derivatives."""

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

CONFIG = "256x128x64_c1x2x1_co_t"
SIZES = [130, 0, 1, 400, 77, 260]
M = 900
# How tokens are quantized, and the matrices, as (groups, 2, n, k).
SCALINGS = {
    "tensor": ({}, {}),
    "rows": ({"axis": 1}, {"axis": 3}),
    "DeepSeek": ({"block": (1, 128)}, {"block": (1, 1, 128, 128)}),
    "rows of blocks": ({"block": (1, 128)}, {"block": (1, 1, 1, 128)}),
}


def draw(scaling, n=264, k=384, m=M, sizes=SIZES, dtype=jnp.float8_e4m3fn):
    """Tokens and the matrices of their groups, (groups, 2, n, k)."""
    keys = jax.random.split(jax.random.key(n + k), 2)
    x = jax.random.normal(keys[0], (m, k))
    w = jax.random.normal(keys[1], (len(sizes), 2, n, k))
    of_x, of_w = SCALINGS[scaling]
    return jax_tcgemm.quantize(x, dtype, **of_x), jax_tcgemm.quantize(w, dtype, **of_w)


def turned(w):
    """The same as (groups, k, 2, n)."""
    qvalue, scale = (jnp.moveaxis(a, -1, 1) if a.ndim > 1 else a for a in (w.qvalue, w.scale))
    block = None if w.block is None else (w.block[0], w.block[3], *w.block[1:3])
    return jax_tcgemm.QuantizedArray(qvalue, scale, None, w.qtype, block)


def gated(x, w, sizes, **how):
    return jax_tcgemm.gated_ragged_linear(x, turned(w), sizes, **how)


def exact(x, w, sizes=SIZES):
    """Gate and up of dequantized operands in float64, and those of their absolute values."""
    x, w = (np.asarray(jax_tcgemm.dequantize(a), np.float64) for a in (x, w))
    w = w.swapaxes(2, 3)
    return [[reference.rows(f(x), f(w[:, i]), sizes) for i in range(2)] for f in (np.positive, abs)]


def check(x, w, sizes=SIZES, **how):
    """Both products within what the tensor core loses of 128, relative to |A| |B|; the layer."""
    (gate, up), magnitudes = exact(x, w, sizes)
    how = {"implementation": "wgmma", "config": CONFIG} | how

    def both(gate, up):
        return gate, up, (jax.nn.silu(gate) * up).astype(jnp.bfloat16)

    run = jax.jit(functools.partial(gated, epilogue=both, **how))
    *found, layer = (np.asarray(a, np.float64) for a in run(x, w, jnp.array(sizes)))
    for got, expected, magnitude in zip(found, (gate, up), magnitudes, strict=True):
        assert (abs(got - expected) <= 2**-10 * magnitude).all(), abs(got - expected).max()
    gate, up = found
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(layer, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_extents(scaling):
    check(*draw(scaling))
    check(*draw(scaling, n=1000, k=2048))
    check(*draw(scaling, n=64, k=16, dtype=jnp.float8_e5m2))
    sizes = [0] * 60 + [1, 3, 0, 20]
    check(*draw(scaling, n=512, k=1024, m=40, sizes=sizes), sizes)


@pytest.mark.parametrize("scaling", ["rows", "DeepSeek"])
@pytest.mark.parametrize("seed", range(8))
def test_random_sizes(scaling, seed):
    rng = np.random.default_rng(seed)
    sizes, m = reference.random_sizes(rng)
    n, k = 8 * int(rng.integers(1, 70)), 16 * int(rng.integers(1, 70))
    check(*draw(scaling, n=n, k=k, m=m, sizes=sizes), sizes)


def test_large():
    """Many tiles of a block, stages used many times."""
    sizes = np.random.default_rng(0).multinomial(6000, np.full(8, 1 / 8)).tolist()
    check(*draw("DeepSeek", n=2048, k=2048, m=6100, sizes=sizes), sizes)


def test_repeats_bit_for_bit():
    x, w = draw("DeepSeek")
    run = jax.jit(functools.partial(gated, implementation="wgmma"))
    first = np.asarray(run(x, w, jnp.array(SIZES)))
    for _ in range(20):
        np.testing.assert_array_equal(run(x, w, jnp.array(SIZES)), first)


def test_integers():
    """Exact sums, of which a function is taken."""
    rng = np.random.default_rng(0)
    shapes = (M, 400), (len(SIZES), 2, 264, 400)
    x, w = (jnp.asarray(rng.integers(-128, 128, s, np.int8)) for s in shapes)
    quantized = [jax_tcgemm.QuantizedArray(a, jnp.ones((1,) * a.ndim, jnp.float32)) for a in (x, w)]
    (gate, up), _ = exact(*quantized)
    run = functools.partial(gated, epilogue=lambda gate, up: (gate, up), implementation="wgmma")
    for got, expected in zip(jax.jit(run)(*quantized, jnp.array(SIZES)), (gate, up), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_shifted_scales_are_found():
    """What `check` would not find would not be a check."""
    x, w = draw("DeepSeek")
    (gate, _), (magnitude, _) = exact(x, w)
    swapped = jax_tcgemm.QuantizedArray(w.qvalue, w.scale[:, ::-1], None, w.qtype, w.block)
    run = functools.partial(gated, epilogue=lambda gate, up: gate, implementation="wgmma")
    got = np.asarray(jax.jit(run)(x, swapped, jnp.array(SIZES)), np.float64)
    assert not (abs(got - gate) <= 2**-10 * magnitude).all()


def test_matrices_that_were_turned_are_not_copied():
    """They lie as (groups, 2, n, k), which is what the kernel reads."""
    x, w = draw("DeepSeek", n=512, k=640)
    run = jax.jit(functools.partial(gated, implementation="wgmma"))
    text = run.lower(x, w, jnp.array(SIZES)).compile().as_text()
    shapes = (f"= f8e4m3fn[{len(SIZES)},{x}]" for x in ("2,512,640", "640,2,512"))
    made = [line for shape in shapes for line in text.splitlines() if shape in line]
    assert made
    assert all("parameter(" in line or "bitcast(" in line for line in made), made


def test_gathered():
    """Tokens of 8 bits are taken before the call."""
    x, w = draw("DeepSeek")
    indices = np.random.default_rng(0).permutation(M)
    taken = jax.tree.map(lambda a: a[indices], x)
    run = jax.jit(functools.partial(gated, implementation="wgmma"))
    got = run(x, w, jnp.array(SIZES), gather_indices=jnp.asarray(indices))
    np.testing.assert_array_equal(got, run(taken, w, jnp.array(SIZES)))


@pytest.mark.parametrize("scaling", ["rows", "DeepSeek"])
def test_derivatives(scaling):
    """By scales of tokens and of matrices: as of the dequantized product."""
    x, w = draw(scaling)
    sizes = jnp.array(SIZES)
    ct = jax.random.normal(jax.random.key(3), (M, 264))

    def scaled(q, scale):
        return jax_tcgemm.QuantizedArray(q.qvalue, scale, None, q.qtype, q.block)

    def loss(s, t):
        return (gated(scaled(x, s), scaled(w, t), sizes) * ct).sum()

    def plain(s, t):
        a, b = (jax_tcgemm.dequantize(scaled(q, own)) for q, own in ((x, s), (w, t)))
        product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, precision="highest")
        gate, up = (product(a, b[:, i].mT) for i in range(2))
        return (jax.nn.silu(gate) * up * ct).sum()

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(x.scale, w.scale) for f in (loss, plain))
    for got, wanted in zip(found, expected, strict=True):
        assert jnp.linalg.norm(got - wanted) <= 1e-2 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize("recipe", ["current", "block128"])
@pytest.mark.parametrize("hidden", [384, 200])
def test_training_blocks(recipe, hidden):
    """Values and gradients of `Fp8RaggedMlp`: as on a CPU, by way of dequantized operands."""
    keys = jax.random.split(jax.random.key(hidden), 4)
    x, up, down, g = (
        jax.random.normal(key, shape) / shape[-2] ** 0.5 * 30
        for key, shape in zip(
            keys, ((M, 256), (6, 256, 2, hidden), (6, hidden, 128), (M, 128)), strict=True
        )
    )
    sizes = jnp.array(SIZES, jnp.int32)

    def step(x, up, down, g):
        block = jax_tcgemm.Fp8RaggedMlp(recipe)
        run = functools.partial(block, group_sizes=sizes, activation="silu")
        out, pullback = jax.vjp(
            lambda x, *w: run(x, dict(zip(("up", "down"), w, strict=True))), x, up, down
        )
        return out, *pullback(g)

    got = jax.jit(step)(x, up, down, g)
    assert not np.asarray(got[0])[sum(SIZES) :].any()
    with jax.default_device(jax.devices("cpu")[0]):
        sizes = jnp.array(SIZES, jnp.int32)
        expected = jax.jit(step)(*map(np.asarray, (x, up, down, g)))
    for a, b in zip(map(np.asarray, got), map(np.asarray, expected), strict=True):
        # Sums of a tensor core are off by some 1e-4 of |A| |B|, at which some of the hidden layer
        # are rounded to a neighbor in 8 bits, which is an eighth away.
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)
