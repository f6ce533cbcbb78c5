"""What `accelerate` makes of losses: their values and gradients without the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerated import equations
from jax import lax
from random_arrays import draw
from written_losses import (
    DEPTH,
    TOKENS,
    VOCABULARY,
    WRITTEN,
    accelerate,
    at,
    check,
    losses_in,
    of_any_size,
    operands,
    wide,
)

import jax_tcgemm
from jax_tcgemm.losses import top_k
from jax_tcgemm.passes.losses import calls as loss_calls
from jax_tcgemm.passes.losses import programs as loss_programs


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    of_any_size(monkeypatch)


@pytest.mark.parametrize("written", WRITTEN)
def test_values_and_gradients(written, x64):
    x, w, labels = operands(shape=(4, 10) if "one-hot" in written or written == "optax" else (40,))

    def loss(x, w):
        return jnp.mean(WRITTEN[written](wide(x @ w), labels))

    step = jax.value_and_grad(loss, (0, 1))
    assert losses_in(loss, x, w) == ["values"]
    # A constant of the derivative is the largest logit's, where that is not said to be none.
    kinds = losses_in(step, x, w)
    if written == "by hand":
        assert kinds == []
    else:
        assert kinds == ["values_and_gradients"]
    for f in (loss, step):
        found, expected = (jax.jit(g)(x, w) for g in (accelerate(f), f))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


# Gradients of logits are rounded to the dtype that they are multiplied in, by both.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("written", ["optax", "log_softmax, one-hot"])
def test_dtypes(dtype, tolerance, written):
    x, w, labels = operands(dtype)

    def loss(x, w):
        return jnp.mean(WRITTEN[written](wide(x @ w), labels))

    step = jax.value_and_grad(loss, (0, 1))
    assert losses_in(step, x, w) == ["values_and_gradients"]
    value, gradients = jax.jit(accelerate(step))(x, w)
    assert [g.dtype for g in gradients] == [x.dtype, w.dtype]
    with jax.enable_x64(True):
        # What is rounded in between is the program's own, and the logits are part of it.
        x, w = (np.asarray(a, "float64") for a in (x, w))
        z = (x @ w).astype(jnp.dtype(dtype)).astype("float64")
        step = jax.value_and_grad(lambda z: jnp.mean(WRITTEN[written](z, labels)))
        mean, of_logits = jax.device_get(jax.jit(step)(z))
        expected = of_logits @ w.T, x.T @ of_logits
    np.testing.assert_allclose(value, mean, rtol=1e-5)
    for a, b in zip(gradients, expected, strict=True):
        assert np.max(abs(np.float64(a) - b)) < tolerance * np.max(abs(b))


def test_logits_are_rounded_as_the_program_rounds_them():
    x, w, labels = operands("bfloat16")

    def loss(x, w):
        return optax.softmax_cross_entropy_with_integer_labels(wide(x @ w), labels)

    with jax.enable_x64(True):
        z = np.asarray(x, "float64") @ np.asarray(w, "float64")
        losses = jax.jit(optax.softmax_cross_entropy_with_integer_labels)
        exact, rounded = (
            np.asarray(losses(own, labels)) for own in (z, z.astype(x.dtype).astype("float64"))
        )
    kept, left_out = (accelerate(loss, wide=own)(x, w) for own in (False, True))
    assert np.max(abs(rounded - exact)) > 1e-3
    np.testing.assert_allclose(kept, rounded, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(left_out, exact, rtol=1e-5, atol=1e-5)


def test_of_an_embedding(x64):
    x, w, labels = operands()

    def step(x, w):
        return jnp.sum(jnp.linspace(0, 1, TOKENS) * WRITTEN["optax"](x @ w.T, labels))

    check(jax.value_and_grad(step, (0, 1)), x, w.T, kinds=["values_and_gradients"])


def test_masks_and_labels_out_of_range(x64):
    x, w, labels = operands()
    labels = np.array(labels)
    labels[3], labels[5] = -100, VOCABULARY
    labels = jnp.asarray(labels)

    def masked(x, w):
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
        kept = (labels >= 0) & (labels < VOCABULARY)
        return jnp.sum(jnp.where(kept, losses, 0)) / jnp.sum(kept)

    check(jax.value_and_grad(masked, (0, 1)), x, w, kinds=["values_and_gradients"])

    def each(x, w):
        return WRITTEN["optax"](x @ w, labels), WRITTEN["log_softmax, one-hot"](x @ w, labels)

    found = accelerate(each)(x, w)
    for a, b in zip(found, jax.jit(each)(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    found = jax.device_get(found)
    assert np.isnan(found[0][5])
    assert found[1][5] == 0


def test_what_is_added_for_the_size_of_logits(x64):
    """It multiplies gradients by what is known after the loss: they make the logits again."""
    x, w, labels = operands()

    def loss(x, w):
        z = x @ w
        lse = jax.nn.logsumexp(z, -1)
        return jnp.mean(lse - at(z, labels) + 1e-2 * lse**2)

    check(jax.value_and_grad(loss, (0, 1)), x, w, kinds=["values", "gradients"])


def test_a_gradient_of_one_operand_and_of_several_losses(x64):
    x, w, labels = operands()

    def loss(x, w):
        return jnp.mean(WRITTEN["optax"](x @ w, labels))

    check(jax.grad(loss), x, w, kinds=["values_and_gradients"])
    check(jax.grad(loss, 1), x, w, kinds=["values_and_gradients"])

    def two(x, w):
        return loss(x, w) * loss(jnp.sin(x), 2 * w)

    check(two, x, w, kinds=["values", "values"])
    # The gradients of one are multiplied by the other, which only one of them can come after.
    kinds = ["values", "values_and_gradients", "gradients"]
    check(jax.grad(two, (0, 1)), x, w, kinds=kinds)


def test_whole_steps_in_scan_and_remat(x64):
    x, w, labels = operands(shape=(4, 10))

    def one(w, each):
        x, labels = each
        return jnp.mean(WRITTEN["optax"](jnp.tanh(x) @ w, labels))

    def train(x, w):
        def step(w, each):
            value, gradient = jax.value_and_grad(one)(w, each)
            return w - 0.1 * gradient, value

        return lax.scan(step, w, (x, labels))

    (scan,) = [e for e in equations(train, x, w, losses=True) if e.primitive.name == "scan"]
    assert f"{loss_calls.NAME}_values_and_gradients" in str(scan.params["jaxpr"])
    check(train, x, w, kinds=[])

    def again(x, w):
        return jnp.mean(
            jax.checkpoint(lambda x, w: WRITTEN["optax"](jnp.tanh(x) @ w, labels))(x, w)
        )

    step = jax.value_and_grad(again, (0, 1))
    assert loss_calls.NAME in str(jax.make_jaxpr(accelerate(step))(x, w))
    check(step, x, w, kinds=losses_in(step, x, w))


def test_gradients_taken_outside(x64):
    x, w, labels = operands()

    def loss(x, w):
        return jnp.mean(WRITTEN["optax"](x @ w, labels))

    fast = accelerate(loss)
    outside = jax.value_and_grad(fast, (0, 1))
    found, expected = (jax.jit(f)(x, w) for f in (outside, jax.value_and_grad(loss, (0, 1))))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)

    def stopped(x, w):
        z = x @ w
        return jnp.mean(jax.nn.logsumexp(z, -1) - lax.stop_gradient(at(z, labels)))

    assert losses_in(stopped, x, w) == ["values"]
    found, expected = (jax.jit(jax.grad(f))(x, w) for f in (accelerate(stopped), stopped))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)
    batched = jax.vmap(accelerate(lambda x, y: WRITTEN["optax"](x @ w, y)))
    of_each = jax.jit(batched)(*(np.asarray(a).reshape(4, 10, *a.shape[1:]) for a in (x, labels)))
    expected = jax.jit(WRITTEN["optax"])(np.asarray(x) @ np.asarray(w), labels)
    np.testing.assert_allclose(np.ravel(of_each), expected, rtol=1e-11)


# --- other dimensions of the tokens ---------------------------------------------------------------


def _masked(f, z, labels):
    losses = f(z.reshape(-1, VOCABULARY), labels.reshape(-1)).reshape(labels.shape)
    return jnp.sum(jnp.where(labels % 3 != 0, losses, 0)) / jnp.sum(labels % 3 != 0)


# Of a loss, logits (4, 10, vocabulary) and their labels.
RESHAPED = {
    "flat": lambda f, z, y: jnp.mean(f(z.reshape(-1, VOCABULARY), y.reshape(-1))),
    "flat, and back for a mask": _masked,
    "others": lambda f, z, y: jnp.mean(f(z.reshape(2, -1, 5, VOCABULARY), y.reshape(2, -1, 5))),
    "one more": lambda f, z, y: jnp.mean(f(z[None], y[None])),
    "labels in another order": lambda f, z, y: jnp.mean(
        f(z.reshape(-1, VOCABULARY), y.T.reshape(-1))
    ),
}


@pytest.mark.parametrize("case", RESHAPED)
@pytest.mark.parametrize("written", ["optax", "log_softmax, one-hot", "where"])
def test_reshaped_logits(written, case, x64):
    x, w, labels = operands(shape=(4, 10))

    def loss(x, w):
        return RESHAPED[case](WRITTEN[written], x @ w, labels)

    check(loss, x, w, kinds=["values"])
    check(jax.value_and_grad(loss, (0, 1)), x, w, kinds=["values_and_gradients"])


def test_reshaped_between_dtypes():
    x, w, labels = operands("bfloat16", shape=(4, 10))

    def loss(x, w):
        return jnp.mean(WRITTEN["optax"](wide((x @ w).reshape(-1, VOCABULARY)), labels.reshape(-1)))

    def unshaped(x, w):
        return jnp.mean(WRITTEN["optax"](wide(x @ w), labels))

    steps = [jax.value_and_grad(f, (0, 1)) for f in (loss, unshaped)]
    assert losses_in(steps[0], x, w) == ["values_and_gradients"]
    found, expected = (jax.jit(accelerate(step))(x, w) for step in steps)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_where_reshaped_logits_are_largest(x64):
    x, w, labels = operands(shape=(4, 10))

    def loss(x, w):
        z = x @ w
        flat = z.reshape(-1, VOCABULARY)
        is_right = jnp.argmax(flat, -1) == labels.reshape(-1)
        losses = WRITTEN["optax"](flat, labels.reshape(-1))
        return jnp.mean(losses), (jnp.mean(is_right), jnp.argmax(z, -1), jnp.argmax(flat, -1))

    step = jax.value_and_grad(loss, (0, 1), has_aux=True)
    check(step, x, w, kinds=["largest", "values_and_gradients"])


def test_logits_of_one_sequence(x64):
    """A gather has no batch of one."""
    x, w, labels = operands(shape=(1, TOKENS))

    def loss(x, w):
        return jnp.mean(WRITTEN["optax"](x @ w, labels))

    check(jax.value_and_grad(loss, (0, 1)), x, w, kinds=["values_and_gradients"])


def test_tokens_in_another_order_stay(x64):
    x, w, labels = operands(shape=(4, 10))

    def transposed(x, w):
        z = jnp.sin(x) @ w
        flat = z.swapaxes(0, 1).reshape(-1, VOCABULARY)
        return jnp.mean(WRITTEN["optax"](flat, labels.reshape(-1)))

    def gradient_of_others(x, w):
        value, vjp = jax.vjp(lambda z: jnp.mean(WRITTEN["optax"](z, labels)), x @ w)
        (gradient,) = vjp(1.0)
        return value, gradient.reshape(8, 5, VOCABULARY) @ w.T

    for f in (transposed, jax.value_and_grad(transposed, (0, 1)), gradient_of_others):
        check(f, x, w, kinds=[])


# --- accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("chunk_bytes", [None, 64 * TOKENS * 4], ids=["one chunk", "chunks"])
def test_accuracy(dtype, chunk_bytes, monkeypatch, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    monkeypatch.setattr(top_k, "_CHUNK_BYTES", chunk_bytes or top_k._CHUNK_BYTES)
    monkeypatch.setattr(top_k, "_LEAST_COLUMNS", 64)
    x, w, labels = operands(dtype, shape=(4, 10))
    # Of equal logits, of this chunk and the next one, the first one counts.
    columns = np.arange(VOCABULARY)
    columns[64:] = columns[:56]
    columns[50:60] = columns[30:40]
    w = jnp.asarray(np.asarray(w)[:, columns])
    places = jax.jit(lambda x, w: jnp.argmax(x @ w, -1))(x, w)
    labels = jnp.asarray(np.where(np.asarray(labels) % 2 == 0, places, labels))

    def loss(x, w):
        z = wide(x @ w)
        is_right = jnp.argmax(z, -1) == labels
        losses = WRITTEN["optax"](z, labels)
        return jnp.mean(losses), (
            jnp.mean(is_right),
            jnp.argmax(z, -1),
            z.argmax(-1).astype("int8"),
        )

    step = jax.value_and_grad(loss, (0, 1), has_aux=True)
    assert losses_in(loss, x, w) == ["largest", "values"]
    assert losses_in(step, x, w) == ["largest", "values_and_gradients"]
    for f in (loss, lambda x, w: step(x, w)[0]):
        found, expected = (jax.jit(g)(x, w) for g in (accelerate(f), f))
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        for a, b in zip(found[1], expected[1], strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert 0.4 < found[1][0] < 1
    whys = [call.why for call in jax_tcgemm.explain(accelerate(loss), x, w)]
    assert any("where logits of a loss are largest: its logits" in why for why in whys)


@pytest.mark.parametrize("places", [(70, 110), (20, 70)], ids=["a later chunk", "two chunks"])
def test_nan_is_the_largest(places, x64, monkeypatch):
    monkeypatch.setattr(top_k, "_CHUNK_BYTES", 64 * TOKENS * 8)
    monkeypatch.setattr(top_k, "_LEAST_COLUMNS", 64)
    x, w, labels = operands()
    w = np.array(w)
    w[2, list(places)] = np.nan

    def loss(x, w):
        z = x @ w
        return jnp.mean(WRITTEN["optax"](z, labels)), jnp.argmax(z, -1)

    assert losses_in(loss, x, w) == ["largest", "values"]
    np.testing.assert_array_equal(jax.jit(accelerate(loss))(x, w)[1], places[0])


def test_accuracy_of_small_logits_stays(x64, monkeypatch):
    """It takes a product more, which gains memory only."""
    monkeypatch.setattr(loss_programs, "_LEAST_BYTES_AGAIN", 8 * TOKENS * VOCABULARY + 1)
    x, w, labels = operands()

    def loss(x, w):
        z = x @ w
        return jnp.mean(WRITTEN["optax"](z, labels)), jnp.mean(jnp.argmax(z, -1) == labels)

    check(loss, x, w, kinds=[])
    (call,) = jax_tcgemm.explain(accelerate(loss), x, w)
    assert "must have at least 1 GiB to be recomputed for their argmax" in call.why


def test_gradients_of_an_accuracy_taken_outside(x64):
    x, w, labels = operands()

    def loss(x, w):
        z = x @ w
        return jnp.mean(WRITTEN["optax"](z, labels)), jnp.mean(jnp.argmax(z, -1) == labels)

    found, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(x, w) for f in (accelerate(loss), loss)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


# --- what is no loss ------------------------------------------------------------------------------


def _also(f):
    return lambda z, y: (WRITTEN["optax"](z, y), f(z))


# With why not, as `explain` has it.
OTHERS = {
    "logits are a result": (_also(lambda z: z), "must not be among the results"),
    "the smallest logit": (_also(lambda z: jnp.argmin(z, -1)), "must not be read by argmin"),
    "of each entry": (_also(lambda z: jnp.argmax(z, 0)), "must not be read by argmax"),
    "the largest logit": (_also(lambda z: z.max(-1)), "the largest logits must cancel"),
    "no maximum added": (
        lambda z, y: jnp.log(jnp.sum(jnp.exp(z - z.max(-1, keepdims=True)), -1)) - at(z, y),
        "the largest logits must cancel",
    ),
    "two labels": (
        lambda z, y: WRITTEN["logsumexp"](z, y) - at(z, (y + 1) % VOCABULARY),
        "must not be read by gather",
    ),
    "blocked gradients": (
        lambda z, y: WRITTEN["logsumexp"](lax.stop_gradient(z), y),
        "must not be read by stop_gradient",
    ),
    "multiplied by themselves": (_also(lambda z: z @ z.T), "must be an operand of no other"),
    "only a sum": (lambda z, y: jax.nn.logsumexp(z, -1), "must take the logits of labels"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_stay(case, x64):
    x, w, labels = operands()
    f, why = OTHERS[case]

    def whole(x, w):
        return f(x @ w, labels)

    check(whole, x, w, kinds=[])
    calls = jax_tcgemm.explain(accelerate(whole), x, w)
    assert any("no loss without logits: " in c.why and why in c.why for c in calls)


def test_labels_of_columns_are_none(x64):
    """As many tokens as entries of the vocabulary, and what looks like labels is of the latter."""
    x, w, _ = operands()
    x = draw((VOCABULARY, DEPTH), "float64", 4)
    labels = jnp.asarray(np.random.default_rng(5).integers(0, VOCABULARY, VOCABULARY), jnp.int32)

    def whole(x, w, is_by_token):
        z, positions = x @ w, jnp.arange(VOCABULARY, dtype=jnp.int32)
        y = labels[:, None] if is_by_token else labels[None]
        one_hot = (jnp.broadcast_to(y, z.shape) == positions).astype(z.dtype)
        return jax.nn.logsumexp(z, -1) - jnp.sum(one_hot * z, -1)

    for is_by_token, kinds in ((True, ["values"]), (False, [])):
        check(functools.partial(whole, is_by_token=is_by_token), x, w, kinds=kinds)


def test_narrow_losses_stay():
    x, w, labels = operands("bfloat16")

    def whole(x, w):
        return WRITTEN["log_softmax"](x @ w, labels)

    assert losses_in(whole, x, w) == []
    (call,) = jax_tcgemm.explain(accelerate(whole), x, w)
    assert "its logits must be float32 before all else" in call.why


def test_gradients_that_are_read_elsewhere_stay(x64):
    x, w, labels = operands()

    def of_logits(z):
        return jnp.mean(WRITTEN["optax"](z, labels))

    def sums(x, w):
        z, vjp = jax.vjp(of_logits, x @ w)
        return z, jnp.sum(vjp(1.0)[0], 0)

    check(sums, x, w, kinds=[])

    def itself(x, w):
        z, vjp = jax.vjp(of_logits, x @ w)
        return z, vjp(1.0)[0]

    check(itself, x, w, kinds=[])


def test_small_losses_stay(monkeypatch):
    monkeypatch.undo()
    x, w, labels = operands("float32")

    def loss(x, w, labels):
        return WRITTEN["optax"](x @ w, labels)

    assert losses_in(loss, x, w, labels) == []
    large = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 64), (64, 8192))]
    labels = jax.ShapeDtypeStruct((4096,), "int32")
    assert losses_in(loss, *large, labels) == ["values"]


def test_several_devices_must_be_said_not_to_divide_it(x64):
    x, w, labels = operands()

    def loss(x, w):
        return WRITTEN["optax"](x @ w, labels)

    for losses in (None, False):
        own = jax_tcgemm.accelerate(loss, losses=losses)
        assert loss_calls.NAME not in str(jax.make_jaxpr(own)(x, w))
        whys = [call.why for call in jax_tcgemm.explain(own, x, w)]
        assert any("pass losses=True" in why for why in whys) == (losses is None)
    with pytest.raises(TypeError, match="accelerate: losses must be True, False or None, got los"):
        jax_tcgemm.accelerate(loss, losses="yes")


def test_explain_says_that_it_is_one():
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4096, 128256), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)

    def loss(x, w, labels):
        return jnp.mean(WRITTEN["optax"](wide(x @ w), labels))

    step = accelerate(jax.value_and_grad(loss, (0, 1)))
    calls = jax_tcgemm.explain(step, x, w, labels, platform="cuda")
    ours = jax_tcgemm.explain(
        jax.value_and_grad(
            functools.partial(jax_tcgemm.linear_cross_entropy, vocabulary_axis=1), (0, 1)
        ),
        *(x, w, labels),
        platform="cuda",
    )
    size = "its logits, 4202 MB in float32, are not stored"
    assert [c.why.endswith(f"a loss and its gradients: {size}") for c in calls] == [True] * 5
    assert [c.implementation for c in calls] == [c.implementation for c in ours]
