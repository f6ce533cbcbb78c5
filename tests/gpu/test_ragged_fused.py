"""Grouped products with an epilogue and gathered tokens in the kernel, asked for by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference

import jax_tcgemm

pytestmark = pytest.mark.gpu

M, K, N, NUM_ROWS = 840, 136, 264, 300
# Of ten groups: one program serves them all.
SIZES = {
    "mixed": [1, 0, 17, 64, 33, 129, 300, 2, 255, 0],
    "one group": [0, 801, 0, 0, 0, 0, 0, 0, 0, 0],
    "none": [0] * 10,
    "more than there are": [100, 0, 200] + [300] * 7,
}
FUNCTIONS = {"relu": lambda x: np.maximum(x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x))}


def integers(*shape, seed, dtype="bfloat16"):
    """Small ones, which every dtype holds and every accumulator adds without rounding."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 2, shape, endpoint=True).astype(jnp.dtype(dtype))


def expected(activation, tokens, weights, bias, sizes):
    """In float64; rows of no group are zero."""
    halves = weights.shape[2:-1]
    flat = weights.reshape(len(weights), weights.shape[1], -1)
    z = reference.rows(tokens, flat, sizes).reshape(len(tokens), *halves, -1)
    out = np.zeros((len(tokens), weights.shape[-1]))
    for group, (begin, end) in enumerate(reference.bounds(sizes, len(tokens))):
        own = z[begin:end] + np.asarray(bias[group], np.float64)
        f = FUNCTIONS[activation]
        out[begin:end] = f(own[:, 0]) * own[:, 1] if halves else f(own)
    return out


def taken(lhs, indices):
    inside = (indices >= 0) & (indices < len(lhs))
    return np.where(inside[:, None], lhs[np.where(inside, indices, 0)], 0)


def run(lhs, weights, sizes, bias=None, gated=False, **kwargs):
    f = jax_tcgemm.gated_ragged_linear if gated else jax_tcgemm.ragged_dot
    return f(lhs, weights, sizes, bias=bias, implementation="wgmma", **kwargs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
def test_values(gathered, gated, dtype):
    halves = (2,) if gated else ()
    lhs = integers(NUM_ROWS if gathered else M, K, seed=1, dtype=dtype)
    weights = integers(10, K, *halves, N, seed=2, dtype=dtype)
    bias = integers(10, *halves, N, seed=3, dtype="float32")
    indices = np.random.default_rng(4).integers(-3, NUM_ROWS + 3, M, np.int32)
    tokens = taken(lhs, indices) if gathered else lhs
    activation, out = ("sigmoid", dtype) if gated else ("relu", "float32")
    call = jax.jit(
        functools.partial(
            run,
            gated=gated,
            activation=activation,
            gather_indices=indices if gathered else None,
            preferred_element_type=out,
        )
    )
    for sizes in SIZES.values():
        # Freed memory is not zero: what is not written would be NaN.
        jnp.full((M, N), jnp.nan, out).block_until_ready().delete()
        got = call(lhs, weights, jnp.array(sizes), bias)
        want = expected(activation, tokens, weights, bias, sizes)
        if gated:
            eps = float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=eps, atol=1e-4)
        else:
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(call(lhs, weights, jnp.array(sizes), bias), got)
    assert call._cache_size() == 1


@pytest.mark.parametrize("k", [8, 64, 72, 1000])
@pytest.mark.parametrize("n", [8, 128, 520])
def test_edges_of_weights(k, n):
    """Columns that end inside a tile, k inside a block, of both matrices of a gated product."""
    sizes = [3, 130, 0, 7]
    lhs, weights = integers(150, k, seed=1), integers(4, k, 2, n, seed=2)
    indices = np.random.default_rng(4).permutation(150).astype(np.int32)
    kwargs = {"activation": "relu", "preferred_element_type": "float32", "gated": True}
    for gather in (None, indices):
        tokens = lhs if gather is None else lhs[gather]
        want = expected("relu", tokens, weights, np.zeros((4, 2, n)), sizes)
        got = run(lhs, weights, jnp.array(sizes), gather_indices=gather, **kwargs)
        np.testing.assert_array_equal(got, want)


def test_many_groups():
    sizes = np.random.default_rng(0).multinomial(700, np.full(512, 1 / 512))
    lhs, weights = integers(M, 72, seed=1), integers(512, 72, 2, 64, seed=2)
    kwargs = {"activation": "relu", "preferred_element_type": "float32", "gated": True}
    want = expected("relu", lhs, weights, np.zeros((512, 2, 64)), sizes)
    got = run(lhs, weights, jnp.array(sizes), **kwargs)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
def test_nan_stays_in_its_group(gathered):
    sizes = [100, 0, 65, 200, 33]
    lhs, weights = integers(400, K, seed=1), integers(5, K, 2, N, seed=2)
    bias = integers(5, 2, N, seed=3, dtype="float32")
    bad_lhs, bad_weights, bad_bias = lhs.copy(), weights.copy(), bias.copy()
    bad_lhs[100:165], bad_lhs[398:] = np.nan, np.inf
    bad_weights[1:3], bad_bias[1:3] = np.nan, np.inf
    indices = np.arange(400, dtype=np.int32) if gathered else None
    f = functools.partial(run, sizes=jnp.array(sizes), gated=True, gather_indices=indices)
    got, clean = f(bad_lhs, bad_weights, bias=bad_bias), f(lhs, weights, bias=bias)
    others = np.r_[0:100, 165:400]
    np.testing.assert_array_equal(np.asarray(got)[others], np.asarray(clean)[others])


@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_gradients(gated, gathered):
    """Those by kernels asked for by name beside those by XLA around bare products."""
    halves = (2,) if gated else ()
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), "bfloat16")  # noqa: E731
    args = normal(NUM_ROWS, K), normal(4, K, *halves, N) / 8, normal(4, *halves, N)
    indices = rng.integers(0, NUM_ROWS, NUM_ROWS, np.int32) if gathered else None
    f = jax_tcgemm.gated_ragged_linear if gated else jax_tcgemm.ragged_dot

    def grads(implementation):
        def loss(x, w, b):
            out = f(
                x,
                w,
                jnp.array([90, 0, 150, 40]),
                activation="silu",
                bias=b,
                gather_indices=indices,
                implementation=implementation,
            )
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)

    for got, want in zip(*(jax.tree.leaves(grads(name)) for name in ("wgmma", None)), strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()


def test_rows_gathered_from_nothing_are_zero():
    weights, bias = integers(4, K, N, seed=2), integers(4, N, seed=3, dtype="float32")
    kwargs = {"activation": "relu", "preferred_element_type": "float32"}
    sizes, indices = jnp.array([9, 0, 30, 24]), np.arange(70, dtype=np.int32)
    got = run(jnp.zeros((0, K), "bfloat16"), weights, sizes, bias, gather_indices=indices, **kwargs)
    want = expected("relu", np.zeros((70, K)), weights, bias, sizes)
    np.testing.assert_array_equal(got, want)


def test_vmap_over_experts_and_tokens():
    lhs, weights = integers(2, 70, K, seed=1), integers(2, 3, K, N, seed=2)
    bias, sizes = integers(2, 3, N, seed=3, dtype="float32"), np.array([[30, 0, 20], [1, 60, 9]])
    f = functools.partial(run, activation="relu", preferred_element_type="float32")
    got = jax.vmap(f)(lhs, weights, jnp.asarray(sizes), bias)
    for i in range(2):
        want = expected("relu", lhs[i], weights[i], bias[i], sizes[i])
        np.testing.assert_array_equal(got[i], want)


@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
def test_what_is_chosen(gathered):
    """It, for groups of more than a few tokens."""
    lhs, weights = integers(M, K, seed=1), integers(4, K, 2, N, seed=2)
    f = functools.partial(
        jax_tcgemm.gated_ragged_linear, gather_indices=jnp.arange(M) if gathered else None
    )
    (call,) = jax_tcgemm.explain(f, lhs, weights, jnp.array([10, 0, 30, 24]), platform="cuda")
    assert (call.implementation, call.config) == ("wgmma", "256x128x64_c1x2x1_co_t")
