"""`accelerate` of programs over several devices."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from accelerated import EPILOGUE, K, N, check, check_every_product, groups, layer
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

import jax_tcgemm

# A program that is not rewritten is a warning.
pytestmark = pytest.mark.filterwarnings("error:accelerate:RuntimeWarning")


def mesh_of(axis_type):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_programs(axis_type):
    mesh = mesh_of(axis_type)
    specs = P("x"), P(None, "y"), P("y"), P("x", "y")
    args = [normal(8, 16), normal(16, 8), normal(8), normal(8, 8)]
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        expected, got = (jax.jit(f)(*args) for f in (layer, jax_tcgemm.accelerate(layer)))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert got.sharding.is_equivalent_to(expected.sharding, 2)
        assert len(groups(layer, *args)) == 1


def test_gradients_over_explicit_axes():
    mesh = mesh_of(AxisType.Explicit)
    specs = P("x"), P(None, "y"), P("y")
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(normal(*shape), NamedSharding(mesh, spec))
            for shape, spec in zip(((8, 16), (16, 8), (8, 4)), specs, strict=True)
        ]
        x, w, v = args

        def f(x, w, v):
            y = jnp.tanh(jnp.einsum("ik,kj->ij", x, w, out_sharding=P("x", "y")))
            return jnp.einsum("ij,jk->ik", y, v, out_sharding=P("x"))

        step = jax.grad(lambda x, w, v: jnp.sum(f(x, w, v) ** 2), (0, 1, 2))
        expected, got = (jax.jit(g)(x, w, v) for g in (step, jax_tcgemm.accelerate(step)))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
            assert a.sharding.is_equivalent_to(b.sharding, 2)
        assert len(groups(step, x, w, v)) >= 2


def test_export_with_symbolic_dimensions():
    (rows,) = jax.export.symbolic_shape("rows")
    accelerated = jax.jit(jax_tcgemm.accelerate(lambda x, w, b: jax.nn.gelu(x @ w + b)))
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, K), (K, N), (N,))]
    exported = jax.export.export(accelerated)(*types)
    args = normal(5, K), normal(K, N), normal(N)
    expected = jax.nn.gelu(args[0] @ args[1] + args[2])
    np.testing.assert_allclose(exported.call(*args), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = mesh_of(AxisType.Auto)

    def part(x, w, bias):
        y = jax.nn.gelu(lax.psum(x @ w, "y") + bias)
        return lax.pmean(jnp.sum((y @ w.T) ** 2), ("x", "y"))

    f = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(P("x", "y"), P("y"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    args = normal(8, 16), normal(16, 8), normal(8)
    check(f, *args, tolerance=1e-4)
    check_every_product(f, *args)

    def local(x, w, bias):
        return jnp.sin(x @ w + bias)

    g = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), check_vma=check_vma
    )
    args = normal(8, 16), normal(16, 8), normal(8)
    check(g, *args)
    assert EPILOGUE in str(jax.make_jaxpr(jax_tcgemm.accelerate(g))(*args))
    if check_vma:
        step = jax.grad(lambda *args: jnp.sum(g(*args) ** 2), (0, 1, 2))
        check(step, *args, tolerance=1e-4)


@pytest.mark.parametrize("is_divided", [False, True])
def test_numbers_that_come_after_another_use_of_the_product(is_divided):
    """In a shard_map they are made to vary; arrays that are made of numbers are read."""

    def local(x, w):
        z = x @ w
        return jnp.sort(z, -1), jnp.sin(3 * z), jnp.cos(z * jnp.sin(jnp.full((1, 8), 2.0) + 1))

    f = local
    if is_divided:
        specs = P("x"), P()
        f = jax.shard_map(local, mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P("x"))
    check(f, normal(8, 16), normal(16, 8))
