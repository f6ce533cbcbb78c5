"""Symmetric products on a GPU: values, and that each result equals its own transpose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.gemm_call import device

import jax_tcgemm
from jax_tcgemm import blas, tensor

pytestmark = pytest.mark.gpu
needs_wgmma = pytest.mark.skipif(
    device().compute_capability != 90, reason="wgmma is for compute capability 9.0"
)

CONFIGS = [
    "128x128x64_c1x1x1_pp",
    "128x128x64_c2x1x1_pp",
    "128x128x64_c2x2x1_co",
    "128x256x64_c1x1x1_co",
    "128x256x64_c2x1x1_co",
    "192x192x64_c1x1x1_co",
    "192x192x64_c2x1x1_co",
    "64x256x64_c1x1x1_pp",
    "64x128x64_c4x2x1_pp",
    "128x64x64_c1x1x2_co",
    "64x64x64_c1x1x4_pp",
    "64x64x64_c1x4x1_pp",
    "192x192x64_c1x1x1_co_split2",
    "128x128x64_c1x1x1_pp_split4",
]
# Tiles of mma_sync, with the bytes of K that they have.
MMA_SYNC = {
    "64x64": (128, "w32x32_s4"),
    "128x128": (64, "w64x64_s4"),
    "128x256": (128, "w64x64_s3"),
    "256x128": (128, "w64x64_s3"),
}


@pytest.fixture
def rng():
    return np.random.default_rng()


def draw(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def poison(shape, dtype):
    """Leave NaN in freed memory, where a result of this shape is likely to be."""
    jax.block_until_ready([jnp.full(shape, np.nan, dtype) for _ in range(3)])


def check(got, x, f=lambda d: d, *, transpose=False):
    x = np.asarray(x).astype(np.float64)
    x = np.swapaxes(x, -1, -2) if transpose else x
    expected = f(x @ np.swapaxes(x, -1, -2))
    got = np.asarray(got)
    np.testing.assert_array_equal(got, np.swapaxes(got, -1, -2))
    eps = {2: 2**-8, 4: 2**-10}[got.dtype.itemsize]
    assert np.abs(got.astype(np.float64) - expected).max() <= eps * np.abs(expected).max()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("n", [256, 777, 1536, 2000])
@needs_wgmma
def test_configs(config, n, rng):
    x = draw(rng, n, 520)
    f = jax.jit(lambda x: jax_tcgemm.matmul(x, x.T, implementation="wgmma", config=config))
    assert jax_tcgemm.explain(f, x)[0].problem.symmetric
    poison((n, n), jnp.bfloat16)
    check(f(x), x)


def mma_sync_config(tile, dtype, splits=1):
    k_bytes, rest = MMA_SYNC[tile]
    config = f"{tile}x{k_bytes // jnp.dtype(dtype).itemsize}_{rest}"
    return config + (f"_k{splits}" if splits > 1 else "")


def mma_sync_gram(tile, x, splits=1, **how):
    """The Gram matrix by a config of mma_sync, whose kernel computes half of it."""
    config = mma_sync_config(tile, x.dtype, splits)
    f = jax.jit(lambda x: jax_tcgemm.gram(x, implementation="mma_sync", config=config, **how))
    (call,) = jax_tcgemm.explain(f, x)
    assert call.problem.symmetric
    assert call.config == config
    return f(x)


@pytest.mark.parametrize("tile", MMA_SYNC)
@pytest.mark.parametrize("n", [256, 777, 1536, 2000])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_mma_sync(tile, n, dtype, rng):
    if dtype == jnp.float32 and tile == "256x128":
        pytest.skip("this tile is of 16-bit types")
    # Rows of 1040 bytes or more, which 16 divides, and rows that begin anywhere.
    for k, splits in ((520, 1), (519, 1), (1032, 4)):
        x = draw(rng, n, k, dtype=dtype)
        poison((n, n), dtype)
        check(mma_sync_gram(tile, x, splits), x)
        y = draw(rng, k, n, dtype=dtype)
        poison((n, n), dtype)
        check(mma_sync_gram(tile, y, splits, transpose=True), y, transpose=True)


@pytest.mark.parametrize("tile", MMA_SYNC)
def test_mma_sync_batches(tile, rng):
    x = draw(rng, 3, 900, 264)
    poison((3, 900, 900), x.dtype)
    check(mma_sync_gram(tile, x), x)


@pytest.mark.parametrize("tile", ["64x64", "128x128", "128x256"])
@pytest.mark.parametrize("transpose", [False, True])
def test_mma_sync_integers(tile, transpose, rng):
    for shape in ((777, 512), (800, 1056)):
        x = jnp.asarray(rng.integers(-128, 127, shape), jnp.int8)
        how = {"transpose": transpose, "preferred_element_type": jnp.int32}
        wide = np.asarray(x).astype(np.int32)
        wide = wide.T if transpose else wide
        np.testing.assert_array_equal(mma_sync_gram(tile, x, **how), wide @ wide.T)


@needs_wgmma
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(513, 72), (3, 640, 96), (1000, 3000), (4096, 512)])
@pytest.mark.parametrize("transpose", [False, True])
def test_gram(dtype, shape, transpose, rng):
    x = draw(rng, *shape, dtype=dtype)
    n = shape[-1 if transpose else -2]
    poison((*shape[:-2], n, n), dtype)
    got = jax.jit(lambda x: jax_tcgemm.gram(x, transpose=transpose))(x)
    if n >= 256:
        check(got, x, transpose=transpose)
    wide = jax_tcgemm.gram(x, transpose=transpose, preferred_element_type=jnp.float32)
    assert wide.dtype == jnp.float32


@pytest.mark.parametrize("n", [512, 1000, 4096])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@needs_wgmma
def test_terms(n, dtype, rng):
    x = draw(rng, n, n, dtype=dtype)
    c = x + x.T
    own = np.asarray(c).astype(np.float64)

    @jax.jit
    def f(x, c, beta):
        return jax_tcgemm.gram(x, alpha=-0.5, beta=beta, c=c)

    (call,) = jax_tcgemm.explain(f, x, c, 3.0)
    assert call.problem.symmetric
    poison((n, n), dtype)
    check(f(x, c, 3.0), x, lambda d: -0.5 * d + 3 * own)


@needs_wgmma
def test_integers(rng):
    x = jnp.asarray(rng.integers(-128, 127, (777, 512)), jnp.int8)
    got = jax.jit(lambda x: jax_tcgemm.gram(x, preferred_element_type=jnp.int32))(x)
    wide = np.asarray(x).astype(np.int32)
    np.testing.assert_array_equal(got, wide @ wide.T)


@pytest.mark.parametrize("precision", ["BF16_BF16_F32_X3", "BF16_BF16_F32_X6"])
@needs_wgmma
def test_split_precision(precision, rng):
    x = draw(rng, 1100, 700, dtype=jnp.float32)
    got = np.asarray(jax.jit(lambda x: jax_tcgemm.gram(x, precision=precision))(x))
    wide = np.asarray(x).astype(np.float64)
    expected = wide @ wide.T
    bound = {"BF16_BF16_F32_X3": 2**-14, "BF16_BF16_F32_X6": 2**-18}[precision]
    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()


def rank_2k(x, y, transpose=False):
    """x y^T + y x^T in float64."""
    x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
    x, y = (np.swapaxes(a, -1, -2) if transpose else a for a in (x, y))
    product = x @ np.swapaxes(y, -1, -2)
    return product + np.swapaxes(product, -1, -2)


def assert_near(got, expected, eps, *, is_exactly_symmetric=True):
    got = np.asarray(got)
    if is_exactly_symmetric:
        np.testing.assert_array_equal(got, np.swapaxes(got, -1, -2))
    assert np.abs(got.astype(np.float64) - expected).max() <= eps * np.abs(expected).max()


@needs_wgmma
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("shape", [(513, 72), (3, 640, 96), (777, 700), (2048, 512), (600, 1000)])
@pytest.mark.parametrize("trans", ["N", "T"])
def test_syrk_and_syr2k(dtype, shape, trans, rng):
    """With c and without, by the concatenated product and, of the longest sums, by its halves."""
    *batch, n, k = shape
    shape = shape if trans == "N" else (*batch, k, n)
    x, y, c = draw(rng, *shape, dtype=dtype), draw(rng, *shape, dtype=dtype), draw(rng, n, n)
    c = (c + c.T).astype(dtype)
    wide_c, transpose = np.asarray(c).astype(np.float64), trans == "T"
    how = {"trans": trans, "precision": None}
    syrk, syr2k = (jax.jit(functools.partial(f, **how)) for f in (blas.syrk, blas.syr2k))
    eps = {2: 2**-8, 4: 2**-10}[jnp.dtype(dtype).itemsize]
    for f, arrays in ((syrk, [x]), (syr2k, [x, y])):
        (call,) = jax_tcgemm.explain(f, *arrays)
        is_half = call.problem.symmetric and call.implementation == "wgmma"
        assert is_half or n < 2048
        poison((*batch, n, n), dtype)
        expected = rank_2k(x, arrays[-1], transpose) / (3 - len(arrays))
        # A concatenated product adds in another order above the diagonal, within a tile.
        is_exactly_symmetric = k > n or (is_half and f is syrk)
        assert_near(f(*arrays), expected, eps, is_exactly_symmetric=is_exactly_symmetric)
        got = jax.jit(functools.partial(f, alpha=-0.5, beta=2))(*arrays, c)
        # A concatenated product whose epilogue is not fused is computed in full.
        assert_near(got, -0.5 * expected + 2 * wide_c, eps, is_exactly_symmetric=False)


@needs_wgmma
@pytest.mark.parametrize("f", [blas.syrk, blas.syr2k])
@pytest.mark.parametrize("precision", ["highest", "BF16_BF16_F32_X3", "BF16_BF16_F32_X9"])
def test_syrk_and_syr2k_of_float32(f, precision, rng):
    x, y = (draw(rng, 1100, 700, dtype=jnp.float32) for _ in range(2))
    arrays = [x] if f is blas.syrk else [x, y]
    got = jax.jit(functools.partial(f, precision=precision))(*arrays)
    expected = rank_2k(x, arrays[-1]) / (3 - len(arrays))
    bound = {"BF16_BF16_F32_X3": 2**-14}.get(precision, 2**-19)
    assert_near(got, expected, bound, is_exactly_symmetric=False)


@needs_wgmma
@pytest.mark.parametrize("lower", [False, True])
def test_syrk_reads_one_triangle_of_c(lower, rng):
    x, c = draw(rng, 777, 256), draw(rng, 777, 777)
    kept = np.tril(np.ones((777, 777), bool)) if lower else np.triu(np.ones((777, 777), bool))
    c = jnp.where(kept, c, jnp.nan)
    got = jax.jit(functools.partial(blas.syrk, lower=lower))(x, c)
    own = np.where(kept, np.asarray(c).astype(np.float64), 0)
    check(got, x, lambda d: d + own + own.T - np.diag(np.diag(own)))


@needs_wgmma
@pytest.mark.parametrize("routine", [blas.syrk, blas.syr2k])
def test_gradients_of_syrk_and_syr2k(routine, rng):
    x, y = (draw(rng, 512, 256, dtype=jnp.float32) for _ in range(2))
    arrays, weights = ([x] if routine is blas.syrk else [x, y]), draw(rng, 512, 512)

    def loss(*arrays):
        return jnp.sum(weights * routine(*arrays, alpha=0.5, precision=None))

    got = jax.jit(jax.grad(loss, tuple(range(len(arrays)))))(*arrays)
    wide = np.asarray(weights).astype(np.float64)
    for gradient, other in zip(got, arrays[::-1], strict=True):
        expected = 0.5 * (wide + wide.T) @ np.asarray(other).astype(np.float64)
        assert_near(gradient, expected, 2**-9, is_exactly_symmetric=False)


@needs_wgmma
@pytest.mark.parametrize("subscripts", ["ik,jk->ij", "ki,kj->ij", "bik,bjk->bij"])
def test_einsum_of_one_array(subscripts, rng):
    x = draw(rng, *((3, 1024, 768) if subscripts[0] == "b" else (1024, 768)))
    f = jax.jit(lambda x: tensor.einsum(subscripts, x, x, implementation="gemm"))
    (call,) = jax_tcgemm.explain(f, x)
    assert call.problem.symmetric
    poison(f(x).shape, x.dtype)
    check(f(x), x, transpose=subscripts[0] == "k")


@needs_wgmma
def test_repeated_calls_give_the_same_bits(rng):
    x = draw(rng, 3000, 1000)
    f = jax.jit(jax_tcgemm.gram)
    first = np.asarray(f(x))
    for _ in range(20):
        np.testing.assert_array_equal(first, f(x))


@needs_wgmma
def test_iteration_under_accelerate(rng):
    def iteration(x):
        a = x @ x.T
        return 3.4445 * x + (-4.775 * a + 2.0315 * (a @ a)) @ x

    x = draw(rng, 768, 1280, dtype=jnp.float32)
    x /= jnp.linalg.norm(x)
    f = jax.jit(jax_tcgemm.accelerate(iteration))
    calls = jax_tcgemm.explain(f, x)
    assert [call.problem.symmetric for call in calls] == [True, True, False]
    wide = np.asarray(x).astype(np.float64)
    expected = iteration(wide)
    assert np.abs(f(x) - expected).max() <= 2e-3 * np.abs(expected).max()
