"""Products that train in 8 bits: values, gradients, what they keep, and Flax's layers with them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm import Fp8DotGeneral, dequantize, quantize

RECIPES = {"current": ({}, {}), "block128": ({"block": (1, 128)}, {"block": (128, 128)})}
NN = (((1,), (0,)), ((), ()))
M, K, N = 200, 256, 130


def rounded(x, dtype=jnp.float8_e4m3fn, **how):
    return np.asarray(dequantize(quantize(x, dtype, **how))).astype(np.float64)


def near(got, expected, tolerance=1e-5):
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * abs(expected).max())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grad_dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_values_and_gradients(recipe, grad_dtype):
    """Exactly the products of operands that are quantized along what each of them contracts."""
    x, w, g = normal(M, K), normal(K, N, seed=1), normal(M, N, seed=2)
    of_rows, of_weights = RECIPES[recipe]
    product = Fp8DotGeneral(recipe, grad_dtype)
    out, pullback = jax.vjp(lambda x, w: product(x, w, NN), x, w)
    near(out, rounded(x, **of_rows) @ rounded(w.T, **of_weights).T)
    near(product(x, w, NN), np.asarray(out, np.float64))
    x_bar, w_bar = pullback(g)
    near(x_bar, rounded(g, grad_dtype, **of_rows) @ rounded(w, **of_weights).T)
    near(w_bar, rounded(x.T, **of_rows) @ rounded(g.T, grad_dtype, **of_rows).T)
    assert np.linalg.norm(x_bar - g @ w.T) < 0.1 * np.linalg.norm(g @ w.T)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("lhs", [0, 1])
@pytest.mark.parametrize("rhs", [0, 1])
def test_operands_lie_either_way(recipe, lhs, rhs):
    """What is contracted first or last: the same numbers, and cotangents that lie as operands."""
    x, w, g = normal(M, K), normal(K, N, seed=1), normal(M, N, seed=2)
    product = Fp8DotGeneral(recipe)
    numbers = (((1 - lhs,), (rhs,)), ((), ()))
    operands = x.T if lhs else x, w.T if rhs else w
    expected, pull_back = jax.vjp(lambda x, w: product(x, w, NN), x, w)
    out, pullback = jax.vjp(lambda x, w: product(x, w, numbers), *operands)
    near(out, np.asarray(expected, np.float64))
    near(product(*operands, numbers), np.asarray(expected, np.float64))
    for got, want, is_transposed in zip(pullback(g), pull_back(g), (lhs, rhs), strict=True):
        near(got.T if is_transposed else got, np.asarray(want, np.float64))


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_transposed_by_the_quantizer_alone(recipe):
    x = jax.ShapeDtypeStruct((4, 1024, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 2, 768), jnp.bfloat16)
    numbers = (((2,), (0,)), ((), ()))
    loss = lambda x, w: Fp8DotGeneral(recipe)(x, w, numbers).astype(jnp.float32).sum()  # noqa: E731
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    moved = re.findall(r"stablehlo.transpose .*: \(tensor<(\S+)>\)", text)
    assert {shape.rpartition("x")[2] for shape in moved} == {"f32"}, moved  # Those are scales.


@pytest.mark.parametrize("recipe", RECIPES)
def test_dimensions_and_dtypes(recipe):
    x, w = normal(3, 8, 5, 64, dtype="bfloat16"), normal(5, 64, 3, 16, 2, seed=1)
    numbers = (((3, 2), (1, 0)), ((0,), (2,)))
    product = Fp8DotGeneral(recipe)
    out, pullback = jax.vjp(lambda x, w: product(x, w, numbers), x, w)
    exact = jax.lax.dot_general(x.astype(jnp.float32), w, numbers)
    assert (out.shape, out.dtype) == ((3, 8, 16, 2), jnp.float32)
    near(out, np.asarray(exact, np.float64), 0.1)
    assert [y.dtype for y in pullback(out)] == [jnp.bfloat16, jnp.float32]
    near(pullback(out)[1], np.einsum("bmjk,bmno->jkbno", np.asarray(x, np.float64), exact), 0.15)
    assert product(x, w, numbers, preferred_element_type="bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
def test_small_gradients_do_not_underflow(recipe):
    x, w, g = normal(M, K), normal(K, N, seed=1), 1e-9 * normal(M, N, seed=2)
    x_bar, _ = jax.vjp(lambda x, w: Fp8DotGeneral(recipe)(x, w, NN), x, w)[1](g)
    assert np.linalg.norm(x_bar - g @ w.T) < 0.1 * np.linalg.norm(g @ w.T)


@pytest.mark.parametrize("is_remat", [False, True])
def test_what_is_kept_has_8_bits(is_remat):
    f = lambda x, w: jnp.sin(Fp8DotGeneral("block128")(x, w, NN)).sum()  # noqa: E731
    x, w = normal(M, K), normal(K, N, seed=1)
    if is_remat:
        policy = jax.checkpoint_policies.save_only_these_names("fp8_operands")
        f = jax.checkpoint(f, policy=policy)
    _, pullback = jax.vjp(f, x, w)
    kept = [y for y in jax.tree.leaves(pullback) if isinstance(y, jax.Array)]
    narrow = [y.shape for y in kept if y.dtype == jnp.float8_e4m3fn]
    assert sorted(narrow) == [(K, N), (K, M)]
    if not is_remat:
        wide = [y.shape for y in kept if y.dtype == jnp.float32 and y.size >= M * N]
        assert wide == [(M, N)]  # what sin is of


def test_layers_of_flax():
    x = normal(8, 64)
    layer = nnx.Linear(64, 32, dot_general=Fp8DotGeneral(), rngs=nnx.Rngs(0))
    exact = x @ layer.kernel[...]
    near(layer(x), np.asarray(exact, np.float64), 0.1)
    gradients = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
    expected = 2 * np.asarray(x, np.float64).T @ np.asarray(exact, np.float64)
    near(gradients.kernel[...], expected, 0.15)
    dense = linen.Dense(32, dot_general_cls=Fp8DotGeneral)
    parameters = dense.init(jax.random.key(0), x)
    assert list(parameters) == ["params"]
    kernel = parameters["params"]["kernel"]
    near(dense.apply(parameters, x), np.asarray(x @ kernel, np.float64), 0.1)


def test_products_are_of_8_bits():
    """All three, as kernels see them."""
    x, w = (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2
    f = lambda x, w: Fp8DotGeneral()(x, w, NN).astype(jnp.float32).sum()  # noqa: E731
    calls = jax_tcgemm.explain(jax.value_and_grad(f, (0, 1)), x, w, platform="cuda")
    assert {call.implementation for call in calls if call.problem.kind == "quantize"} == {
        "quantize"
    }
    calls = [call for call in calls if call.problem.kind == "gemm"]
    found = sorted((call.problem.a.dtype, call.problem.b.dtype) for call in calls)
    backwards = [pair for pair in found if "f8e5m2" in pair]
    assert (len(found), len(backwards)) == (3, 2)
    assert all(set(pair) <= {"f8e4m3fn", "f8e5m2"} for pair in found)
    assert all(call.implementation == "wgmma" for call in calls)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: Fp8DotGeneral("delayed"), ValueError, "recipe must be current or block128"),
        (lambda: Fp8DotGeneral(grad_dtype="int8"), TypeError, "grad_dtype must be float8_e4m3fn"),
        (
            lambda: Fp8DotGeneral()(jnp.ones((2, 2), int), jnp.ones((2, 2)), NN),
            TypeError,
            "lhs must be of a real floating-point dtype",
        ),
        (
            lambda: Fp8DotGeneral()(jnp.ones((2, 2)), jnp.ones((3, 2)), NN),
            ValueError,
            "contracting dimensions must have equal sizes",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, kind, message):
    with pytest.raises(kind, match=f"^Fp8DotGeneral: {message}.*, got .*; "):
        call()
