"""`newton_schulz` and `scale_by_muon` of matrices that explicit mesh axes shard."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm

SIZES = {"x": 4, "y": 2}


@pytest.fixture
def mesh():
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def put(mesh, value, spec):
    return jax.device_put(value, NamedSharding(mesh, spec))


# Shardings of a stack, and how many of its 6 matrices each device computes.
@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (P("y"), 3),
        (P(None, "y"), 3),
        (P(None, None, "x"), 2),  # padded to 8
        (P(None, "y", "x"), 1),
        (P(None, ("y", "x")), 1),
        (P("y", "x"), 1),
        (P("y", None, "x"), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 16, 40), (6, 40, 16)], ids=["wide", "tall"])
def test_devices_compute_whole_matrices(mesh, shape, spec, count):
    g = draw(*shape)
    x = put(mesh, g, spec)
    f = jax.jit(jax_tcgemm.newton_schulz)
    got = f(x)
    assert jax.typeof(got) == jax.typeof(x)
    np.testing.assert_allclose(got, f(g), atol=0.02)
    assert {call.problem.batch for call in jax_tcgemm.explain(f, x)} == {count}
    # Only norms are summed over devices.
    assert f.lower(x).compile().as_text().count(" all-reduce(") <= 2


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("x", "y"))], ids=str)
def test_a_single_matrix_is_computed_by_every_device(mesh, spec):
    g = draw(16, 40)
    x = put(mesh, g, spec)
    got = jax.jit(jax_tcgemm.newton_schulz)(x)
    assert jax.typeof(got) == jax.typeof(x)
    np.testing.assert_allclose(got, jax_tcgemm.newton_schulz(g), atol=0.02)


def test_gradients(mesh):
    g, w = draw(2, 3, 16, 24), draw(2, 3, 16, 24)

    def loss(x, w):
        how = {"dtype": jnp.float32, "precision": "highest"}
        return jnp.sum(w * jax_tcgemm.newton_schulz(x, **how))

    expected = jax.grad(loss)(g, w)
    x, w = (put(mesh, value, P(None, None, "x", "y")) for value in (g, w))
    got = jax.jit(jax.grad(loss))(x, w)
    assert jax.typeof(got) == jax.typeof(x)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_muon_divides_equal_matrices(mesh):
    """Seven matrices of one type, sharded over eight devices, are one stack; others are alone."""
    values = {f"layer{i}": draw(7, 16, 40)[i] for i in range(7)} | {"head": draw(40, 24)}
    params = {name: put(mesh, x, P("x", "y")) for name, x in values.items()}
    optimizer = jax_tcgemm.scale_by_muon()

    def update(gradients):
        return optimizer.update(gradients, optimizer.init(gradients))[0]

    got, expected = jax.jit(update)(params), update(values)
    for name, x in got.items():
        assert jax.typeof(x) == jax.typeof(params[name])
        np.testing.assert_allclose(x, expected[name], atol=0.02)
    calls = jax_tcgemm.explain(update, params)
    assert {call.problem.batch for call in calls} == {1}
    alone = [jax_tcgemm.explain(jax_tcgemm.newton_schulz, values[x]) for x in ("layer0", "head")]
    assert len(calls) == sum(map(len, alone))


@pytest.mark.parametrize("shape", [(4, 4), (64, 96), (2, 40, 24)], ids=str)
def test_muon_stacks_small_matrices(shape):
    params = [draw(3, *shape)[i] for i in range(3)]

    def dimensions(params):
        of = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
        return [of] * len(params)

    optimizer = jax_tcgemm.scale_by_muon(weight_dimension_numbers=dimensions)

    def update(gradients):
        return optimizer.update(gradients, optimizer.init(gradients))[0]

    calls = jax_tcgemm.explain(update, params)
    assert {call.problem.batch for call in calls} == {3 * math.prod(shape[:-2])}
    for got, x in zip(jax.jit(update)(params), params, strict=True):
        np.testing.assert_allclose(got, jax_tcgemm.newton_schulz(x), atol=0.02)


@pytest.mark.parametrize(("size", "together"), [(2048, 4), (4096, 1), (8192, 1)])
def test_stacks_of_large_matrices_are_small(size, together):
    params = [jax.ShapeDtypeStruct((size, 8192), jnp.bfloat16)] * 6
    optimizer = jax_tcgemm.scale_by_muon()

    def update(gradients):
        return optimizer.update(gradients, optimizer.init(gradients))[0]

    calls = jax_tcgemm.explain(update, params, platform="cuda")
    assert {call.problem.batch for call in calls} == {together, 6 % together or together}
