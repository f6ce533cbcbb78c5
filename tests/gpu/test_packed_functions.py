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
    BY_EXPERT,
    CASES,
    GATE,
    GATE_BY_EXPERT,
    Call,
    Exact,
    by_expert,
    everything,
    gate,
    gate_by_expert,
    layer,
    reductions,
)

import jax_tcgemm

pytestmark = pytest.mark.gpu


def results(call, **how):
    public = jax_tcgemm.gated_linear if call.gated else jax_tcgemm.matmul
    arguments = call.case.lhs, call.weight
    if call.case.sizes:
        public = jax_tcgemm.gated_ragged_linear if call.gated else jax_tcgemm.ragged_dot
        sizes, offset = map(jnp.asarray, call.case.groups)
        arguments, how = (*arguments, sizes), how | {"group_offset": offset}
    own = {"epilogue": call.function, "epilogue_operands": tuple(map(jnp.asarray, call.operands))}
    compiled = jax.jit(functools.partial(public, **own, **how)).lower(*arguments).compile()
    types = jax.tree.leaves(compiled.out_info)
    # Results are likely to lie where these have been.
    poison = [jnp.full(x.shape, jnp.nan, x.dtype) for x in types if x.dtype != bool]
    jax.block_until_ready(poison)
    del poison
    return jax.tree.leaves(compiled(*arguments))


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
    Call(Exact(300, 336, 2304, sizes=(3, 0, 150, 1, 0, 99, 8)), by_expert, BY_EXPERT),
    Call(
        Exact(
            *(150, 672, 1280, 32, "uint4", True),
            **{"sizes": (5, 0, 70, 1, 33, 9), "offset": 1, "experts": 4},
        ),
        *(gate_by_expert, GATE_BY_EXPERT, True),
    ),
    Call(Exact(60, 528, 512, x="f8e4m3fn", sizes=(30, 0, 20)), by_expert, BY_EXPERT),
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


@pytest.mark.parametrize("rows", [5, 60, 400])
@pytest.mark.parametrize("gated", [False, True])
def test_layers_of_experts(rows, gated):
    """By default, with a bias of each expert; rows that belong to no expert are 0."""
    n, sizes = 256, (rows // 2, 0, rows // 4)
    case = Case(rows, n * (1 + gated), 512, 128, scale="f32", sizes=sizes)
    x, own = jnp.asarray(case.x_array), np.repeat([0, 2, -1], (*sizes[::2], rows - sum(sizes)))
    rng = np.random.default_rng(rows)
    bias = rng.standard_normal((3, *((2,) if gated else ()), n)).astype(np.float32)
    exact, magnitude = case.exact
    magnitude = magnitude + 1
    z = exact + bias.reshape(3, -1).astype(np.float64)[own]
    if gated:
        form = dataclasses.replace(case.weight.format, shape=(512, 2, n))
        w = dataclasses.replace(case.weight, format=form)
        f = jax.jit(lambda x: jax_tcgemm.gated_ragged_linear(x, w, jnp.array(sizes), bias=bias))
        g, up = np.split(z, 2, 1)
        with np.errstate(over="ignore"):
            expected = g / (1 + np.exp(-g)) * up
        size = (abs(g) + abs(up) + 1) * (magnitude[:, :n] + magnitude[:, n:])
    else:
        how = {"bias": bias, "activation": "silu"}
        f = jax.jit(lambda x: jax_tcgemm.ragged_dot(x, case.weight, jnp.array(sizes), **how))
        with np.errstate(over="ignore"):
            expected, size = z / (1 + np.exp(-z)), magnitude
    (call,) = jax_tcgemm.explain(f, x)
    assert call.implementation != "xla", call.why
    assert call.problem.function is not None
    is_there = own[:, None] >= 0
    y = np.asarray(f(x)).astype(np.float64)
    bound = 2**-7 * abs(expected) + 1e-5 * size
    assert (abs(y - np.where(is_there, expected, 0)) <= np.where(is_there, bound, 0)).all()
