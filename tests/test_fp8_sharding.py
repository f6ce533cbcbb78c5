"""Products that train in 8 bits over explicit mesh axes of eight CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

from jax_tcgemm import Fp8DotGeneral, Fp8Mlp, quantize
from jax_tcgemm.quantization.flax import DelayedFp8DotGeneral

# Axes of the mesh, and how x (m, k) and w (k, n) are divided.
MESHES = {"data": (8,), "data, model": (2, 4)}
CASES = {
    "replicated": ("data", P("data"), P()),
    "rows of w": ("data", P("data"), P("data")),
    "columns of w": ("data", P("data"), P(None, "data")),
    "two axes, replicated": ("data, model", P("data"), P()),
    "two axes, rows of w": ("data, model", P("data"), P("model")),
    "two axes, columns of w": ("data, model", P("data"), P(None, "model")),
    "two axes, both of w": ("data, model", P("data"), P("data", "model")),
    "two axes, tokens": ("data, model", P(("data", "model")), P()),
}
CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
RECIPES = "current", "block128"
NN = (((1,), (0,)), ((), ()))


def near(got, expected, tolerance):
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


def check(f, values, specs, mesh, tolerance):
    """Results and gradients, of which these lie as what they are of, beside those of one device."""

    def both(*args):
        out, pullback = jax.vjp(f, *args)
        cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return out, pullback(0 * out + cotangent)

    expected = jax.jit(both)(*values)
    mesh = jax.make_mesh(MESHES[mesh], tuple(mesh.split(", ")))
    with jax.set_mesh(mesh):
        args = jax.tree.map(lambda v, s: jax.device_put(v, NamedSharding(mesh, s)), values, specs)
        got = jax.jit(both)(*args)
    for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(args), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        near(x, y, tolerance)
    return got[0]


@CASE
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("m", [16, 256 * 8])
def test_dot_general(recipe, case, m):
    """Where shards of tokens are of whole blocks, and where they are not."""
    mesh, *specs = case
    values = normal(m, 256), normal(256, 128, seed=1)
    out = check(lambda x, w: Fp8DotGeneral(recipe)(x, w, NN), values, tuple(specs), mesh, 1e-5)
    assert out.sharding.spec[0] == specs[0][0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_more_dimensions(recipe):
    """Some of which become one; the result is divided as it was asked for."""
    numbers = (((2,), (0,)), ((), ()))
    specs = P("data", "model"), P(None, None, "model")
    values = normal(2, 8, 128), normal(128, 2, 64, seed=1)
    f = functools.partial(Fp8DotGeneral(recipe), dimension_numbers=numbers)
    f = functools.partial(f, preferred_element_type=jnp.float32)
    check(f, values, specs, "data, model", 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_out_sharding_of_a_sum_over_devices(recipe):
    mesh = jax.make_mesh((8,), ("data",))
    values = normal(16, 1024), normal(1024, 128, seed=1)
    product = Fp8DotGeneral(recipe)
    f = lambda x, w: product(x, w, NN, out_sharding=P("data"))  # noqa: E731
    with jax.set_mesh(mesh):
        x, w = (
            jax.device_put(v, NamedSharding(mesh, s))
            for v, s in zip(values, (P(None, "data"), P("data")), strict=True)
        )
        out, gradient = jax.jit(f)(x, w), jax.jit(jax.grad(lambda w: f(x, w).sum()))(w)
    assert out.sharding.spec[0] == "data"
    assert gradient.sharding.is_equivalent_to(w.sharding, 2)
    near(out, product(*values, NN), 1e-5)


@CASE
@pytest.mark.parametrize("recipe", RECIPES)
def test_mlp(recipe, case):
    mesh, of_x, of_w = case
    x, residual = normal(2, 8, 256), normal(2, 8, 128, seed=1)
    params = {"up": normal(256, 2, 256, seed=2) / 16, "down": normal(256, 128, seed=3) / 16}
    x, residual = (jnp.concatenate([a] * 8) for a in (x, residual))
    rows, columns = (*of_w, None, None)[:2]
    specs = of_x, {"up": P(rows, None, columns), "down": of_w}, of_x
    mlp = functools.partial(Fp8Mlp(recipe), activation="silu")
    f = lambda x, params, residual: mlp(x, params, residual=residual)  # noqa: E731
    check(f, (x, params, residual), specs, mesh, 5e-3)


@CASE
def test_delayed_scaling(case):
    mesh, *specs = case
    product = DelayedFp8DotGeneral(amax_history_length=4)
    x, w = normal(16, 64), normal(64, 32, seed=1)
    variables = product.init(jax.random.key(0), x, w, NN)
    specs = *specs, jax.tree.map(lambda _: P(), variables)
    f = lambda x, w, variables: product.apply(variables, x, w, NN)  # noqa: E731
    check(f, (x, w, variables), specs, mesh, 1e-5)


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
@pytest.mark.parametrize("shape", [(256, 384), (64, 2048)])
def test_blocks_that_shards_are_parts_of(block, spec, shape):
    x, mesh = normal(*shape), jax.make_mesh((8,), ("data",))
    f = jax.jit(lambda x: quantize(x, block=block, with_transpose=True))
    expected = f(x)
    with jax.set_mesh(mesh):
        got = f(jax.device_put(x, NamedSharding(mesh, spec)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
