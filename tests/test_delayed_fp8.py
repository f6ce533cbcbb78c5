"""Delayed scaling in Flax: values, gradients and state, step by step, beside Flax's own."""

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from jax import lax
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.quantization.flax import DelayedFp8DotGeneral

STATE = fp8_ops.OVERWRITE_WITH_GRADIENT
LENGTH = 4  # of the history


def layer(kind, dtype=jnp.float32):
    def product():
        return kind(amax_history_length=LENGTH, name="product")

    return linen.DenseGeneral((4, 16), use_bias=False, dtype=dtype, dot_general_cls=product)


def near(got, expected, tolerance=1e-5):
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * abs(expected).max())


class Delayed:
    """One array's scale and history in NumPy, as their definition has them."""

    def __init__(self, dtype):
        self.dtype, self.scale, self.history = dtype, 1.0, np.zeros(LENGTH)

    def __call__(self, x):
        """What the array stands for once it is rounded."""
        x, largest = np.asarray(x, np.float64), float(jnp.finfo(self.dtype).max)
        if self.history.max() > 0:
            self.scale = self.history.max() / largest
        self.history = np.roll(self.history, -1)
        self.history[0] = abs(x).max()
        q = jnp.asarray(np.clip(x / self.scale, -largest, largest), jnp.float32)
        return np.asarray(q.astype(self.dtype)).astype(np.float64) * self.scale


def test_steps():
    model, flax_model = layer(DelayedFp8DotGeneral), layer(fp8_ops.Fp8DirectDotGeneralOp)
    variables = model.init(jax.random.key(0), normal(8, 32))
    kernel = np.asarray(variables["params"]["kernel"], np.float64).reshape(32, 64)
    of_x, of_w, of_g = map(Delayed, (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2))

    def step(model):
        return jax.jit(lambda v, x, g: (out := jax.vjp(model.apply, v, x))[:1] + out[1](g))

    ours, theirs = step(model), step(flax_model)
    for i in range(LENGTH + 2):
        # Larger ones than the history has are clipped, and in the end it forgets the largest.
        x, g = (30 if i == 1 else 1) * normal(8, 32, seed=i), normal(8, 4, 16, seed=i + 100)
        got = ours(variables, x, g)
        out, gradients, x_bar = got
        x8, w8, g8 = of_x(x), of_w(kernel), of_g(np.reshape(g, (8, 64)))
        near(out.reshape(8, 64), x8 @ w8)
        near(x_bar, g8 @ w8.T)
        near(gradients["params"]["kernel"].reshape(32, 64), x8.T @ g8)
        state = gradients[STATE]["product"]
        for name, own in {"input": of_x, "kernel": of_w, "output_grad": of_g}.items():
            near(state[f"{name}_scale"], np.array([own.scale]), 1e-6)
            near(state[f"{name}_amax_history"], own.history, 1e-6)
        jax.tree.map(
            lambda a, b: near(a, np.asarray(b, np.float64), 1e-4), got, theirs(variables, x, g)
        )
        variables = {"params": variables["params"], STATE: gradients[STATE]}


def test_products_and_what_is_kept_have_8_bits():
    model = layer(DelayedFp8DotGeneral, jnp.bfloat16)
    x = normal(64, 32, dtype="bfloat16")
    variables = model.init(jax.random.key(0), x)
    f = jax.value_and_grad(lambda v, x: model.apply(v, x).astype(jnp.float32).sum(), (0, 1))
    calls = jax_tcgemm.explain(f, variables, x, platform="cuda")
    kinds = [(call.problem.kind, call.implementation) for call in calls]
    assert sorted(kinds) == [("gemm", "wgmma")] * 3 + [("quantize", "quantize")] * 3
    found = {
        frozenset((c.problem.a.dtype, c.problem.b.dtype)) for c in calls if c.problem.kind == "gemm"
    }
    assert found == {frozenset(["f8e4m3fn"]), frozenset(["f8e4m3fn", "f8e5m2"])}
    kept = jax.tree.leaves(jax.vjp(model.apply, variables, x)[1])
    shapes = [y.shape for y in kept if y.dtype == jnp.float8_e4m3fn]
    assert sorted(shapes) == [(32, 64), (32, 64)]
    assert not any(y.dtype == jnp.bfloat16 and y.size >= x.size for y in kept)


def test_several_uses_of_one_state():
    """Of those that are float32 for JAX's sums of gradients, and are the largest instead."""

    class Twice(linen.Module):
        @linen.compact
        def __call__(self, x, y):
            dense = layer(DelayedFp8DotGeneral)
            return dense(x).sum() + dense(y).sum()

    x, y = normal(8, 32), 5 * normal(8, 32, seed=1)
    variables = Twice().init(jax.random.key(0), x, y)

    def loss(state):
        meta = jax.tree.map(lambda s: lax.convert_element_type(s, fp8_ops.fm32), state)
        return jax.checkpoint(Twice().apply)({**variables, STATE: meta}, x, y)

    (state,) = jax.jit(jax.grad(loss))(variables[STATE]).values()
    assert float(state["product"]["input_amax_history"][0]) == float(abs(y).max())


def test_training_by_train_state():
    model, x = layer(DelayedFp8DotGeneral), normal(64, 32)
    target = jnp.tanh(jnp.tensordot(x, normal(32, 4, 16, seed=1), 1) / 6)
    variables = model.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))

    @jax.jit
    def step(state):
        loss, gradients = jax.value_and_grad(
            lambda v: jnp.mean((state.apply_fn(v, x) - target) ** 2)
        )(state.params)
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for _ in range(30):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
    assert float(state.params[STATE]["product"]["input_scale"][0]) == pytest.approx(
        float(abs(x).max()) / 448
    )


def test_in_nnx():
    x, cotangent = normal(8, 32), normal(8, 16, seed=1)
    product = nnx.bridge.ToNNX(DelayedFp8DotGeneral(amax_history_length=LENGTH))
    model = nnx.Linear(32, 16, dot_general=product, rngs=nnx.Rngs(0))
    product.lazy_init(x, model.kernel[...], (((1,), (0,)), ((), ())), rngs=nnx.Rngs(0))
    kinds = nnx.Param, nnx.variable_type_from_name(STATE)
    gradients = nnx.grad(
        lambda model: jnp.vdot(model(x), cotangent), argnums=nnx.DiffState(0, kinds)
    )(model)
    exact = np.asarray(x, np.float64).T @ np.asarray(cotangent, np.float64)
    got = np.asarray(gradients["kernel"][...], np.float64)
    assert np.linalg.norm(got - exact) < 0.1 * np.linalg.norm(exact)
    nnx.update(model, nnx.filter_state(gradients, kinds[1]))
    assert float(model.dot_general.output_grad_amax_history[0]) == float(abs(cotangent).max())


def test_what_does_not_fit_is_named():
    arguments = jnp.ones((8, 32), jnp.int32), jnp.ones((32, 8)), (((1,), (0,)), ((), ()))
    with pytest.raises(TypeError, match=r"^DelayedFp8DotGeneral: lhs must be of a real .*, got "):
        DelayedFp8DotGeneral().init(jax.random.key(0), *arguments)


def test_examples():
    module = importlib.import_module("jax_tcgemm.quantization.flax")
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
