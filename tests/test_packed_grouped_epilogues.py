"""Epilogues of grouped products with packed weights: what runs them, and their transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_cases import Case
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.primitives.encodings.packed import MOST_ROWS

BF16 = jnp.bfloat16
N = 48
CASE = Case(29, N, 128, 32, "int4", zeros=True, scale="f32", sizes=(7, 0, 12, 1))
GATED = Case(29, 2 * N, 128, 64, "int4", scale="f32", sizes=(7, 0, 12, 1))
SOME = dataclasses.replace(CASE, sizes=(7, 0, 12, 1, 6), offset=2, experts=2)
BIAS = normal(4, N, seed=1)
explain = functools.partial(jax_tcgemm.explain, platform="cuda")


def weight_of(case):
    with jax.ensure_compile_time_eval():  # It is kept.
        return case.weight


def gated_weight():
    w = weight_of(GATED)
    form = dataclasses.replace(w.format, shape=(GATED.k, 2, N))
    return dataclasses.replace(w, format=form)


def layer(x, bias=BIAS, sizes=CASE.sizes):
    w = weight_of(CASE)
    return jax_tcgemm.ragged_dot(x, w, jnp.array(sizes), bias=bias, activation="silu")


def gated(x):
    return jax_tcgemm.gated_ragged_linear(x, gated_weight(), jnp.array(GATED.sizes))


def weighted(acc, factor, skip):
    return (acc * factor + skip).astype(BF16), acc + 1


def exact(x):
    return np.asarray(x).astype(np.float64)


def numbers(case):
    """For each row the number of its weight, -1 where there is none."""
    ends = np.minimum(np.cumsum(case.sizes), case.m)
    found = np.searchsorted(ends, np.arange(case.m), side="right") - case.offset
    is_there = (found >= 0) & (found < case.num_weights)
    return np.where(is_there, found, -1)


def rows_of(case):
    """x, so small that the slope of an activation is neither 0 nor 1."""
    return jnp.asarray(case.x_array) / 64


def products(case, x):
    """In float64."""
    return np.einsum("mk,mkn->mn", exact(x), case.exact_weight[numbers(case)])


def silu(z):
    return z / (1 + np.exp(-z))


def expected_layer(x, bias=BIAS):
    own = numbers(CASE)
    z = products(CASE, x) + exact(bias)[own]
    return np.where(own[:, None] >= 0, silu(z), 0)


def check(got, expected):
    assert abs(exact(got) - expected).max() <= 2e-2 * abs(expected).max()
    np.testing.assert_array_equal(exact(got)[np.all(expected == 0, -1)], 0)


# --- what runs them -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 100, 4 * MOST_ROWS])
def test_kernels_run_them(rows):
    x = jax.ShapeDtypeStruct((rows, 128), BF16)
    (call,) = explain(layer, x)
    assert (call.implementation, call.problem.form) == ("packed", "grouped")
    assert call.epilogue == ("add", "silu")
    (_, _, strides), *_ = call.problem.function.reads
    assert (strides.batch_inner, strides.n_stride) == (N, 1)
    (call,) = explain(gated, x)
    assert (call.implementation, call.problem.form) == ("packed", "grouped")
    assert call.problem.gated
    assert call.problem.function is not None


def test_of_many_rows_weights_are_arrays():
    weight, product, *_ = explain(gated, jax.ShapeDtypeStruct((4 * MOST_ROWS + 1, 128), BF16))
    assert weight.problem.form == "weight"
    assert product.problem.kind == "ragged"


def test_what_no_kernel_takes_is_said():
    x, sizes = jax.ShapeDtypeStruct((29, 128), BF16), jnp.array(CASE.sizes)
    odd = dataclasses.replace(CASE, n=40)
    f = functools.partial(jax_tcgemm.ragged_dot, rhs=weight_of(odd), group_sizes=sizes)
    (call,) = explain(lambda x: f(x, activation="relu"), x)
    assert call.why.startswith("unfused: the columns of an accumulator are no multiple of 16")
    f = functools.partial(jax_tcgemm.ragged_dot, rhs=weight_of(CASE), group_sizes=sizes)
    (call,) = explain(lambda x: f(x, epilogue=lambda z: jnp.cumsum(z, 1)), x)
    assert call.why.startswith("unfused: ")
    assert "cumsum" in call.why
    with pytest.raises(ValueError, match=r"^ragged_dot: implementation must .*: epilogue: cumsum"):
        explain(
            lambda x: f(x, epilogue=lambda z: jnp.cumsum(z, 1), implementation="packed"),
            x,
        )


def test_lowered_for_a_gpu():
    x = jax.ShapeDtypeStruct((29, 128), BF16)
    text = jax.jit(layer).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert 'form = "grouped"' in text
    assert "tcgemm::packed::Function<" in text


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_jitted", [False, True])
def test_layers(is_jitted):
    f, g = (jax.jit(layer), jax.jit(gated)) if is_jitted else (layer, gated)
    x = rows_of(CASE)
    check(f(x), expected_layer(x))
    x = rows_of(GATED)
    gate, up = np.split(products(GATED, x), 2, 1)
    check(g(x), np.where(numbers(GATED)[:, None] >= 0, silu(gate) * up, 0))


def test_operands_of_every_kind():
    """By group, by row and of both; some of the groups; two results; an array closed over."""
    x, own = rows_of(SOME), numbers(SOME)
    factor, skip, column = normal(2, 1, 1, seed=2), normal(29, N, seed=3), normal(N, seed=4)
    sizes, offset = map(jnp.asarray, SOME.groups)

    @jax.jit
    def f(x, factor, skip):
        def function(*arguments):
            y, z = weighted(*arguments)
            return y, z + column

        return jax_tcgemm.ragged_dot(
            x,
            weight_of(SOME),
            sizes,
            group_offset=offset,
            epilogue=function,
            epilogue_operands=(factor, skip),
        )

    y, z = f(x, factor, skip)
    acc, is_there = products(SOME, x), own[:, None] >= 0
    check(y, np.where(is_there, acc * exact(factor)[own, 0] + exact(skip), 0))
    check(z, np.where(is_there, acc + 1 + exact(column), 0))
    (call,) = explain(f, x, factor, skip)
    assert call.implementation == "packed"
    assert len(call.problem.function.results) == 2


@pytest.mark.parametrize("is_packed", [True, False])
def test_results_of_a_reduction_are_zero_in_rows_of_no_group(is_packed):
    def f(acc):
        y = jnp.maximum(acc, 0)
        return y, 1 / (1 + jnp.broadcast_to(y.sum(-1, keepdims=True), y.shape))

    x, w = rows_of(CASE), weight_of(CASE)
    w = w if is_packed else w.dequantize(x.dtype)
    found = jax_tcgemm.ragged_dot(x, w, jnp.array(CASE.sizes), epilogue=f)
    y, is_there = np.maximum(products(CASE, x), 0), numbers(CASE)[:, None] >= 0
    inverse = np.broadcast_to(1 / (1 + y.sum(-1, keepdims=True)), y.shape)
    check(found[0], np.where(is_there, y, 0))
    check(found[1], np.where(is_there, inverse, 0))


def test_rows_of_8_bits():
    case = Case(200, N, 256, 64, zeros=True, x="f8e4m3fn", sizes=(0, 120, 30))
    bias, own = normal(3, N, seed=5), numbers(case)
    f = functools.partial(jax_tcgemm.ragged_dot, bias=bias, activation="relu")
    y = f(case.lhs, weight_of(case), jnp.array(case.sizes))
    check(y, np.where(own[:, None] >= 0, np.maximum(case.exact[0] + exact(bias)[own], 0), 0))
    (call,) = explain(f, case.lhs, weight_of(case), jnp.array(case.sizes))
    assert call.problem.row_scales
    assert call.problem.function is not None


# --- transformations ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_gated", [False, True])
def test_derivatives(is_gated):
    """Of x, from what the call keeps; and of a bias of each group."""
    case, f = (GATED, gated) if is_gated else (CASE, layer)
    x, own, w = rows_of(case), numbers(case), case.exact_weight
    dx, g = (normal(*shape, seed=6).astype(BF16) for shape in (x.shape, (29, N)))
    z, dz = products(case, x), products(case, dx)
    if is_gated:
        (gate, up), (dgate, dup) = np.split(z, 2, 1), np.split(dz, 2, 1)
        s = 1 / (1 + np.exp(-gate))
        slopes = s * (1 + gate * (1 - s)) * up, gate * s
        expected = slopes[0] * dgate + slopes[1] * dup
        ct = np.concatenate([slope * exact(g) for slope in slopes], 1)
    else:
        z = z + exact(BIAS)[own]
        s = 1 / (1 + np.exp(-z))
        slope = s * (1 + z * (1 - s))
        expected, ct = slope * dz, slope * exact(g)
    is_there = own[:, None] >= 0
    primal, tangent = jax.jvp(f, (x,), (dx,))
    np.testing.assert_array_equal(primal, f(x))
    check(tangent, np.where(is_there, expected, 0))
    (x_bar,) = jax.vjp(f, x)[1](g)
    check(x_bar, np.where(is_there, np.einsum("mn,mkn->mk", ct, w[own]), 0))
    if not is_gated:
        bias_bar = jax.grad(lambda b: (layer(x, b) * g).astype(jnp.float32).sum())(BIAS)
        expected = np.stack([ct[own == group].sum(0) for group in range(4)])
        np.testing.assert_allclose(bias_bar, expected, atol=3e-2 * abs(expected).max())
    first, *_ = explain(jax.grad(lambda x: f(x).astype(jnp.float32).sum()), x)
    assert first.implementation == "packed"
    assert len(first.problem.function.results) == (3 if is_gated else 2)


def test_mapped():
    """Rows, sizes and biases, one after the other; of biases alone the product is one."""
    x = rows_of(CASE)
    xs, biases = jnp.stack([x, 2 * x]), jnp.stack([BIAS, -BIAS])
    sizes = jnp.array([CASE.sizes, CASE.sizes])
    pairs = list(zip(xs, biases, strict=True))
    for ys in (
        jax.vmap(layer)(xs, biases),
        jax.vmap(layer)(xs, biases, sizes),
    ):
        for y, (own, bias) in zip(ys, pairs, strict=True):
            check(y, expected_layer(own, bias))
    for y, bias in zip(jax.vmap(lambda b: layer(x, b))(biases), biases, strict=True):
        check(y, expected_layer(x, bias))


def test_exported():
    x = rows_of(CASE)
    calls = [jax.export.DisabledSafetyCheck.custom_call("tcgemm_ragged")]
    exported = jax.export.export(jax.jit(layer), disabled_checks=calls)(x)
    check(jax.export.deserialize(exported.serialize()).call(x), expected_layer(x))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_several_devices(axis_type):
    """Rows are divided; the product and the function are apart."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(axis_type,), devices=jax.devices()[:2])
    x = jnp.pad(rows_of(CASE), ((0, 3), (0, 0)))
    with jax.set_mesh(mesh):
        y = jax.jit(layer)(jax.device_put(x, NamedSharding(mesh, P("i"))))
    check(y, np.pad(expected_layer(rows_of(CASE)), ((0, 3), (0, 0))))
    if axis_type is AxisType.Explicit:
        return
    # Inside of shard_map each device has rows of its own.
    own_rows = jax.shard_map(
        layer, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), check_vma=True
    )
    y = jax.jit(own_rows)(jnp.concatenate([rows_of(CASE), rows_of(CASE)]), BIAS)
    for half in np.split(np.asarray(y), 2):
        check(half, expected_layer(rows_of(CASE)))
