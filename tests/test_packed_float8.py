"""Packed weights of 4 bits beside rows of 8-bit floats, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from packed_cases import Case, dequantize, is_wide
from random_arrays import normal
from test_packed import BF16, W, check, exact

import jax_tcgemm


def rows_in_8_bits(*shape):
    """Quantized rows, and what they stand for."""
    x = jax_tcgemm.quantize(normal(*shape), block=(1, shape[-1]))
    return x, exact(x.qvalue) * exact(x.scale)


@pytest.mark.parametrize("rows", [3, 40, 300])
@pytest.mark.parametrize("group", [64, 128, None])
def test_rows_of_8_bits(rows, group):
    """Each with a scale: products, layers, transposed, in front, in batches."""
    case = Case(1, 90, 256, group, "int4", zeros=group != 64)
    x, exact_x = rows_in_8_bits(rows, 256)
    y = jax_tcgemm.matmul(x, case.weight)
    assert y.dtype == jnp.float32
    check(y, exact_x, case.exact_weight)
    y = jax_tcgemm.linear(x, case.weight, jnp.ones(90), preferred_element_type=BF16)
    assert y.dtype == BF16
    expected = exact_x @ case.exact_weight + 1
    np.testing.assert_allclose(exact(y), expected, atol=2e-2 * abs(expected).max())
    left = jax_tcgemm.tensor.einsum("kn,mk->nm", case.weight, x)
    check(left.T, exact_x, case.exact_weight)
    stack, exact_stack = rows_in_8_bits(2, rows, 256)
    y = jax.vmap(lambda x: jax_tcgemm.matmul(x, case.weight))(stack)
    check(y, exact_stack, case.exact_weight)
    same = jax.vmap(
        lambda scale: jax_tcgemm.matmul(dataclasses.replace(x, scale=scale), case.weight)
    )
    check(same(jnp.stack([x.scale] * 2))[1], exact_x, case.exact_weight)


def test_one_scale_of_rows_of_8_bits():
    x = jax_tcgemm.quantize(normal(40, W.k))
    assert x.scale.shape == (1, 1)
    check(
        jax_tcgemm.matmul(x, W.weight),
        exact(x.qvalue) * exact(x.scale),
        exact(dequantize(W.weight)),
    )


@pytest.mark.parametrize("how", ["blocks", "integers", "a table", "8 bits"])
def test_other_quantized_rows_are_dequantized(how):
    """In bfloat16, which no kernel of 8 bits is asked for."""
    case = Case(1, 96, 256, 64, {"a table": "nf4", "8 bits": "int8"}.get(how, "int4"))
    dtype = jnp.int8 if how == "integers" else jnp.float8_e4m3fn
    x = jax_tcgemm.quantize(normal(40, 256), dtype, block=(1, 128 if how == "blocks" else 256))
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, x, case.weight, platform="cuda")
    assert (call.problem.in_dtype, call.problem.row_scales) == ("bf16", False)
    values = exact(x.qvalue).reshape(40, *x.scale.shape[1:], -1) * exact(x.scale)[..., None]
    check(jax_tcgemm.matmul(x, case.weight), values.reshape(40, 256), case.exact_weight)


def test_derivatives_of_rows_of_8_bits():
    """As of what they stand for, in 16 bits, and in 8 where that is the dtype of what moves."""
    x, exact_x = rows_in_8_bits(40, W.k)
    w = exact(dequantize(W.weight))

    def f(x):
        return jax_tcgemm.matmul(x, W.weight)

    direction = dataclasses.replace(x, scale=0.5 * x.scale)
    y, y_dot = jax.jvp(f, (x,), (direction,))
    check(y, exact_x, w)
    # Of both factors of a product: x' scale + x scale'.
    check(y_dot, 1.5 * exact_x, w)
    weights = normal(40, 96, seed=3) / 64
    bar = jax.grad(lambda x: jnp.sum(f(x) * weights))(x)
    assert bar.qvalue.dtype == jnp.float8_e4m3fn
    x_bar = exact(weights) @ w.T
    np.testing.assert_allclose(exact(bar.qvalue), x_bar * exact(x.scale), rtol=2**-3.9, atol=2**-10)
    scale_bar = (x_bar * exact(x.qvalue)).sum(1, keepdims=True)
    np.testing.assert_allclose(exact(bar.scale), scale_bar, atol=2e-2 * abs(scale_bar).max())
    moved = jax.jit(lambda t: f(dataclasses.replace(x, scale=x.scale * t)))
    value, (first, second) = jet.jet(moved, (1.0,), ((1.0, 0.0),))
    check(value, exact_x, w)
    check(first, exact_x, w)
    assert not np.asarray(second).any()


def test_what_runs_rows_of_8_bits():
    """Of few, bfloat16; of more, the kernel, of any number."""
    for rows, dtype in ((32, "bf16"), (33, "f8e4m3fn"), (4096, "f8e4m3fn")):
        x = jax.eval_shape(
            lambda rows=rows: jax_tcgemm.quantize(jnp.ones((rows, W.k)), block=(1, W.k))
        )
        (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, x, W.weight, platform="cuda")
        assert (call.implementation, call.problem.in_dtype) == ("packed", dtype)
        assert is_wide(call.config) == (dtype == "f8e4m3fn")
    forced = functools.partial(jax_tcgemm.matmul, implementation="packed", config="128x2_c1")
    with pytest.raises(ValueError, match="128x2_c1 multiplies f16 and bf16"):
        jax_tcgemm.explain(forced, x, W.weight, platform="cuda")


@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_several_devices(axis_type, rows):
    """Divided along rows, their scales with them, and columns."""
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(axis_type,) * 2)
    case = Case(1, 128, 256, 64, "int4", zeros=True, scale="bf16")
    x, exact_x = rows_in_8_bits(rows, 256)
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("j"))), case.weight)
    x = jax.device_put(x, NamedSharding(mesh, P("i")))
    with jax.set_mesh(mesh):
        y = jax.jit(jax_tcgemm.matmul)(x, w)
    check(y, exact_x, exact(dequantize(case.weight, dtype=jnp.float32)))
    assert y.sharding.spec == P("i", "j")
