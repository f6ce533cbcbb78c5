"""Sharded products under vmap, remat, scan and shard_map; exported, cached and explained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import (
    MESHES,
    NN,
    assert_close,
    compiled,
    host,
    is_ours,
    mesh_of,
    normal,
)

import jax_tcgemm
from jax_tcgemm import blas

TARGET = "tcgemm_gemm"
matmul = functools.partial(jax_tcgemm.matmul, implementation="host")


def put(mesh, *pairs):
    return [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in pairs]


@MESHES
def test_vmap(axis_type):
    mesh = mesh_of(axis_type)
    a, b, w = normal(4, 16, 24, seed=0), normal(4, 24, 32, seed=1), normal(24, 32, seed=2)
    with jax.set_mesh(mesh):
        x, y, v = put(mesh, (a, P("y", "x")), (b, P("y", None, "z")), (w, P(None, "z")))
        for dims, args, expected in (
            ((0, 0), (x, y), a.astype(np.float64) @ b),
            ((0, None), (x, v), a.astype(np.float64) @ w),
            ((None, 0), (x[0] if axis_type == AxisType.Auto else a[0], y), a[0] @ b),
        ):
            f = jax.vmap(matmul, dims)
            text, found = compiled(f, *args)
            assert is_ours(text)
            if dims[0] is not None:
                assert not found
            assert_close(jax.jit(f)(*args), expected)


@MESHES
def test_remat_in_scan_over_layers(axis_type):
    """A deep network, its weights divided by rows and columns in turns."""
    mesh = mesh_of(axis_type, (2, 4), ("data", "model"))
    x, up, down = normal(8, 16, seed=0), normal(3, 16, 32, seed=1), normal(3, 32, 16, seed=2)
    out = {"out_sharding": P("data")} if axis_type == AxisType.Explicit else {}

    def loss(product, x, up, down):
        @jax.checkpoint
        def layer(x, weights):
            hidden = jnp.tanh(product(x, weights[0], NN))
            return x + product(hidden, weights[1], NN, **out) / 8, None

        return jnp.sum(lax.scan(layer, x, (up, down))[0] ** 2)

    def grads(product):
        return jax.value_and_grad(functools.partial(loss, product), (0, 1, 2))

    with jax.set_mesh(mesh):
        args = put(mesh, (x, P("data")), (up, P(None, None, "model")), (down, P(None, "model")))
        text, ours_move = compiled(grads(host), *args)
        _, theirs_move = compiled(grads(lax.dot_general), *args)
        got = jax.jit(grads(host))(*args)
    assert is_ours(text)
    assert sum(ours_move.values()) <= sum(theirs_move.values())
    with jax.enable_x64(True):
        out.clear()
        expected = grads(lax.dot_general)(*(v.astype(np.float64) for v in (x, up, down)))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-4), got, expected)


@pytest.mark.parametrize("check_vma", [True, False])
@MESHES
def test_shard_map(axis_type, check_vma):
    mesh = mesh_of(axis_type, (2, 4), ("x", "y"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    f = jax.shard_map(
        lambda a, b: lax.psum(matmul(a, b), "y"),
        mesh=mesh,
        in_specs=(P("x", "y"), P("y")),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    x, y = put(mesh, (a, P("x", "y")), (b, P("y")))
    text, found = compiled(f, x, y)
    assert is_ours(text)
    assert found == {"all-reduce": 1}
    assert_close(jax.jit(f)(x, y), a.astype(np.float64) @ b)
    got = jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), (0, 1)))(x, y)
    g = np.cos(a.astype(np.float64) @ b)
    assert_close(got, (g @ b.T, a.T @ g))


@pytest.mark.parametrize("check_vma", [True, False])
def test_partly_manual_with_explicit_axes(check_vma):
    mesh = mesh_of(AxisType.Explicit, (2, 4), ("x", "y"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    f = jax.shard_map(
        lambda a, b: host(a, b, NN, out_sharding=P(None, None)),
        mesh=mesh,
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        axis_names={"x"},
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        x, y = put(mesh, (a, P("x", "y")), (b, P("y")))
        text, found = compiled(f, x, y)
        got = jax.jit(f)(x, y)
        grads = jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), (0, 1)))(x, y)
    assert is_ours(text)
    # JAX before 0.11 gathers what comes into such a shard_map; the product adds one sum.
    assert found.pop("all-reduce") == 1
    assert set(found) <= {"all-gather"}
    assert_close(got, a.astype(np.float64) @ b)
    g = np.cos(a.astype(np.float64) @ b)
    assert_close(grads, (g @ b.T, a.T @ g))


@pytest.mark.parametrize("check_vma", [True, False])
def test_partly_manual_with_automatic_axes_is_xlas(check_vma):
    mesh = mesh_of(AxisType.Auto, (2, 4), ("x", "y"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    x, y = put(mesh, (a, P("x", "y")), (b, P("y")))

    def f(product):
        specs = {"in_specs": (P("x"), P()), "out_specs": P("x"), "axis_names": {"x"}}
        return jax.shard_map(product, mesh=mesh, check_vma=check_vma, **specs)

    assert_close(jax.jit(f(jax_tcgemm.matmul))(x, y), a.astype(np.float64) @ b)
    (call,) = jax_tcgemm.explain(f(jax_tcgemm.matmul), x, y, platform="cpu")
    assert call.implementation == "xla"
    assert "partly manual shard_map" in call.why
    with pytest.raises(ValueError, match="host cannot run this: it is inside a partly manual"):
        jax.jit(f(matmul))(x, y)


def test_automatic_beside_explicit_axes_is_xlas():
    types = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=types, devices=jax.devices("cpu"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh):
        x, y = put(mesh, (a, P("x", "y")), (b, P("y")))
        f = functools.partial(jax_tcgemm.dot_general, dimension_numbers=NN, out_sharding=P())
        assert_close(jax.jit(f)(x, y), a.astype(np.float64) @ b)
        (call,) = jax_tcgemm.explain(f, x, y, platform="cpu")
    assert "automatic and explicit axes" in call.why


def test_explain_shows_what_each_device_does():
    mesh = mesh_of(AxisType.Explicit, (2, 4), ("x", "y"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh):
        x, y = put(mesh, (a, P("x", "y")), (b, P("y")))
        f = functools.partial(host, dimension_numbers=NN, out_sharding=P("x"))
        (call,) = jax_tcgemm.explain(f, x, y, platform="cpu")
    assert (call.problem.m, call.problem.n, call.problem.k) == (8, 32, 6)
    assert call.implementation == "host"


def test_explain_says_that_blas_calls_are_not_divided(capfd, monkeypatch):
    mesh = mesh_of(AxisType.Explicit, (2, 4), ("x", "y"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    with jax.set_mesh(mesh):
        x, y = put(mesh, (a, P("x")), (b, P()))
        (call,) = jax_tcgemm.explain(blas.gemm, x, y, platform="cpu")
        monkeypatch.setenv("TCGEMM_PRINT_CHOICE", "1")
        got = jax.jit(blas.gemm)(x, y)
    assert call.implementation == "xla"
    assert call.why in capfd.readouterr().err
    assert_close(got, a.astype(np.float64) @ b)


@pytest.mark.parametrize("num_axes", [0, 2])
def test_export(num_axes):
    """Unsharded programs and those with explicit axes can be exported, ours inside."""
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    checks = [export.DisabledSafetyCheck.custom_call(TARGET)]
    if num_axes:
        mesh = mesh_of(AxisType.Explicit, (2, 4), ("x", "y"))
        x, y = put(mesh, (a, P("x", "y")), (b, P("y")))
        f = functools.partial(host, dimension_numbers=NN, out_sharding=NamedSharding(mesh, P("x")))
    else:
        x, y, f = a, b, functools.partial(host, dimension_numbers=NN)
    exported = export.export(jax.jit(f), disabled_checks=checks)(x, y)
    assert TARGET in exported.mlir_module()
    restored = export.deserialize(exported.serialize())
    assert_close(restored.call(x, y), a.astype(np.float64) @ b)


def test_automatic_axes_are_exported_as_xlas_dot():
    mesh = mesh_of(AxisType.Auto, (2, 4), ("x", "y"))
    a, b = normal(16, 24, seed=0), normal(24, 32, seed=1)
    x, y = put(mesh, (a, P("x", "y")), (b, P("y")))
    exported = export.export(jax.jit(jax_tcgemm.matmul))(x, y)
    assert_close(export.deserialize(exported.serialize()).call(x, y), a.astype(np.float64) @ b)
    with pytest.raises(ValueError, match="it is exported for several devices"):
        export.export(jax.jit(matmul))(x, y)


def test_persistent_cache_keys_are_stable(run_python, tmp_path):
    code = """
import jax, jax_tcgemm
from jax.sharding import NamedSharding, PartitionSpec as P
a, b = jax.numpy.ones((16, 24)), jax.numpy.ones((24, 32))
f = lambda a, b: jax_tcgemm.matmul(a, b, implementation="host")
jax.jit(f)(a, b)
mesh = jax.make_mesh((2, 4), ("x", "y"))
put = lambda v, s: jax.device_put(v, NamedSharding(mesh, s))
jax.jit(jax.grad(lambda a, b: f(a, b).sum()))(put(a, P("x", "y")), put(b, P()))
"""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
    found = []
    for _ in range(2):
        run_python(code, **settings)
        found.append({path.name for path in (tmp_path / "cache").glob("*-cache")})
    assert found[0]
    assert found[0] == found[1]
