"""Losses without logits on a GPU: values, gradients and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm

pytestmark = pytest.mark.gpu

DEPTH = 192


def reference(x, w, labels, soft_cap=None, label_smoothing=0.0, z_loss=0.0):
    z = jnp.matmul(x, w.T, precision="highest")
    z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
    lse = jax.nn.logsumexp(z, -1)
    at_label = jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
    losses = lse - at_label + z_loss * lse**2
    return losses + label_smoothing * (at_label - z.mean(-1))


def operands(tokens, vocabulary, dtype):
    keys = jax.random.split(jax.random.key(tokens), 3)
    x = jax.random.normal(keys[0], (tokens, DEPTH), dtype)
    w = jax.random.normal(keys[1], (vocabulary, DEPTH), dtype) * jnp.asarray(0.1, dtype)
    return x, w, jax.random.randint(keys[2], tokens, 0, vocabulary)


def difference(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.max(abs(np.float64(a) - np.float64(b))) / np.max(abs(np.float64(b))))
        for a, b in pairs
    )


# bfloat16 and TF32 round what is multiplied, gradients of logits among it.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("vocabulary", [1000, 1001])
@pytest.mark.parametrize("chunk_bytes", [None, 1 << 19, "stored"], indirect=True)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}, {"soft_cap": 5.0}],
    ids=["plain", "smoothed", "capped"],
)
def test_values_and_gradients(dtype, vocabulary, chunk_bytes, reduction, extra, x64):
    x, w, labels = operands(500, vocabulary, dtype)

    def ours(x, w):
        how = {"reduction": reduction, "chunk_bytes": chunk_bytes}
        return jax_tcgemm.linear_cross_entropy(x, w, labels, **how, **extra).mean()

    found = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, w)
    wide = [a.astype(jnp.float64) for a in (x, w)]
    plain = jax.value_and_grad(lambda x, w: reference(x, w, labels, **extra).mean(), (0, 1))
    expected = jax.jit(plain)(*wide)
    assert difference(found[0], expected[0]) < (1e-3 if dtype == "float32" else 1e-5)
    assert difference(found[1], expected[1]) < 1.5e-2


def test_logits_that_differ_by_ten_thousand(x64):
    x, w, labels = operands(300, 1001, "bfloat16")
    x = x.at[7].multiply(1e4)
    f = functools.partial(jax_tcgemm.linear_cross_entropy, labels=labels)
    found = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w)
    wide = [a.astype(jnp.float64) for a in (x, w)]
    expected = jax.value_and_grad(lambda x, w: reference(x, w, labels).mean(), (0, 1))(*wide)
    assert difference(found[0], expected[0]) < 1e-5
    assert difference(found[1], expected[1]) < 1.5e-2


def test_log_prob_and_entropy(x64):
    x, w, labels = operands(300, 1001, "bfloat16")
    f = functools.partial(jax_tcgemm.linear_log_prob, labels=labels, with_entropy=True)

    def plain(x, w):
        z = jax.nn.log_softmax(jnp.matmul(x, w.T, precision="highest"))
        taken = jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
        return taken, -jnp.sum(jnp.exp(z) * z, -1)

    def total(f, x, w):
        return sum(jnp.vdot(jnp.linspace(-1, 2, 300), out) for out in f(x, w))

    wide = [a.astype(jnp.float64) for a in (x, w)]
    assert difference(jax.jit(f)(x, w), plain(*wide)) < 1e-5
    found = jax.jit(jax.grad(functools.partial(total, f), (0, 1)))(x, w)
    assert difference(found, jax.grad(functools.partial(total, plain), (0, 1))(*wide)) < 1.5e-2


def test_memory_is_a_chunk():
    """Beside the operands and results: a chunk, the gradient of w in float32, and small change."""
    x = jax.ShapeDtypeStruct((16384, 768), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((50257, 768), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((16384,), jnp.int32)
    chunk = 1 << 28
    f = functools.partial(jax_tcgemm.linear_cross_entropy, chunk_bytes=chunk)
    compiled = jax.jit(jax.value_and_grad(f, (0, 1))).lower(x, w, labels).compile()
    padded = 50304 * 768
    most = chunk + 4 * padded + 2 * 2 * padded + 4 * x.size * 4 + (64 << 20)
    assert compiled.memory_analysis().temp_size_in_bytes < most


# Whole logits take 2 bytes, 4 in float32, and their gradient, which shares these, at least.
@pytest.mark.parametrize("vocabulary_axis", [0, 1])
def test_memory_of_gradients_that_make_the_logits_again(vocabulary_axis):
    tokens, depth, vocabulary = 8192, 4096, 128256
    x = jax.ShapeDtypeStruct((tokens, depth), jnp.bfloat16)
    shape = (vocabulary, depth) if vocabulary_axis == 0 else (depth, vocabulary)
    w = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    how = {"recompute": True, "vocabulary_axis": vocabulary_axis}
    f = functools.partial(jax_tcgemm.linear_cross_entropy, **how)
    compiled = jax.jit(jax.value_and_grad(f, (0, 1))).lower(x, w, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.12 * 6 * tokens * vocabulary


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vocabulary", [1000, 1001])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk_bytes", [None, 1 << 19, "stored"], indirect=True)
def test_kernels_of_heads(dtype, vocabulary, recompute, chunk_bytes, x64):
    x, w, labels = operands(500, vocabulary, dtype)

    def ours(x, w):
        how = {"vocabulary_axis": 1, "recompute": recompute, "chunk_bytes": chunk_bytes}
        return jax_tcgemm.linear_cross_entropy(x, w, labels, **how)

    value, (dx, dw) = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, w.T)
    wide = [a.astype(jnp.float64) for a in (x, w)]
    plain = jax.value_and_grad(lambda x, w: reference(x, w, labels).mean(), (0, 1))
    expected = jax.jit(plain)(*wide)
    assert difference(value, expected[0]) < (1e-3 if dtype == "float32" else 1e-5)
    assert difference((dx, dw.T), expected[1]) < 1.5e-2


@pytest.mark.parametrize("with_z_loss", [False, True], ids=["", "z-loss"])
def test_losses_that_accelerate_finds(with_z_loss, x64):
    tokens, vocabulary = 4096, 65536
    x, w, labels = operands(tokens, vocabulary, "bfloat16")

    def loss(x, w):
        z = (x @ w.T).astype(jnp.promote_types(x.dtype, jnp.float32))
        lse = jax.nn.logsumexp(z, -1)
        losses = lse - jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return jnp.mean(losses + 1e-3 * lse**2 if with_z_loss else losses)

    step = jax.value_and_grad(loss, (0, 1))
    fast = jax.jit(jax_tcgemm.accelerate(step, losses=True))
    assert "tcgemm_loss_values" in str(jax.make_jaxpr(fast)(x, w))
    stock, ours = (f.lower(x, w).compile() for f in (jax.jit(step), fast))
    stock, ours = (f.memory_analysis().temp_size_in_bytes for f in (stock, ours))
    assert ours < 0.6 * stock
    expected = jax.jit(step)(*(a.astype(jnp.float64) for a in (x, w)))
    assert difference(fast(x, w), expected) < 1.5e-2


def test_same_bits_each_time():
    x, w, labels = operands(2048, 5000, "bfloat16")
    f = jax.jit(jax.value_and_grad(jax_tcgemm.linear_cross_entropy, (0, 1)))
    first, second = f(x, w, labels), f(x, w, labels)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
