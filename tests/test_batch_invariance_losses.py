"""Log-probabilities, losses and largest logits of tokens whose bits are their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits_of_rows import rows_that_differ
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal, widened

import jax_tcgemm
from jax_tcgemm.selection.configs import order_of_sums

ROWS = 1, 2, 3, 7, 8, 13, 16, 31, 64, 129, 257
TOKENS, DEPTH, VOCABULARY = 300, 72, 517
# On a CPU XLA's loops round a cap in more than one way.
ON_CPU = ("log_prob", "entropy", "cross_entropy", "smoothed", "columns")
KINDS = (*ON_CPU, "capped")
differing = functools.partial(rows_that_differ, rows=ROWS)


def operands(dtype="float32", vocabulary=VOCABULARY):
    x, w = 3 * np.asarray(normal(TOKENS, DEPTH)), np.asarray(normal(vocabulary, DEPTH, seed=1)) / 2
    labels = np.random.default_rng(5).integers(0, vocabulary, TOKENS)
    # A token whose label is far below, which elsewhere has its whole chunk done again.
    x[200] = -40 * w[labels[200]]
    x, w = (jnp.asarray(a.astype(jnp.dtype(dtype))) for a in (x, w))
    return x, w, jnp.asarray(labels, jnp.int32)


def loss_of(kind, w, **how):
    how = {"batch_invariant": True} | how
    bias = normal(len(w), seed=3)
    f = {
        "log_prob": lambda x, y: jax_tcgemm.linear_log_prob(x, w, y, **how),
        "entropy": lambda x, y: jax_tcgemm.linear_log_prob(
            x, w, y, bias=bias, with_entropy=True, **how
        ),
        "cross_entropy": lambda x, y: jax_tcgemm.linear_cross_entropy(
            x, w, y, z_loss=1e-2, reduction="none", **how
        ),
        "smoothed": lambda x, y: jax_tcgemm.linear_cross_entropy(
            x, w, y, bias=bias, label_smoothing=0.1, ignore_index=3, reduction="none", **how
        ),
        "columns": lambda x, y: jax_tcgemm.linear_log_prob(x, w.T, y, vocabulary_axis=1, **how),
        "capped": lambda x, y: jax_tcgemm.linear_log_prob(
            x, w.T, y, soft_cap=30.0, vocabulary_axis=1, **how
        ),
    }[kind]
    return lambda x, y: f(x, y)


def with_labels(x, labels):
    """Tokens with their labels as a last column, so that one array is cut."""
    return np.concatenate([x, np.asarray(labels)[:, None].astype(x.dtype)], 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_bytes", [None, 40_000], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("kind", ON_CPU)
def test_tokens(kind, chunk_bytes, dtype):
    x, w, labels = operands(dtype, vocabulary=251)
    f = loss_of(kind, w, chunk_bytes=chunk_bytes)
    assert (
        differing(
            lambda both: f(both[:, :-1], both[:, -1].astype(jnp.int32)), with_labels(x, labels)
        )
        == []
    )
    free = loss_of(kind, w, batch_invariant=False)
    values = (jax.tree.leaves(jax.jit(g)(x, labels)) for g in (f, free))
    for got, expected in zip(*values, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ON_CPU)
@pytest.mark.parametrize("chunk_bytes", [None, 1_000_000], ids=["one chunk", "chunks"])
def test_gradients_of_tokens(kind, chunk_bytes):
    x, w, labels = operands()
    f = loss_of(kind, w, chunk_bytes=chunk_bytes)

    def gradient(both):
        x, y, ct = both[:, :DEPTH], both[:, DEPTH].astype(jnp.int32), both[:, DEPTH + 1]
        out, pull = jax.vjp(lambda x: f(x, y), x)
        return pull(jax.tree.map(lambda _: ct, out))[0]

    both = np.concatenate([with_labels(x, labels), normal(TOKENS, 1, seed=9)], 1)
    assert differing(gradient, both) == []
    free = loss_of(kind, w, batch_invariant=False)
    ours, theirs = (
        jax.jit(jax.grad(lambda x, g=g: sum(y.sum() for y in jax.tree.leaves(g(x, labels)))))(x)
        for g in (f, free)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_values_beside_float64():
    x, w, labels = operands()
    z = widened(x) @ widened(w).T
    expected = z[np.arange(TOKENS), labels] - np.logaddexp.reduce(z, -1)
    got = jax_tcgemm.linear_log_prob(x, w, labels, batch_invariant=True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_a_mean_are_those_of_tokens(reduction):
    x, w, labels = operands()

    def gradient(x, labels):
        how = {"reduction": reduction, "batch_invariant": True}
        return jax.grad(lambda x: jax_tcgemm.linear_cross_entropy(x, w, labels, **how))(x)

    scale = 256 if reduction == "mean" else 1  # a power of two, which rounds nothing
    x, labels = np.asarray(x), np.asarray(labels)
    every = np.asarray(jax.jit(gradient)(x[:256], labels[:256]))
    few = np.asarray(jax.jit(gradient)(x[:2], labels[:2]))
    np.testing.assert_array_equal(scale * every[:2], (2 if scale > 1 else 1) * few)


@pytest.mark.parametrize("chunk_bytes", [None, 40_000], ids=["one chunk", "chunks"])
def test_largest_logits(chunk_bytes):
    x, w, _ = operands()
    how = {"bias": normal(len(w), seed=3), "chunk_bytes": chunk_bytes, "batch_invariant": 64}
    assert differing(lambda x: jax_tcgemm.linear_top_k(x, w, 5, **how), x) == []


def test_order_of_tokens_and_a_block():
    x, w, labels = operands()
    order = np.random.default_rng(3).permutation(TOKENS)
    f = jax.jit(lambda x, y: jax_tcgemm.linear_log_prob(x, w, y))
    with jax_tcgemm.batch_invariant():
        found = np.asarray(f(x, labels))
        x_moved, labels_moved = (np.asarray(a)[order] for a in (x, labels))
        np.testing.assert_array_equal(found[order], f(x_moved, labels_moved))
        asked = jax_tcgemm.linear_log_prob(x, w, labels, batch_invariant=True)
        np.testing.assert_array_equal(f(x, labels), jax.jit(lambda: asked)())
        (call, *_) = jax_tcgemm.explain(f, x, labels)
        assert "as for 4096 rows" in call.why


@pytest.mark.parametrize("kind", [*KINDS, "top_k", "gradient"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_order_of_sums_on_a_gpu(kind, dtype):
    """Neither configs, nor what runs as one call, depend on how many tokens there are."""

    def calls(tokens):
        def f(x, w, y):
            if kind == "top_k":
                return jax_tcgemm.linear_top_k(x, w, 8, batch_invariant=True)
            if kind == "gradient":
                own = loss_of("log_prob", w)
                return jax.grad(lambda x: own(x, y).sum())(x)
            return loss_of(kind, w)(x, y)

        types = (
            jax.ShapeDtypeStruct((tokens, 512), dtype),
            jax.ShapeDtypeStruct((8192, 512), dtype),
            jax.ShapeDtypeStruct((tokens,), "int32"),
        )
        found = jax_tcgemm.explain(f, *types, platform="cuda")
        return [
            (c.implementation, order_of_sums(c.config) if c.implementation == "wgmma" else c.config)
            for c in found
        ]

    expected = calls(4096)
    assert expected
    assert all(name in ("wgmma", "mma_sync") for name, _ in expected)
    for tokens in (1, 2, 7, 64, 333):
        assert calls(tokens) == expected, tokens


def test_tokens_over_devices():
    x, w, labels = operands()
    x, labels = x[:64], labels[:64]
    f = jax.jit(lambda *a: jax_tcgemm.linear_log_prob(*a, batch_invariant=True))
    expected = f(x, w, labels)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
        placed = [jax.device_put(a, to) for a, to in ((x, rows), (w, whole), (labels, rows))]
        np.testing.assert_array_equal(f(*placed), expected)
        placed = [jax.device_put(a, to) for a, to in ((x, whole), (w[:512], rows), (labels, whole))]
        with pytest.raises(
            ValueError, match="linear_log_prob: batch_invariant must be False where"
        ):
            f(*placed)


def test_refusals():
    x, w, labels = operands()
    for f in (
        jax_tcgemm.linear_log_prob,
        jax_tcgemm.linear_cross_entropy,
        lambda x, w, labels, **how: jax_tcgemm.linear_top_k(x, w, 3, **how),
    ):
        with pytest.raises(ValueError, match="linear_.*: implementation must be None with batch_"):
            f(x, w, labels, implementation="host", batch_invariant=True)
        with pytest.raises(TypeError, match="linear_.*: batch_invariant must be True, False, None"):
            f(x, w, labels, batch_invariant="yes")
