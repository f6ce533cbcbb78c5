"""What `accelerate` makes of losses of heads: biases, soft caps, and where these are rounded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
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

CAP = 1.5


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    of_any_size(monkeypatch)


@jax.custom_jvp
def tanh(z):
    return jnp.tanh(z)


@tanh.defjvp
def _tanh_of_older_jax(primals, tangents):
    t, (dz,) = jnp.tanh(*primals), tangents
    return t, (dz + dz * t) * (1 - t)


# Of a product and a bias, logits as people write them.
HEADS = {
    "bias": lambda z, b: z + b,
    "bias before": lambda z, b: b[None] + z,
    "bias of a layer": lambda z, b: z + jnp.reshape(b, (1,) * (z.ndim - 1) + (-1,)),
    "repeated bias": lambda z, b: z + jnp.broadcast_to(b[None], z.shape),
    "cap": lambda z, b: CAP * jnp.tanh(z / CAP),
    "cap by a factor": lambda z, b: jnp.tanh(z * (1 / CAP)) * CAP,
    "cap of an older JAX": lambda z, b: CAP * tanh(z / CAP),
    "cap by a function": lambda z, b: CAP * jax.jit(jnp.tanh)(z / CAP),
    "bias and cap": lambda z, b: CAP * jnp.tanh((z + b) / CAP),
}


@pytest.mark.parametrize("head", HEADS)
def test_values_and_gradients(head, x64):
    x, w, labels = operands(shape=(4, 10) if head == "bias of a layer" else (TOKENS,))
    bias = draw((VOCABULARY,), "float64", 7)
    moving = (0, 1, 2) if "bias" in head else (0, 1)

    def loss(x, w, bias):
        return jnp.mean(WRITTEN["optax"](HEADS[head](x @ w, bias), labels))

    if head != "cap of an older JAX":
        check(loss, x, w, bias, kinds=["values"])
    step = jax.value_and_grad(loss, moving)
    check(step, x, w, bias, kinds=["values_and_gradients"])


# Of a product (4, 10, vocabulary) and a bias.
RESHAPED = {
    "before": lambda z, b: HEADS["bias and cap"](z.reshape(-1, VOCABULARY), b),
    "between": lambda z, b: CAP * jnp.tanh((z + b).reshape(-1, VOCABULARY) / CAP),
    "after": lambda z, b: HEADS["bias and cap"](z, b).reshape(-1, VOCABULARY),
}


@pytest.mark.parametrize("case", RESHAPED)
def test_reshaped_logits(case, x64):
    x, w, labels = operands(shape=(4, 10))
    bias = draw((VOCABULARY,), "float64", 7)

    def loss(x, w, bias):
        return jnp.mean(WRITTEN["optax"](RESHAPED[case](x @ w, bias), labels.reshape(-1)))

    check(loss, x, w, bias, kinds=["values"])
    step = jax.value_and_grad(loss, (0, 1, 2))
    check(step, x, w, bias, kinds=["values_and_gradients"])


@pytest.mark.parametrize("written", ["log_softmax, one-hot", "where"])
def test_of_an_embedding_with_a_z_loss(written, x64):
    x, w, labels = operands()
    bias = draw((VOCABULARY,), "float64", 7)

    def loss(x, w, bias):
        z = HEADS["bias and cap"](x @ w.T, bias)
        return jnp.mean(WRITTEN[written](z, labels) + 1e-2 * jax.nn.logsumexp(z, -1) ** 2)

    check(jax.value_and_grad(loss, (0, 1, 2)), x, w.T, bias, kinds=["values", "gradients"])
    check(jax.grad(loss, 2), x, w.T, bias, kinds=["values", "gradients"])


def rounded_heads(dtype):
    """Of a product and a bias, both of a dtype: rounded everywhere, and no longer after a step."""
    cap = 4.0  # a number of each dtype
    return {
        "bias": lambda z, b: wide(z + b),
        "after the product": lambda z, b: wide(z) + wide(b),
        "cap": lambda z, b: wide(cap * jnp.tanh(z / cap)),
        "bias and cap": lambda z, b: wide(cap * jnp.tanh((z + b) / cap)),
        "cap after the bias": lambda z, b: cap * jnp.tanh(wide(z + b) / cap),
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head", rounded_heads("bfloat16"))
def test_rounded_as_the_program_rounds(head, dtype):
    x, w, labels = operands(dtype)
    bias = draw((VOCABULARY,), dtype, 7)
    logits = rounded_heads(dtype)[head]

    def loss(x, w, bias):
        return WRITTEN["optax"](logits(x @ w, bias), labels)

    assert losses_in(loss, x, w, bias) == ["values"]
    kept, left_out = (jax.jit(accelerate(loss, wide=own))(x, w, bias) for own in (False, True))
    with jax.enable_x64(True):
        z, own = x.astype("float64") @ w.astype("float64"), bias.astype("float64")
        steps = rounded_heads("float64")[head]
        exact = np.asarray(WRITTEN["optax"](steps(z, own), labels))
        # Each step of 16 bits is rounded once: those of the program, one by one.
        rounded = np.asarray(WRITTEN["optax"](logits(z.astype(dtype), bias), labels))
    assert np.max(abs(rounded - exact)) > (1e-3 if dtype == "bfloat16" else 1e-4)
    np.testing.assert_allclose(kept, rounded, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(left_out, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float16", 2.0**12)])
@pytest.mark.parametrize("head", rounded_heads("bfloat16"))
def test_gradients_of_16_bits(head, dtype, scale):
    """Of float16 the loss is scaled, as it is in training."""
    x, w, labels = operands(dtype)
    bias = draw((VOCABULARY,), dtype, 7)

    def loss(logits, x, w, bias):
        return scale * jnp.mean(WRITTEN["optax"](logits(x @ w, bias), labels))

    moving = (0, 1, 2) if "bias" in head or head == "after the product" else (0, 1)
    step = jax.value_and_grad(functools.partial(loss, rounded_heads(dtype)[head]), moving)
    assert losses_in(step, x, w, bias) == ["values_and_gradients"]
    value, gradients = jax.jit(accelerate(step))(x, w, bias)
    assert {str(g.dtype) for g in gradients} == {dtype}
    with jax.enable_x64(True):
        given = [a.astype("float64") for a in (x, w, bias)]
        own = functools.partial(loss, rounded_heads("float64")[head])
        mean, expected = jax.tree.map(np.asarray, jax.value_and_grad(own, moving)(*given))
    np.testing.assert_allclose(value, mean, rtol=1e-2)
    for a, b in zip(gradients, expected, strict=True):
        assert np.max(abs(np.float64(a) - b)) < 2e-2 * np.max(abs(b))


def test_layers_of_flax():
    x, _, labels = operands("float32")
    layer = nnx.Linear(DEPTH, VOCABULARY, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.bias[...] = draw((VOCABULARY,), "float32", 7)
    graph, params = nnx.split(layer)

    def loss(params, x):
        logits = nnx.merge(graph, params)(x)
        return jnp.mean(WRITTEN["optax"](wide(logits), labels))

    step = jax.value_and_grad(loss, (0, 1))
    assert losses_in(step, params, x) == ["values_and_gradients"]
    found, expected = (jax.jit(f)(params, x) for f in (accelerate(step), step))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.max(abs(a - b)) < 2e-2 * np.max(abs(b))


# --- what is no head ------------------------------------------------------------------------------


def _without_slope(z, b):
    return z + lax.stop_gradient(CAP * jnp.tanh(z / CAP) - z)


OTHERS = {
    "another cap": lambda z, b: CAP * jnp.tanh(z / 2),
    "a negative cap": lambda z, b: -CAP * jnp.tanh(z / -CAP),
    "a cap of a cap": lambda z, b: CAP * jnp.tanh(CAP * jnp.tanh(z / CAP) / CAP),
    "a cap, and then a bias": lambda z, b: CAP * jnp.tanh(z / CAP) + b,
    "two biases": lambda z, b: z + b + b[::-1],
    "a number of each token": lambda z, b: z + b[: len(z), None],
    "of the size of logits": lambda z, b: z + jnp.outer(b[: len(z)], b),
    "no derivative of the cap": _without_slope,
}


@pytest.mark.parametrize("head", OTHERS)
def test_others_stay(head, x64):
    # As many tokens as entries of the vocabulary, so that a shape tells nothing.
    x, w, _ = operands()
    x, bias = draw((VOCABULARY, DEPTH), "float64", 4), draw((VOCABULARY,), "float64", 7)
    labels = jnp.arange(VOCABULARY, dtype=jnp.int32)

    def loss(x, w, bias):
        return jnp.mean(WRITTEN["optax"](OTHERS[head](x @ w, bias), labels))

    check(jax.value_and_grad(loss, (0, 1)), x, w, bias, kinds=[])


def test_steps_that_are_read_elsewhere_stay(x64):
    x, w, labels = operands()
    bias = draw((VOCABULARY,), "float64", 7)

    def whole(which, x, w, bias):
        z = x @ w
        biased = z + bias
        t = jnp.tanh(biased / CAP)
        steps = {"product": z, "sum": biased, "tangent": t, "logits": CAP * t}
        steps["mask"] = jnp.where(t > 0, t, 0)
        return WRITTEN["optax"](CAP * t, labels), jnp.sin(steps[which])

    for which in ("product", "sum", "tangent", "logits", "mask"):
        f = functools.partial(whole, which)
        check(f, x, w, bias, kinds=[])
        calls = jax_tcgemm.explain(accelerate(f), x, w, bias)
        assert any("no loss without logits: " in call.why for call in calls), which


def test_narrow_gradients_that_are_summed_otherwise_stay():
    x, w, labels = operands("bfloat16")

    def whole(x, w):
        z, vjp = jax.vjp(lambda z: jnp.mean(WRITTEN["optax"](wide(z), labels)), x @ w)
        (dz,) = vjp(1.0)
        return z, lax.reduce_sum(dz, (1,))

    check(whole, x, w, kinds=[], tolerance=1e-2)
    calls = jax_tcgemm.explain(accelerate(whole), x, w)
    assert any("must not be read by reduce_sum" in call.why for call in calls)


def test_a_gradient_of_the_bias_alone(x64):
    x, w, labels = operands()
    bias = draw((VOCABULARY,), "float64", 7)

    def loss(bias):
        z = x @ w + bias
        return jnp.mean(jax.nn.logsumexp(z, -1) - at(z, labels))

    check(jax.value_and_grad(loss), bias, kinds=["values_and_gradients"])
