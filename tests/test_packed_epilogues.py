"""Epilogues of products with packed weights: what runs them, and their transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from packed_cases import Case

import jax_tcgemm

BF16 = jnp.bfloat16
N = 96
CASE = Case(5, N, 128, 64, "int4", zeros=True, scale="f32")
GATED = Case(5, 2 * N, 128, 64, "int4", scale="f32")
BIAS, SKIP = jnp.linspace(-1, 1, N), jnp.ones((5, N), BF16)
explain = functools.partial(jax_tcgemm.explain, platform="cuda")


def weight_of(case):
    with jax.ensure_compile_time_eval():  # It is kept.
        return case.weight


def layer(x, bias=BIAS, skip=SKIP, w=None):
    w = weight_of(CASE) if w is None else w
    return jax_tcgemm.linear(x, w, bias, activation="silu", residual=skip)


def gated(x):
    w = weight_of(GATED)
    form = dataclasses.replace(w.format, shape=(GATED.k, 2, N))
    return jax_tcgemm.gated_linear(x, dataclasses.replace(w, format=form))


def rows(number, k=CASE.k, dtype=BF16):
    return jax.ShapeDtypeStruct((number, k), dtype)


def silu(z):
    return z / (1 + np.exp(-z))


@pytest.mark.parametrize("number", [1, 16, 100, 512])
def test_kernels_run_them(number):
    skip = jax.ShapeDtypeStruct((number, N), BF16)
    (call,) = explain(layer, rows(number), BIAS, skip)
    assert call.implementation == "packed"
    assert call.epilogue == ("add", "silu")
    assert call.problem.function is not None
    (call,) = explain(gated, rows(number))
    assert call.implementation == "packed"
    assert call.problem.gated
    out = call.problem.m * N * 2
    weight = 2 * N * (CASE.k // 2 + CASE.k // 64 * 4)
    assert call.bytes == weight + call.problem.m * CASE.k * 2 + out


@pytest.mark.parametrize("number", [16, 24])
def test_long_functions_of_few_rows_are_loops(number):
    """Of more than 16 rows the kernel of few rows is slower than XLA's loop."""
    f = lambda x: jax_tcgemm.linear(x, weight_of(CASE), BIAS, activation="gelu_erf")  # noqa: E731
    *_, call = explain(f, rows(number))
    assert call.why.startswith("unfused: XLA's loop") == (number == 24)
    forced = functools.partial(jax_tcgemm.linear, activation="gelu_erf", implementation="packed")
    (call,) = explain(lambda x: forced(x, weight_of(CASE), BIAS), rows(number))
    assert call.problem.function is not None


def test_of_many_rows_the_weight_is_an_array():
    skip = jax.ShapeDtypeStruct((3000, N), BF16)
    weight, *_, product = explain(layer, rows(3000), BIAS, skip)
    assert weight.problem.form == "weight"
    assert product.problem.kind == "gemm"
    assert product.epilogue == ("add", "silu")


def test_what_no_kernel_takes_is_said():
    odd = Case(5, 40, 128, 64, scale="f32")
    (call,) = explain(lambda x: jax_tcgemm.linear(x, weight_of(odd), activation="relu"), rows(5))
    assert call.why.startswith("unfused: the columns of an accumulator are no multiple of 16")
    f = lambda x: jax_tcgemm.matmul(x, weight_of(CASE), epilogue=lambda z: jnp.cumsum(z, 1))  # noqa: E731
    (call,) = explain(f, rows(5))
    assert call.why.startswith("unfused: ")
    assert "cumsum" in call.why
    with pytest.raises(ValueError, match=r"^matmul: implementation must .*: epilogue: cumsum"):
        jax_tcgemm.explain(
            lambda x: jax_tcgemm.matmul(
                x, weight_of(CASE), epilogue=lambda z: jnp.cumsum(z, 1), implementation="packed"
            ),
            rows(5),
            platform="cuda",
        )


def test_vmap():
    xs = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 128)), BF16)
    skips = jnp.stack([SKIP, 2 * SKIP, 0 * SKIP])
    mapped = jax.vmap(lambda x, skip: layer(x, skip=skip))
    expected = [layer(x, skip=skip) for x, skip in zip(xs, skips, strict=True)]
    np.testing.assert_array_equal(mapped(xs, skips), jnp.stack(expected))
    (call,) = explain(mapped, xs, skips)
    assert call.implementation == "packed"
    assert call.problem.m == 15
    # Of operands of the function alone the product is one.
    of_skips = jax.vmap(lambda skip: layer(xs[0], skip=skip))
    expected = [layer(xs[0], skip=skip) for skip in skips]
    np.testing.assert_array_equal(of_skips(skips), jnp.stack(expected))
    # Mapped weights are experts, whose epilogue XLA runs.
    weights = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), weight_of(CASE))
    of_weights = jax.vmap(lambda x, w: layer(x, w=w))(xs, weights)
    np.testing.assert_allclose(of_weights, mapped(xs, jnp.stack([SKIP] * 3)), rtol=1e-2)


@pytest.mark.parametrize("is_gated", [False, True])
def test_derivatives(is_gated):
    """Of x and of the function's operands, in both modes, from what the call keeps."""
    case = GATED if is_gated else CASE
    rng = np.random.default_rng(1)
    x = jnp.asarray(case.x_array)
    dx, g = (jnp.asarray(rng.standard_normal(shape), BF16) for shape in (x.shape, (5, N)))
    f = gated if is_gated else layer
    primal, tangent = jax.jvp(f, (x,), (dx,))
    out, pull = jax.vjp(f, x)
    np.testing.assert_array_equal(primal, f(x))
    np.testing.assert_array_equal(out, f(x))
    w, (z, _) = case.exact_weight, case.exact
    dz = np.asarray(dx).astype(np.float64) @ w
    if is_gated:
        (gate, up), (dgate, dup) = np.split(z, 2, 1), np.split(dz, 2, 1)
        s = 1 / (1 + np.exp(-gate))
        slopes = s * (1 + gate * (1 - s)) * up, gate * s
        expected = slopes[0] * dgate + slopes[1] * dup
        ct = np.concatenate([slope * np.asarray(g).astype(float) for slope in slopes], 1)
    else:
        z = z + np.asarray(BIAS, np.float64)
        s = 1 / (1 + np.exp(-z))
        slope = s * (1 + z * (1 - s))
        expected, ct = slope * dz, slope * np.asarray(g).astype(float)
    assert abs(np.asarray(tangent) - expected).max() <= 2e-2 * abs(expected).max()
    expected = ct @ w.T
    (x_bar,) = pull(g)
    assert abs(np.asarray(x_bar) - expected).max() <= 2e-2 * abs(expected).max()
    if not is_gated:
        bias_bar = jax.grad(lambda b: (layer(x, b) * g).astype(jnp.float32).sum())(BIAS)
        expected = (np.asarray(g).astype(float) * slope).sum(0)
        np.testing.assert_allclose(bias_bar, expected, atol=3e-2 * abs(expected).max())


def test_gradients_keep_results_of_the_kernel():
    first, *_ = explain(jax.grad(lambda x: layer(x).astype(jnp.float32).sum()), rows(5))
    assert first.implementation == "packed"
    assert len(first.problem.function.results) == 2


def test_explicit_axes_divide_rows():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    x = jnp.asarray(np.random.default_rng(2).standard_normal((6, 128)), BF16)
    skip = jnp.ones((6, N), BF16)
    expected = layer(x, skip=skip)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, P("x"))
        f = jax.jit(lambda x, skip: layer(x, skip=skip))
        y = f(placed, jax.device_put(skip, P("x")))
        assert jax.typeof(y).sharding.spec == P("x", None)
    np.testing.assert_array_equal(y, expected)
