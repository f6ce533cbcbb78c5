"""What `accelerate` makes of losses inside of `jax.shard_map`, whose devices have other tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import draw
from written_losses import VOCABULARY, WRITTEN, accelerate, of_any_size, operands

import jax_tcgemm
from jax_tcgemm.passes.losses import calls as loss_calls


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    of_any_size(monkeypatch)


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def divided(own, *, check_vma=True, **how):
    """A mean loss of parts of the tokens, the others being whole, and its gradients if asked."""
    specs = {"in_specs": (P("data"), P(), P(), P("data")), "out_specs": P(), "mesh": mesh()}
    return jax.shard_map(own, check_vma=check_vma, **specs | how)


def given(dtype="float64"):
    x, w, labels = operands(dtype)
    return x, w, draw((VOCABULARY,), dtype, 7), labels


def kinds_in(f, *arguments):
    """The losses in the program of a function's one shard_map."""
    text = str(jax.make_jaxpr(f)(*arguments))
    kinds = ("values_and_gradients", "values", "gradients", "largest")
    return {kind for kind in kinds if f"{loss_calls.NAME}_{kind}_0" in text}


def check(f, *arguments, kinds, fast=None):
    fast = fast or accelerate(f)
    assert kinds_in(fast, *arguments) == kinds
    found, expected = (jax.jit(g)(*arguments) for g in (fast, f))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def mean(written, x, w, bias, labels):
    z = 1.5 * jnp.tanh((x @ w + bias) / 1.5)
    return lax.pmean(jnp.mean(WRITTEN[written](z, labels)), "data")


@pytest.mark.parametrize("written", ["optax", "log_softmax, one-hot", "where"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_values_and_gradients(written, check_vma, x64):
    own = functools.partial(mean, written)
    check(divided(own, check_vma=check_vma), *given(), kinds={"values"})
    step = jax.value_and_grad(own, (0, 1, 2))
    out_specs = P(), (P("data"), P(), P())
    if not check_vma:  # gradients of what is whole are each device's own then

        def step(*operands, step=step):
            value, (dx, dw, db) = step(*operands)
            return value, (dx, *lax.pmean((dw, db), "data"))

    f = divided(step, check_vma=check_vma, out_specs=out_specs)
    check(f, *given(), kinds={"values_and_gradients"})


def test_gradients_that_make_the_logits_again_and_accuracy(x64):
    def own(x, w, bias, labels):
        z = x @ w + bias
        losses = WRITTEN["optax"](z, labels) + 1e-2 * jax.nn.logsumexp(z, -1) ** 2
        accuracy = jnp.mean(jnp.argmax(z, -1) == labels)
        return lax.pmean(jnp.mean(losses), "data"), lax.pmean(accuracy, "data")

    step = jax.value_and_grad(own, (0, 1, 2), has_aux=True)
    f = divided(step, out_specs=((P(), P()), (P("data"), P(), P())))
    check(f, *given(), kinds={"values", "gradients", "largest"})


def test_rounded_logits():
    x, w, bias, labels = given("bfloat16")

    def own(x, w, bias, labels):
        z = (x @ w + bias).astype("float32")
        return lax.pmean(jnp.mean(WRITTEN["optax"](z, labels)), "data")

    step = divided(jax.value_and_grad(own, (0, 1, 2)), out_specs=(P(), (P("data"), P(), P())))
    arguments = x, w, bias, labels
    assert kinds_in(accelerate(step), *arguments) == {"values_and_gradients"}
    found, expected = (jax.jit(f)(*arguments) for f in (accelerate(step), step))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.max(abs(a - b)) < 2e-2 * np.max(abs(b))


def test_reshaped_logits(x64):
    def own(x, w, bias, labels):
        x, labels = x.reshape(2, -1, *x.shape[1:]), labels.reshape(2, -1)
        flat = (x @ w + bias).reshape(-1, VOCABULARY)
        losses = WRITTEN["optax"](flat, labels.reshape(-1)).reshape(labels.shape)
        return lax.pmean(jnp.mean(jnp.where(labels % 3 != 0, losses, 0)), "data")

    check(divided(own), *given(), kinds={"values"})
    f = divided(jax.value_and_grad(own, (0, 1, 2)), out_specs=(P(), (P("data"), P(), P())))
    check(f, *given(), kinds={"values_and_gradients"})


def test_in_a_scan_inside(x64):
    def own(x, w, bias, labels):
        def one(total, each):
            return total + jnp.mean(WRITTEN["optax"](each[0] @ w + bias, each[1])), None

        x, labels = x.reshape(2, -1, *x.shape[1:]), labels.reshape(2, -1)
        total, _ = lax.scan(one, lax.pcast(jnp.zeros(()), "data", to="varying"), (x, labels))
        return lax.pmean(total, "data")

    check(divided(own), *given(), kinds={"values"})


def test_each_device_is_one_where_several_are_there(x64):
    """No device divides another one's part, so that nothing has to be said of it."""
    f = divided(functools.partial(mean, "optax"))
    check(f, *given(), kinds={"values"}, fast=jax_tcgemm.accelerate(f))


def test_accelerated_inside(x64):
    own = jax.value_and_grad(functools.partial(mean, "optax"), (0, 1, 2))
    out_specs = P(), (P("data"), P(), P())
    f, fast = (divided(g, out_specs=out_specs) for g in (own, accelerate(own)))
    check(f, *given(), kinds={"values_and_gradients"}, fast=fast)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_where_a_mesh_is_set(kind, x64):
    own = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(own):
        f = divided(
            jax.value_and_grad(functools.partial(mean, "optax"), (0, 1, 2)),
            **{"mesh": own, "out_specs": (P(), (P("data"), P(), P()))},
        )
        specs = P("data"), P(), P(), P("data")
        arguments = [
            jax.device_put(a, NamedSharding(own, spec))
            for a, spec in zip(given(), specs, strict=True)
        ]
        check(f, *arguments, kinds={"values_and_gradients"})


def test_axes_that_are_not_manual_stay(x64):
    f = divided(functools.partial(mean, "optax"), axis_names={"data"})
    check(f, *given(), kinds=set())


def test_a_divided_vocabulary_stays(x64):
    def own(x, w, bias, labels):
        z = x @ w + bias
        largest = lax.pmax(lax.stop_gradient(jnp.max(z, -1)), "model")
        lse = largest + jnp.log(lax.psum(jnp.sum(jnp.exp(z - largest[:, None]), -1), "model"))
        own = labels - z.shape[-1] * lax.axis_index("model")
        one_hot = own[:, None] == jnp.arange(z.shape[-1])
        return lax.pmean(jnp.mean(lse - lax.psum(jnp.sum(one_hot * z, -1), "model")), "data")

    in_specs = P("data"), P(None, "model"), P("model"), P("data")
    check(divided(own, in_specs=in_specs), *given(), kinds=set())


def test_labels_that_vary_more_than_logits_stay(x64):
    def own(x, w, bias, labels):
        losses = WRITTEN["optax"](x @ w + bias, labels)
        return lax.pmean(jnp.mean(losses), ("data", "model"))

    in_specs = P("data"), P(), P(), P(("data", "model"))
    x, w, bias, labels = given()
    labels = jnp.concatenate([labels, labels[::-1]])
    check(divided(own, in_specs=in_specs), x, w, bias, labels, kinds=set())
