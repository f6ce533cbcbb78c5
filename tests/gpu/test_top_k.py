"""The largest logits on a GPU, beside `lax.top_k` of all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tcgemm

pytestmark = pytest.mark.gpu


# Products of small integers are exact in any order, and so are the order of logits and their ties.
def operands(tokens, depth, vocabulary, dtype):
    keys = jax.random.split(jax.random.key(vocabulary), 2)
    shapes = (tokens, depth), (vocabulary, depth)
    return [
        jax.random.randint(key, shape, -4, 5).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("vocabulary", [5000, 5001])
@pytest.mark.parametrize("vocabulary_axis", [0, 1])
@pytest.mark.parametrize("k", [1, 8, 50])
@pytest.mark.parametrize("chunk_bytes", [None, 1 << 20], ids=["one chunk", "chunks"])
def test_values_and_indices(dtype, vocabulary, vocabulary_axis, k, chunk_bytes):
    x, w = operands(300, 64, vocabulary, dtype)
    how = {"vocabulary_axis": vocabulary_axis, "chunk_bytes": chunk_bytes}
    f = jax.jit(functools.partial(jax_tcgemm.linear_top_k, k=k, **how))
    values, indices = f(x, w.T if vocabulary_axis else w)
    z = jnp.matmul(x.astype("float32"), w.T.astype("float32"), precision="highest")
    expected = lax.top_k(z, k)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(indices, expected[1])


def test_gradients(x64):
    x, w = operands(300, 64, 5001, "bfloat16")
    weights = jnp.linspace(-1, 2, 300 * 8).reshape(300, 8)

    def total(f, x, w):
        return jnp.vdot(weights, f(x, w)[0])

    def plain(x, w):
        return lax.top_k(jnp.matmul(x, w.T, precision="highest"), 8)

    ours = functools.partial(jax_tcgemm.linear_top_k, k=8, chunk_bytes=1 << 20)
    found = jax.jit(jax.grad(functools.partial(total, ours), (0, 1)))(x, w)
    wide = [a.astype(jnp.float64) for a in (x, w)]
    expected = jax.grad(functools.partial(total, plain), (0, 1))(*wide)
    for a, b in zip(found, expected, strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.max(abs(a - b)) < 1e-2 * np.max(abs(b))
