"""combine_rows on a GPU: its kernels against float64, and their derivatives against JAX's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm

pytestmark = pytest.mark.gpu

ours = functools.partial(jax_tcgemm.combine_rows, implementation="simt")


def operands(num_rows, columns, targets, degree, dtype, seed=0):
    rng = np.random.default_rng(seed)
    rows = jnp.asarray(rng.standard_normal((num_rows, columns)), dtype)
    indices = rng.integers(-2, num_rows + 2, (targets, degree), np.int32)
    return rows, indices, rng.standard_normal((targets, degree)).astype(np.float32)


def expected(rows, indices, weights):
    rows = np.asarray(rows, np.float64)
    inside = (indices >= 0) & (indices < len(rows))
    taken = np.where(inside[..., None], rows[np.where(inside, indices, 0)], 0)
    return np.einsum("tj,tjn->tn", np.asarray(weights, np.float64), taken)


# Rows of whole vectors and not, of one, of many blocks; degrees around what is unrolled.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("num_rows", "columns", "targets", "degree"),
    [
        (50, 64, 30, 2),
        (50, 4096, 33, 8),
        (50, 1096, 33, 3),
        (7, 7, 300, 1),
        (64, 333, 5, 5),
        (20, 8, 1, 37),
        (3, 1, 9, 4),
    ],
    ids=str,
)
def test_values_and_gradients(num_rows, columns, targets, degree, dtype):
    rows, indices, weights = operands(num_rows, columns, targets, degree, dtype)
    eps = float(jnp.finfo(dtype).eps)
    # Freed memory is not zero: what is not written would be NaN.
    jnp.full((targets, columns), jnp.nan, dtype).block_until_ready().delete()
    got = ours(rows, indices, weights)
    want = expected(rows, indices, weights)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=eps, atol=1e-4)
    np.testing.assert_array_equal(ours(rows, indices, weights), got)

    ct = jnp.asarray(np.random.default_rng(5).standard_normal(want.shape), dtype)
    _, vjp = jax.vjp(lambda r, w: ours(r, indices, w), rows, weights)
    rows_bar, weights_bar = jax.jit(vjp)(ct)
    wide = np.asarray(ct, np.float64)
    inside = (indices >= 0) & (indices < num_rows)
    want_rows = np.zeros(rows.shape)
    for t, j in zip(*np.nonzero(inside), strict=True):
        want_rows[indices[t, j]] += float(weights[t, j]) * wide[t]
    np.testing.assert_allclose(np.asarray(rows_bar, np.float64), want_rows, rtol=eps, atol=1e-4)
    taken = np.asarray(rows, np.float64)[np.where(inside, indices, 0)]
    want_weights = np.where(inside, np.einsum("tjn,tn->tj", taken, wide), 0)
    np.testing.assert_allclose(weights_bar, want_weights, rtol=1e-4, atol=1e-4 * columns**0.5)
    again = jax.jit(vjp)(ct)
    jax.tree.map(np.testing.assert_array_equal, again, (rows_bar, weights_bar))


def test_unique_indices():
    rows, _, weights = operands(512, 256, 128, 4, "bfloat16")
    indices = np.random.default_rng(3).permutation(512).reshape(128, 4)

    def grad(**kwargs):
        return jax.grad(
            lambda r: jnp.sum(ours(r, indices, weights, **kwargs).astype("float32") ** 2)
        )

    np.testing.assert_array_equal(grad(unique_indices=True)(rows), grad()(rows))


def test_vmap():
    rows, indices, weights = operands(50, 72, 30, 2, "float32")
    many = jnp.stack([rows, 2 * rows, -rows])
    got = jax.vmap(lambda r: ours(r, indices, weights))(many)
    for one, r in zip(got, many, strict=True):
        np.testing.assert_allclose(one, expected(r, indices, weights), rtol=1e-5, atol=1e-4)
