"""`linear_cross_entropy` and `linear_log_prob`: losses over logits that are never all there."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loss_reference import Reference
from random_arrays import draw

import jax_tcgemm
from jax_tcgemm.losses import softmax as sm
from jax_tcgemm.losses.chunks import num_chunks
from jax_tcgemm.losses.how import How
from jax_tcgemm.problem.call_options import CallOptions

TOKENS, DEPTH, VOCABULARY = 37, 24, 101
# Before a fixture changes it.
FEW_LOGITS = sm._FEW_LOGITS


def operands(dtype="float64", tokens=TOKENS, vocabulary=VOCABULARY, seed=0):
    rng = np.random.default_rng([seed, 7])
    labels = jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32)
    x, w = draw((tokens, DEPTH), dtype, seed), draw((vocabulary, DEPTH), dtype, seed + 1)
    w = jnp.asarray(np.asarray(w) * np.asarray(0.5, w.dtype))
    return x, w, draw((vocabulary,), dtype, seed + 2), labels


def assert_close(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(n, np.float64) for n in (a, b))
        assert np.max(abs(a - b)) <= tolerance * np.max(abs(b))


@pytest.fixture(autouse=True)
def none_are_stored(monkeypatch):
    """Losses are computed in chunks, whatever their size, as those of many logits are."""
    monkeypatch.setattr(sm, "_FEW_LOGITS", 0)


@pytest.fixture(params=[0, VOCABULARY * TOKENS], ids=["summed", "stored"])
def few_logits(request, monkeypatch, none_are_stored):
    """Once with logits in chunks, once with all of them stored."""
    monkeypatch.setattr(sm, "_FEW_LOGITS", request.param)


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "smoothed", "z_loss", "capped", "all"])
@pytest.mark.parametrize("chunk_bytes", [None, 4000, "stored"], indirect=True)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_loss_and_gradients_in_float64(how, chunk_bytes, with_bias, x64):
    extra = {
        "plain": {},
        "smoothed": {"label_smoothing": 0.1},
        "z_loss": {"z_loss": 1e-2},
        "capped": {"soft_cap": 5.0},
        "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 5.0},
    }[how]
    x, w, bias, labels = operands()
    weights = jnp.asarray(abs(np.asarray(draw((TOKENS,), "float64", 5))))
    moving = (0, 1, 2, 3) if with_bias else (0, 1, 3)

    def by_us(reduction, x, w, bias, weights):
        return jax_tcgemm.linear_cross_entropy(
            *(x, w, labels),
            bias=bias if with_bias else None,
            weights=weights,
            reduction=reduction,
            chunk_bytes=chunk_bytes,
            **extra,
        )

    arguments = x, w, bias, weights
    expected = Reference(x, w, bias if with_bias else None, labels, **extra)
    mean, gradients = expected.mean(weights)
    gradients = *gradients, (expected.losses - mean) / np.sum(np.asarray(weights))
    value = mean, [gradients[i] for i in moving]
    found = jax.jit(jax.value_and_grad(functools.partial(by_us, "mean"), moving))(*arguments)
    assert_close(found, value, 1e-11)

    def by_rows(x, w, bias, weights):
        return jnp.sum(by_us("none", x, w, bias, weights)) / jnp.sum(weights)

    assert_close(jax.jit(jax.value_and_grad(by_rows, moving))(*arguments), value, 1e-11)


@pytest.mark.parametrize("chunk_bytes", [None, 4000, "stored"], indirect=True)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_log_prob_and_entropy_in_float64(chunk_bytes, soft_cap, x64):
    x, w, bias, labels = operands(seed=3)
    cts = draw((2, TOKENS), "float64", 9)

    def by_us(x, w, bias):
        return jax_tcgemm.linear_log_prob(
            *(x, w, labels),
            **{"bias": bias, "soft_cap": soft_cap, "chunk_bytes": chunk_bytes},
            with_entropy=True,
        )

    expected = Reference(x, w, bias, labels, soft_cap)
    found, vjp = jax.vjp(jax.jit(by_us), x, w, bias)
    assert_close(found, (-expected.losses, expected.entropies), 1e-12)
    of_losses, of_entropies = np.asarray(cts)
    gradients = vjp((jnp.asarray(of_losses), jnp.asarray(of_entropies)))
    assert_close(gradients, expected.gradients(-of_losses, of_entropies), 1e-11)


# Gradients of logits are rounded to 8 bits of mantissa, and so is what they are multiplied by.
@pytest.mark.usefixtures("few_logits")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 1e-2), ("float32", 2e-5)]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_dtypes(dtype, tolerance, reduction):
    x, w, _, labels = operands(dtype, seed=11)

    def loss(f, x, w):
        return jnp.sum(f(x, w)) if reduction != "mean" else jnp.mean(f(x, w))

    ours = functools.partial(jax_tcgemm.linear_cross_entropy, labels=labels, reduction=reduction)
    value, gradients = jax.jit(jax.value_and_grad(functools.partial(loss, ours), (0, 1)))(x, w)
    plain = Reference(x, w, labels=labels)
    count = TOKENS if reduction == "mean" else 1
    expected = plain.losses.sum() / count, plain.gradients(1 / count)[:2]
    assert value.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [x.dtype, w.dtype]
    assert_close(value, expected[0], 2e-6)
    assert_close(gradients, expected[1], tolerance)


@pytest.mark.usefixtures("few_logits")
def test_batch_dimensions_and_vmap(x64):
    x, w, _, labels = operands(tokens=12)
    x, labels = np.asarray(x).reshape(3, 4, DEPTH), np.asarray(labels).reshape(3, 4)
    f = functools.partial(jax_tcgemm.linear_cross_entropy, reduction="none")
    assert_close(jax.jit(f)(x, w, labels), Reference(x, w, labels=labels).losses, 1e-12)
    gradient = jax.grad(lambda x, own: jax_tcgemm.linear_cross_entropy(x, w, own))
    alone = jax.jit(gradient)
    each = np.stack([alone(x[i], labels[i]) for i in range(3)])
    assert_close(jax.jit(jax.vmap(gradient))(x, labels), each, 1e-12)


@pytest.mark.usefixtures("few_logits")
def test_second_derivatives(x64):
    x, w, _, labels = operands(tokens=9, vocabulary=70)
    t = draw(x.shape, "float64", 4)

    def ours(x):
        return jax_tcgemm.linear_cross_entropy(x, w, labels, chunk_bytes=4000)

    @jax.jit
    def products(x, t):
        reverse = jax.grad(lambda x: jnp.vdot(jax.grad(ours)(x), t))(x)
        return reverse, jax.jvp(jax.grad(ours), (x,), (t,))[1]

    plain = Reference(x, w, labels=labels)
    dz = np.asarray(t) @ plain.w.T
    dp = plain.p * (dz - (plain.p * dz).sum(-1, keepdims=True))
    expected = dp @ plain.w / len(dp)
    assert_close(products(x, t), (expected, expected), 1e-9)


# In chunks of 64 entries the last one has others.
@pytest.mark.parametrize(
    ("chunk_bytes", "vocabulary_axis", "recompute"),
    [
        *((None, 0, True), (19000, 0, True), (None, 1, False), (19000, 1, False), (19000, 1, True)),
        *(("stored", 0, True), ("stored", 1, False)),
    ],
    indirect=["chunk_bytes"],
)
@pytest.mark.parametrize("extra", [{"label_smoothing": 0.1, "z_loss": 0.01}, {"soft_cap": 5.0}])
def test_kernels_of_heads_and_gradients_made_again(
    chunk_bytes, vocabulary_axis, recompute, extra, x64
):
    x, w, bias, labels = operands(vocabulary=201)

    def ours(x, w, bias):
        return jax_tcgemm.linear_cross_entropy(
            *(x, w, labels),
            **{"bias": bias, "chunk_bytes": chunk_bytes, "vocabulary_axis": vocabulary_axis},
            recompute=recompute,
            **extra,
        )

    value, (dx, dw, db) = Reference(x, w, bias, labels, **extra).mean()
    w, dw = (w, dw) if vocabulary_axis == 0 else (np.asarray(w).T, dw.T)
    found = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(x, w, bias)
    assert_close(found, (value, (dx, dw, db)), 1e-11)


# --- tokens that are unlike others ----------------------------------------------------------------


@pytest.mark.usefixtures("few_logits")
def test_logits_that_differ_by_ten_thousand():
    x, w, _, labels = operands("float32", seed=20)
    x = np.array(x)
    x[5] *= 1e4
    x[8] *= -3e3
    x = jnp.asarray(x)
    f = jax.value_and_grad(lambda f, x, w: f(x, w).mean(), (1, 2))
    ours = functools.partial(jax_tcgemm.linear_cross_entropy, labels=labels, reduction="none")
    plain = Reference(x, w, labels=labels)
    losses = plain.losses
    assert losses.max() > 1e4
    mean, gradients = plain.mean()
    expected = mean, gradients[:2]
    assert_close(ours(x, w), losses, 1e-6)
    assert_close(jax.jit(functools.partial(ours, chunk_bytes=4000))(x, w), losses, 1e-6)
    assert_close(f(ours, x, w), expected, 1e-4)
    mean = functools.partial(jax_tcgemm.linear_cross_entropy, labels=labels)
    for chunk_bytes in (None, 4000):
        fused = functools.partial(mean, chunk_bytes=chunk_bytes)
        assert_close(jax.jit(functools.partial(f, fused))(x, w), expected, 1e-4)


@pytest.mark.usefixtures("few_logits")
def test_ignored_tokens_contribute_nothing():
    x, w, bias, labels = operands("float32", seed=30)
    kept = np.arange(TOKENS) % 3 != 1
    x, labels = np.array(x), np.asarray(labels)
    x[~kept], given = np.nan, np.where(kept, labels, -100)

    def loss(reduction, x, w, bias):
        return jax_tcgemm.linear_cross_entropy(
            x, w, given, bias=bias, ignore_index=-100, reduction=reduction
        ).sum()

    for reduction in ("mean", "sum", "none"):
        f = functools.partial(loss, reduction)
        value, (dx, dw, db) = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, w, bias)
        dx = np.asarray(dx)
        plain = Reference(x[kept], w, bias, labels[kept])
        count = kept.sum() if reduction == "mean" else 1
        expected = plain.losses.sum() / count, *plain.gradients(1 / count)
        assert_close((value, dx[kept], dw, db), expected, 1e-4)
        np.testing.assert_array_equal(dx[~kept], 0)
    nothing = np.full(TOKENS, -100)
    f = functools.partial(jax_tcgemm.linear_cross_entropy, labels=nothing, ignore_index=-100)
    value, gradients = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w)
    assert value == 0
    assert not any(np.any(np.asarray(g)) for g in gradients)


@pytest.mark.usefixtures("few_logits")
def test_all_of_the_vocabulary_but_one_taken_out():
    x, w, _, _ = operands("float32", seed=40)
    bias = np.full(VOCABULARY, -np.inf, np.float32)
    bias[7] = 3.0
    labels = np.full(TOKENS, 7)
    f = functools.partial(jax_tcgemm.linear_cross_entropy, labels=labels, bias=bias)
    value, gradients = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w)
    assert abs(float(value)) < 1e-6
    assert max(abs(np.asarray(g)).max() for g in gradients) < 1e-6
    elsewhere = jax_tcgemm.linear_cross_entropy(x, w, labels + 1, bias=bias, reduction="none")
    np.testing.assert_array_equal(elsewhere, np.inf)
    log_prob, entropy = jax_tcgemm.linear_log_prob(x, w, labels, bias=bias, with_entropy=True)
    np.testing.assert_allclose(log_prob, 0, atol=1e-6)
    np.testing.assert_allclose(entropy, 0, atol=1e-6)


@pytest.mark.usefixtures("few_logits")
def test_nan_stays_in_its_token():
    x, w, _, labels = operands("float32", seed=50)
    f = jax.value_and_grad(lambda x: jax_tcgemm.linear_cross_entropy(x, w, labels, reduction="sum"))
    f = jax.jit(f)
    x = np.array(x)
    clean = np.asarray(f(x)[1])
    x[4, 2] = np.nan
    dx = np.asarray(f(x)[1])
    losses = np.asarray(jax_tcgemm.linear_cross_entropy(x, w, labels, reduction="none"))
    others = np.arange(TOKENS) != 4
    assert np.isnan(losses[4])
    assert np.all(np.isfinite(losses[others]))
    assert np.all(np.isnan(dx[4]))
    np.testing.assert_array_equal(dx[others], clean[others])


@pytest.mark.usefixtures("few_logits")
def test_labels_out_of_range():
    x, w, _, labels = operands("float32")
    by_rows = jax.jit(functools.partial(jax_tcgemm.linear_cross_entropy, reduction="none"))
    for wrong in (-1, VOCABULARY, 2**31 - 1):
        given = np.array(labels)
        given[3] = wrong
        given = jnp.asarray(given)
        rule = f"^linear_cross_entropy: labels must be from 0 up to 100, got {wrong} among labels"
        with pytest.raises(ValueError, match=rule):
            jax_tcgemm.linear_cross_entropy(x, w, given)
        losses = by_rows(x, w, given)
        assert np.isnan(losses).tolist() == (np.arange(TOKENS) == 3).tolist()


def test_empty():
    _, w, _, _ = operands("float32")
    x, labels = jnp.zeros((0, DEPTH)), jnp.zeros(0, jnp.int32)
    value, gradients = jax.value_and_grad(jax_tcgemm.linear_cross_entropy, (0, 1))(x, w, labels)
    assert value == 0
    assert [g.shape for g in gradients] == [x.shape, w.shape]
    assert not np.any(np.asarray(gradients[1]))
    assert jax_tcgemm.linear_log_prob(x, w, labels).shape == (0,)


# --- what runs ------------------------------------------------------------------------------------


def _products(f, *arguments):
    return jax_tcgemm.explain(f, *arguments, platform="cuda")


@pytest.mark.parametrize(
    ("tokens", "depth", "vocabulary"),
    [(8192, 4096, 128256), (4096, 3584, 262144), (16384, 768, 50257)],
)
def test_on_hopper_each_product_is_one_call(tokens, depth, vocabulary):
    x = jax.ShapeDtypeStruct((tokens, depth), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((vocabulary, depth), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    loss = jax_tcgemm.linear_cross_entropy
    # Where a loss is beyond all measure two more products run, under a condition.
    forward = _products(loss, x, w, labels)
    assert len(forward) == 3
    both = _products(jax.grad(loss, (0, 1)), x, w, labels)
    assert len(both) == 5
    for call in (*forward, *both):
        assert call.implementation == "wgmma"
        assert "unfused" not in call.why
    columns = -(-vocabulary // 64) * 64
    assert all(str(columns) in str(call.problem) for call in both)


@pytest.mark.parametrize(
    ("tokens", "depth", "vocabulary", "is_stored"),
    [
        (398, 80, 7523, True),
        (121, 1128, 32006, True),
        (289, 1216, 17790, False),
    ],
)
def test_losses_of_a_few_million_logits_store_them(
    tokens, depth, vocabulary, is_stored, monkeypatch
):
    monkeypatch.setattr(sm, "_FEW_LOGITS", FEW_LOGITS)
    w = jax.ShapeDtypeStruct((vocabulary, depth), jnp.bfloat16)
    how = How(CallOptions(""), None, 0.0, 0.0, None, None)
    assert sm.stores_logits(how, tokens, w) == is_stored


def test_few_logits_are_stored(monkeypatch):
    monkeypatch.setattr(sm, "_FEW_LOGITS", TOKENS * VOCABULARY)
    _, w, _, _ = operands("float32")
    how = How(CallOptions(""), None, 0.0, 0.0, None, None)
    assert sm.stores_logits(how, TOKENS, w)
    assert not sm.stores_logits(how, TOKENS + 1, w)
    for asked in (
        {"chunk_bytes": 1 << 30},
        {"options": CallOptions("", "xla")},
        {"axis_name": "model"},
    ):
        assert not sm.stores_logits(dataclasses.replace(how, **asked), TOKENS, w)


def test_nothing_has_the_size_of_the_logits():
    tokens, depth, vocabulary = 2048, 64, 4096
    x, w = jnp.ones((tokens, depth)), jnp.ones((vocabulary, depth))
    labels = jnp.zeros(tokens, jnp.int32)
    chunk = 128 * vocabulary * 4

    def largest(f):
        compiled = jax.jit(jax.grad(f, (0, 1))).lower(x, w, labels).compile()
        sizes = re.findall(r"(?:f32|bf16|pred)\[([\d,]+)\]", compiled.as_text())
        return max(np.prod([int(n) for n in size.split(",")]) for size in sizes)

    for reduction in ("mean", "none"):

        def loss(x, w, labels, chunk_bytes, own=reduction):
            return jax_tcgemm.linear_cross_entropy(
                x, w, labels, reduction=own, chunk_bytes=chunk_bytes
            ).sum()

        assert largest(functools.partial(loss, chunk_bytes=chunk)) <= 128 * vocabulary
        assert largest(functools.partial(loss, chunk_bytes=None)) >= tokens * vocabulary


def test_how_many_chunks():
    how = How(CallOptions(""), None, 0.0, 0.0, None, None)
    most = 4 * 128256 * 4096  # 2 bytes of 8192 are 4 bytes of 4096.
    assert num_chunks(how, 8192, 128256, jnp.bfloat16, most) == 1
    assert num_chunks(how, 8193, 128256, jnp.bfloat16, most) == 2
    assert num_chunks(how, 16384, 50304, jnp.float32, 1 << 30) == 4
    own = dataclasses.replace(how, chunk_bytes=1 << 20)
    assert num_chunks(own, 16384, 1024, jnp.bfloat16, 1 << 30) == 32


def test_gradients_that_are_not_asked_for_are_not_made():
    x, w, _, labels = operands("float32")
    for argnums, count in ((0, 4), (1, 4), ((0, 1), 5)):
        gradient = jax.grad(jax_tcgemm.linear_cross_entropy, argnums)
        assert len(jax_tcgemm.explain(gradient, x, w, labels)) == count


# --- several devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 3000], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.1}, {"soft_cap": 5.0, "z_loss": 0.01}])
def test_vocabulary_and_tokens_divided_by_hand(check_vma, chunk_bytes, extra, x64):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, w, bias, labels = operands(tokens=32, vocabulary=104)
    given = np.array(labels)
    given[:5] = -1  # More of one device's tokens than of the other's.

    def own(x, w, bias, labels):
        return jax_tcgemm.linear_cross_entropy(
            *(x, w, labels),
            **{"bias": bias, "ignore_index": -1, "chunk_bytes": chunk_bytes},
            **{"axis_name": "model", "token_axis_name": "data"},
            **extra,
        )

    divided = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(P("data"), P("model"), P("model"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )

    f = jax.jit(jax.value_and_grad(divided, (0, 1, 2)))
    expected = Reference(x, w, bias, labels, **extra).mean(np.arange(32) >= 5)
    assert_close(f(x, w, bias, given), expected, 1e-11)


@pytest.mark.parametrize("check_vma", [True, False])
def test_log_prob_of_a_divided_vocabulary(check_vma, x64):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    x, w, bias, labels = operands(tokens=20, vocabulary=104)

    def own(x, w, bias, labels):
        return jax_tcgemm.linear_log_prob(
            x, w, labels, bias=bias, axis_name="model", with_entropy=True
        )

    divided = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(P(), P("model"), P("model"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )

    cts = np.asarray(draw((2, 20), "float64", 3))

    def mixed(x, w, bias):
        return jnp.vdot(jnp.stack(divided(x, w, bias, labels)), cts)

    plain = Reference(x, w, bias, labels)
    value = np.vdot(cts, (-plain.losses, plain.entropies))
    found = jax.jit(jax.value_and_grad(mixed, (0, 1, 2)))(x, w, bias)
    assert_close(found, (value, plain.gradients(-cts[0], cts[1])), 1e-11)


@pytest.mark.usefixtures("few_logits")
@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P()])
def test_automatic_axes(spec, x64):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, w, _, labels = operands(tokens=32, vocabulary=104)
    f = jax.value_and_grad(jax_tcgemm.linear_cross_entropy, (0, 1))
    expected = jax.jit(f)(x, w, labels)
    x, labels = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, labels))
    w = jax.device_put(w, NamedSharding(mesh, spec))
    assert_close(jax.jit(f)(x, w, labels), expected, 1e-11)


@pytest.mark.usefixtures("few_logits")
@pytest.mark.parametrize(
    ("specs", "batch"),
    [
        ((P("data"), P("model"), P("data")), ()),
        ((P("data"), P(None, "data"), P()), ()),
        ((P(), P(("data", "model")), P()), ()),
        ((P(None, None, "model"), P("data"), P("model")), (4,)),
        ((P("data", "model"), P("model"), P("data", "model")), (4,)),
    ],
    ids=["tokens and vocabulary", "features", "both axes", "labels", "all axes for tokens"],
)
def test_explicit_axes(specs, batch, x64):
    vocabulary_axis = len(batch)  # Either one, whatever is divided.
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w, bias, labels = operands(tokens=32, vocabulary=104)
    x = np.asarray(x).reshape(*batch, -1, DEPTH)
    labels = np.asarray(labels).reshape(*batch, -1)
    given = labels.copy()
    given[..., :5] = -1
    weights = jnp.asarray(abs(np.asarray(draw(labels.shape, "float64", 5))))

    def ours(x, w, bias, labels, weights):
        how = {"bias": bias, "ignore_index": -1, "z_loss": 0.01, "vocabulary_axis": vocabulary_axis}
        mean = jax_tcgemm.linear_cross_entropy(x, w, labels, weights=weights, **how)
        none = jax_tcgemm.linear_cross_entropy(x, w, labels, reduction="none", **how)
        return mean + jnp.sum(none * weights)

    counted = np.where(given == -1, 0, weights)
    cts = counted / counted.sum() + counted
    plain = Reference(x, w, bias, labels, z_loss=0.01)
    value, (dx, dw, db) = np.vdot(cts, plain.losses), plain.gradients(cts)
    spec = P(*specs[1], *[None] * (2 - len(specs[1])))
    if vocabulary_axis:
        w, dw, spec = np.asarray(w).T, dw.T, P(*spec[::-1])
    with jax.set_mesh(mesh):
        arguments = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip((x, w, given), (specs[0], spec, specs[2]), strict=True)
        ]
        x, w, given = arguments
        found, gradients = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(x, w, bias, given, weights)
        assert [jax.typeof(g) for g in gradients[:2]] == [jax.typeof(a) for a in (x, w)]
    assert_close((found, *gradients), (value, dx, dw, db), 1e-11)


def test_tokens_stay_where_they_are_in_chunks():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w, labels = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((512, 64), jnp.float32, P("data")),
            ((1024, 64), jnp.float32, P()),
            ((512,), jnp.int32, P("data")),
        )
    )
    loss = functools.partial(jax_tcgemm.linear_cross_entropy, chunk_bytes=128 * 1024 * 4)
    text = jax.jit(loss).lower(x, w, labels).compile().as_text()
    assert " while(" in text
    assert "all-reduce(" in text
    assert not re.search("all-gather|all-to-all|collective-permute", text)


def test_log_prob_over_explicit_axes(x64):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w, _, labels = operands(tokens=32, vocabulary=104)
    plain = Reference(x, w, labels=labels)
    with jax.set_mesh(mesh):
        x, w, labels = (
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in ((x, P("data")), (w, P("model")), (labels, P("data")))
        )
        found = jax_tcgemm.linear_log_prob(x, w, labels, with_entropy=True)
        assert jax.typeof(found[0]).sharding.spec == P("data")
    assert_close(found, (-plain.losses, plain.entropies), 1e-11)


def test_explicit_axes_beside_named_ones_are_refused():
    types = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    _, w, _, _ = operands("float32", vocabulary=104)
    x, labels = jnp.ones((4, DEPTH)), jnp.zeros(4, jnp.int32)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, P("model")))
        x, labels = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in (x, labels))
        own = functools.partial(jax_tcgemm.linear_cross_entropy, token_axis_name="data")
        divided = jax.shard_map(
            own, in_specs=(P("data"), P(), P("data")), out_specs=P(), axis_names={"data"}
        )
        with pytest.raises(ValueError, match="w must not be sharded over explicit mesh axes where"):
            jax.jit(divided)(x, w, labels)


# --- transformations and refusals -----------------------------------------------------------------


@pytest.mark.usefixtures("few_logits")
def test_inside_of_scan_and_checkpoint(x64):
    x, w, _, labels = operands(tokens=12)
    parts = np.asarray(x).reshape(3, 4, DEPTH), np.asarray(labels).reshape(3, 4)
    ours = jax.checkpoint(jax_tcgemm.linear_cross_entropy)

    def total(w):
        def step(sum_, each):
            return sum_ + ours(each[0], w, each[1]), None

        return lax.scan(step, 0.0, parts)[0]

    plain = Reference(x, w, labels=labels)
    found = jax.jit(jax.value_and_grad(total))(w)
    assert_close(found, (plain.losses.sum() / 4, plain.gradients(1 / 4)[1]), 1e-11)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reduction": "max"}, "reduction must be one of mean, sum, none, got reduction='max'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got label_smoothing=1.5"),
        ({"z_loss": -1}, "z_loss must be at least 0 and finite, got z_loss=-1.0"),
        ({"soft_cap": 0}, "soft_cap must be above 0 and finite, got soft_cap=0.0"),
        ({"chunk_bytes": 0}, "chunk_bytes must be a positive integer or None, got chunk_bytes=0"),
        ({"ignore_index": 1.5}, "ignore_index must be an integer of 32 bits or None, got"),
        ({"weights": jnp.ones(3)}, "weights must broadcast to the shape (37,), got"),
        ({"weights": jnp.ones(37, jnp.int32)}, "weights must be of a real floating-point dtype"),
        ({"bias": jnp.ones(3)}, "bias must have a number for each entry of the vocabulary, shape "),
        ({"vocabulary_axis": -1}, "vocabulary_axis must be 0 or 1, got vocabulary_axis=-1"),
        ({"vocabulary_axis": 1}, "x and w must have shapes (..., k) and (k, vocabulary), got"),
        ({"recompute": 2}, "recompute must be True or False, got recompute of type int"),
        ({"axis_name": "model"}, "axis_name must be a mesh axis that is manual here, got"),
        ({"w": jnp.ones((DEPTH, 101))}, "x and w must have shapes (..., k) and (vocabulary, k)"),
        ({"labels": jnp.zeros(3, jnp.int32)}, "labels must have the shape of x without its last"),
        ({"labels": jnp.zeros(37)}, "labels must be integers, got labels.dtype=float32"),
        ({"x": jnp.ones((37, DEPTH), jnp.int32)}, "x must be of one of the dtypes float16, bfl"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(change, says):
    x, w, _, labels = operands("float32")
    with pytest.raises((TypeError, ValueError), match=re.escape(f"linear_cross_entropy: {says}")):
        jax_tcgemm.linear_cross_entropy(**{"x": x, "w": w, "labels": labels} | change)


@pytest.mark.parametrize("name", ["linear_log_prob", "linear_cross_entropy"])
def test_forward_mode_is_over_reverse_mode_only(name, x64):
    x, w, _, labels = operands()
    f = functools.partial(getattr(jax_tcgemm, name), w=w, labels=labels)
    total = lambda x: jnp.sum(f(x))  # noqa: E731
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(total, (x,), (x,))
    gradient = jax.jit(jax.grad(total))
    _, got = jax.jit(lambda x: jax.jvp(gradient, (x,), (x,)))(x)
    x = np.asarray(x)
    step = 1e-5 * x
    expected = (np.asarray(gradient(x + step)) - np.asarray(gradient(x - step))) / 2e-5
    assert_close(got, expected, 1e-6)
