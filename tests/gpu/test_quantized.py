"""Quantised arrays on a GPU: kernels that scale, blocks, integers, grouped products, training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from gpu.gemm_call import device

import jax_tcgemm
from jax_tcgemm import Fp8DotGeneral, dequantize, quantize

pytestmark = pytest.mark.gpu

needs_hopper = pytest.mark.skipif(
    device().compute_capability != 90, reason="wgmma is for compute capability 9.0"
)
E4M3, INT8 = jnp.float8_e4m3fn, jnp.int8
M, N, K = 300, 384, 1024
NT = (((1,), (1,)), ((), ()))


def exact(x):
    return np.asarray(dequantize(x) if hasattr(x, "qvalue") else x).astype(np.float64)


def error(got, expected):
    return abs(exact(got) - expected).max() / abs(expected).max()


def draw(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize(
    "how", [{}, {"axis": -1}, {"block": (1, 128)}, {"block": (128, 128)}], ids=str
)
def test_values_of_quantize(dtype, how):
    """As a CPU rounds them: the same scales, and values at most one step apart."""
    x = draw(0, M, K)
    made = jax.jit(lambda x: quantize(x, dtype, **how, with_transpose=True))(x)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = quantize(jax.device_get(x), dtype, **how, with_transpose=True)
    for got, wanted in zip(made, expected, strict=True):
        np.testing.assert_allclose(got.scale, wanted.scale, rtol=1e-6)
        apart = exact(got.qvalue) != exact(wanted.qvalue)
        assert apart.mean() < 1e-3
        np.testing.assert_allclose(exact(got.qvalue), exact(wanted.qvalue), rtol=0.13, atol=1)


@needs_hopper
@pytest.mark.parametrize("how", [{}, {"axis": -1}], ids=str)
def test_scales_are_in_the_kernel(how):
    x, w, bias = quantize(draw(0, M, K), **how), quantize(draw(1, N, K), **how), draw(2, N)
    f = jax.jit(lambda x, w: jax_tcgemm.linear(x, w.mT, bias, activation="silu"))
    z = exact(x) @ exact(w).T + exact(bias)
    assert error(f(x, w), z / (1 + np.exp(-z))) < 2**-8
    g = jax.jit(lambda x, w: jax_tcgemm.dot_general(x, w, NT, implementation="wgmma"))
    (call,) = jax_tcgemm.explain(g, x, w)
    assert call.problem.epilogue.function is not None
    assert error(g(x, w), exact(x) @ exact(w).T) < 2**-8


@needs_hopper
@pytest.mark.parametrize("blocks", [((1, 128), (128, 128)), ((1, 128), (1, 128))], ids=str)
def test_blocks(blocks):
    x, w = (quantize(draw(i, r, K), block=blocks[i]) for i, r in enumerate((M, N)))
    f = jax.jit(lambda x, w: jax_tcgemm.dot_general(x, w, NT, "highest"))
    assert error(f(x, w), exact(x) @ exact(w).T) < 2**-8


def test_integers():
    x, w = (quantize(draw(i, r, K), INT8, axis=-1) for i, r in enumerate((304, N)))
    f = jax.jit(lambda x, w: jax_tcgemm.dot_general(x, w, NT))
    # Sums are exact: only the scaling rounds.
    assert error(f(x, w), exact(x) @ exact(w).T) < 1e-6


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("how", [{"axis": -1}, {"block": (128, 128)}], ids=str)
def test_weights_alone(dtype, how):
    x, w = draw(0, M, K, dtype=jnp.bfloat16), quantize(draw(1, N, K), dtype, **how)
    f = jax.jit(lambda x, w: jax_tcgemm.dot_general(x, w, NT, "highest"))
    assert error(f(x, w), exact(x) @ exact(w).T) < 1e-4


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_gated(dtype):
    x = quantize(draw(0, M, K), dtype, axis=-1)
    weights = quantize(draw(1, K, 2, N), dtype, axis=0)
    f = jax.jit(lambda x, w: jax_tcgemm.gated_linear(x, w, activation="relu"))
    gate, up = (exact(x) @ exact(weights)[:, i] for i in range(2))
    assert error(f(x, weights), np.maximum(gate, 0) * up) < 2**-7


@pytest.mark.parametrize("how", [{"axis": 1}, {}], ids=str)
def test_grouped_weights(how):
    x, w = draw(0, 500, 256, dtype=jnp.bfloat16), quantize(draw(1, 4, 256, 128), **how)
    sizes = jnp.array([100, 0, 250, 130])
    f = jax.jit(lambda x, w: jax_tcgemm.ragged_dot(x, w, sizes))
    assert error(f(x, w), ragged_reference.rows(exact(x), exact(w), sizes)) < 1e-4


@needs_hopper
@pytest.mark.parametrize("recipe", ["current", "block128"])
def test_training(recipe):
    x, w, g = draw(0, 512, K), draw(1, K, N), draw(2, 512, N)
    numbers = (((1,), (0,)), ((), ()))

    @jax.jit
    def f(x, w, g):
        out, pullback = jax.vjp(lambda x, w: Fp8DotGeneral(recipe)(x, w, numbers), x, w)
        return out, *pullback(g)

    wide = [exact(x) @ exact(w), exact(g) @ exact(w).T, exact(x).T @ exact(g)]
    for got, expected in zip(f(x, w, g), wide, strict=True):
        assert np.linalg.norm(exact(got) - expected) < 0.1 * np.linalg.norm(expected)
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = f(*jax.device_get((x, w, g)))
    for got, expected in zip(f(x, w, g), on_cpu, strict=True):
        assert error(got, exact(expected)) < 2**-7
