"""Functions of products with packed weights on a GPU: every config, and layers by default."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.gemm_call import device
from packed_cases import Case, configs_of
from packed_functions import (
    ALL,
    BIAS,
    CASES,
    GATE,
    Call,
    Exact,
    everything,
    gate,
    layer,
    reductions,
)

import jax_tcgemm

pytestmark = pytest.mark.gpu


def results(call, **how):
    public = jax_tcgemm.gated_linear if call.gated else jax_tcgemm.matmul
    own = {"epilogue": call.function, "epilogue_operands": tuple(map(jnp.asarray, call.operands))}
    return jax.tree.leaves(
        jax.jit(functools.partial(public, **own, **how))(call.case.lhs, call.weight)
    )


@pytest.mark.parametrize("name", CASES)
def test_functions(name):
    config, call = CASES[name]
    call.check(results(call, implementation="packed", config=config), config)


# Rows, columns and stages that fill nothing; more stages than a cluster of eight has blocks.
EVERY = [
    Call(Exact(19, 336, 2304), everything, ALL),
    Call(Exact(70, 528, 1152, 64, "int8"), reductions, BIAS),
    Call(Exact(33, 672, 1280, 32, "uint4", zeros=True), gate, GATE, gated=True),
    Call(Exact(130, 288, 512, None, "int4", zeros=True), gate, GATE, gated=True),
    Call(Exact(70, 144, 1152, x="f8e4m3fn"), layer, BIAS),
]


@pytest.mark.parametrize("call", EVERY, ids=lambda call: call.case.label)
def test_every_config(call):
    for config in configs_of(call, device()):
        call.check(results(call, implementation="packed", config=config), config)


@pytest.mark.parametrize("rows", [1, 7, 32, 100, 300, 700])
@pytest.mark.parametrize("gated", [False, True])
def test_layers(rows, gated):
    """By default, as users write them, also of so many rows that the weight is an array."""
    n = 256
    case = Case(rows, n * (1 + gated), 512, 128, scale="f32")
    x, bias = jnp.asarray(case.x_array), jnp.linspace(-1, 1, n)
    skip = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, n)), jnp.bfloat16)
    exact, magnitude = case.exact
    if gated:
        form = dataclasses.replace(case.weight.format, shape=(512, 2, n))
        w = dataclasses.replace(case.weight, format=form)
        f = jax.jit(lambda x, s: jax_tcgemm.gated_linear(x, w, residual=s))
        g, up = np.split(exact, 2, 1)
        expected = g / (1 + np.exp(-g)) * up + np.asarray(skip, np.float64)
        size = sum(abs(x) for x in (g, up)) + 1
        size = size * (magnitude[:, :n] + magnitude[:, n:])
    else:
        f = jax.jit(
            lambda x, s: jax_tcgemm.linear(x, case.weight, bias, activation="silu", residual=s)
        )
        z = exact + np.asarray(bias, np.float64)
        expected = z / (1 + np.exp(-z)) + np.asarray(skip, np.float64)
        size = magnitude + 1
    (call, *_) = reversed(jax_tcgemm.explain(f, x, skip))
    assert call.implementation != "xla", call.why
    if rows <= 512:
        assert call.problem.function is not None
    y = np.asarray(f(x, skip)).astype(np.float64)
    # Above 512 rows the weight is rounded to bfloat16.
    rounding = 1e-5 if rows <= 512 else 2**-8
    assert (abs(y - expected) <= 2**-7 * abs(expected) + rounding * size).all()


def test_gradients_keep_what_the_kernel_returns():
    case = Case(24, 256, 256, 64, "int4", scale="f32")
    x, bias = jnp.asarray(case.x_array), jnp.linspace(-1, 1, 256)
    f = lambda x: jax_tcgemm.linear(x, case.weight, bias, activation="tanh")  # noqa: E731
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((24, 256)), jnp.bfloat16)
    x_bar = jax.jit(lambda x: jax.vjp(f, x)[1](cotangent)[0])(x)
    exact, _ = case.exact
    slope = 1 - np.tanh(exact + np.asarray(bias, np.float64)) ** 2
    g = np.asarray(cotangent).astype(np.float64)
    expected, size = (g * slope) @ case.exact_weight.T, abs(g) @ abs(case.exact_weight).T
    assert (abs(np.asarray(x_bar).astype(np.float64) - expected) <= 2**-6 * size).all()
