"""`all_reduce` on CPU devices, and what its programs for GPUs contain."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import assert_close, mesh_of, normal

import jax_tcgemm
from jax_tcgemm.system.jax_internals import jaxprs

DEVICES = 4
CUSTOM_CALL = "@tcgemm_all_reduce"
CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])


def over(f, in_specs=None, check_vma=True, sizes=(DEVICES,), axes=("x",)):
    """A function of arrays that are sharded over CPU devices, whose result every device has."""
    mesh = mesh_of(AxisType.Auto, sizes, axes)
    specs = {"in_specs": P("x") if in_specs is None else in_specs, "out_specs": P()}
    return jax.shard_map(f, mesh=mesh, **specs, check_vma=check_vma)


def summing(axis="x", **how):
    return lambda x: jax_tcgemm.all_reduce(x, axis, **how)


def for_cuda(f, *args):
    """The program that a GPU would run, as text."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def explained(f, *args):
    (call,) = jax_tcgemm.explain(f, *args, platform="cuda")
    return call


@CHECKS
@pytest.mark.parametrize("run", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_sums(run, check_vma):
    x = normal(DEVICES, 5, 7, seed=0)
    got = run(over(summing(), check_vma=check_vma))(x)
    assert_close(got, x.astype(np.float64).sum(0, keepdims=True))


def test_sums_over_several_axes():
    x = normal(4, 6, seed=0)
    f = over(summing(("x", "y")), P(("x", "y")), sizes=(2, 2), axes=("x", "y"))
    assert_close(jax.jit(f)(x), x.astype(np.float64).sum(0, keepdims=True))


@CHECKS
def test_gradients_are_those_of_psum(check_vma):
    x, dx = normal(DEVICES, 9, seed=0), normal(DEVICES, 9, seed=1)

    def loss(f):
        return lambda x: jnp.sum(jnp.sin(over(f, check_vma=check_vma)(x)))

    ours, peer = loss(summing()), loss(lambda x: lax.psum(x, "x"))
    assert_close(jax.jit(jax.grad(ours))(x), jax.grad(peer)(x))
    assert_close(jax.jvp(ours, (x,), (dx,)), jax.jvp(peer, (x,), (dx,)))
    second = [jax.jvp(jax.grad(f), (x,), (dx,)) for f in (ours, peer)]
    assert_close(*second)


def test_batches():
    x = normal(3, DEVICES, 5, seed=0)
    f = jax.vmap(over(summing()))
    assert_close(jax.jit(f)(x), x.astype(np.float64).sum(1, keepdims=True))
    inside = over(jax.vmap(summing()), P(None, "x"))
    assert_close(jax.jit(inside)(x), x.astype(np.float64).sum(1, keepdims=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_small_arrays_are_summed_by_the_kernel(dtype):
    x = jnp.ones((DEVICES, 8), dtype)
    f = over(summing())
    assert CUSTOM_CALL in for_cuda(f, x)
    call = explained(f, x)
    assert call.implementation == "peer_memory"
    assert (call.problem.elements, call.problem.devices) == (8, DEVICES)


@pytest.mark.parametrize(
    ("how", "shape", "dtype", "why"),
    [
        (
            {"sizes": (2, 2), "axes": ("x", "y")},
            (2, 8),
            "float32",
            "the axes must cover all devices of the mesh",
        ),
        ({}, (DEVICES, 8), "int32", "the dtype must be float16, bfloat16 or float32, got int32"),
        ({}, (DEVICES, 1 << 20), "float32", "at most 2796192 bytes, got 4194304"),
    ],
    ids=["one of two axes", "integers", "a large array"],
)
def test_other_sums_are_those_of_xla(how, shape, dtype, why):
    x = jax.ShapeDtypeStruct(shape, dtype)
    f = over(summing(), **how)
    assert CUSTOM_CALL not in for_cuda(f, x)
    call = explained(f, x)
    assert call.implementation == "xla"
    assert why in "; ".join((call.why, *call.rejected.values()))


def test_several_processes_sum_by_xla(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    call = explained(over(summing()), jnp.ones((DEVICES, 8)))
    assert call.implementation == "xla"
    assert "several processes" in call.why


def test_exported_programs_sum_by_xla():
    exported = jax.export.export(jax.jit(over(summing())), platforms=["cuda"])
    text = exported(jnp.ones((DEVICES, 8))).mlir_module()
    assert CUSTOM_CALL not in text
    assert "stablehlo.all_reduce" in text


@pytest.mark.parametrize("axis_type", [AxisType.Explicit], ids=str)
def test_sharded_products_sum_by_the_kernel(axis_type):
    mesh = mesh_of(axis_type, (DEVICES,), ("x",))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(8, 64, seed=0), NamedSharding(mesh, P(None, "x")))
        w = jax.device_put(normal(64, 16, seed=1), NamedSharding(mesh, P("x")))
        f = functools.partial(jax_tcgemm.matmul, out_sharding=P(), implementation="wgmma")
        assert for_cuda(f, x, w).count(f"custom_call {CUSTOM_CALL}") == 1
        calls = jax_tcgemm.explain(f, x, w, platform="cuda")
        assert [call.implementation for call in calls] == ["wgmma", "peer_memory"]
        assert calls[1].problem.elements == 8 * 16
        layer = functools.partial(jax_tcgemm.linear, activation="silu", out_sharding=P())
        calls = jax_tcgemm.explain(layer, x, w, platform="cuda")
        assert [call.implementation for call in calls].count("peer_memory") == 1
        assert for_cuda(layer, x, w).count(f"custom_call {CUSTOM_CALL}") == 1
        got = jax.jit(functools.partial(jax_tcgemm.matmul, out_sharding=P()))(x, w)
    assert_close(got, np.asarray(x, np.float64) @ np.asarray(w, np.float64))


@CHECKS
def test_accelerate_sums_by_the_kernel(check_vma):
    x, w = normal(8, 64, seed=0), normal(64, 16, seed=1)

    def layer(sum_over_devices, x, w):
        # The second sum is of integers, which stay.
        count = sum_over_devices(jnp.ones((), jnp.int32))
        return sum_over_devices(jnp.tanh(x @ w)) / count

    def f(sum_over_devices):
        specs = {"in_specs": (P(None, "x"), P("x")), "check_vma": check_vma}
        return over(functools.partial(layer, sum_over_devices), **specs)

    written = f(lambda y: lax.psum(y, "x"))
    fast = jax_tcgemm.accelerate(written)
    assert_close(jax.jit(fast)(x, w), written(x, w))
    text = for_cuda(fast, x, w)
    assert text.count(f"custom_call {CUSTOM_CALL}") == 1
    assert text.count('"stablehlo.all_reduce"') == 1
    assert [c.implementation for c in jax_tcgemm.explain(fast, x, w, platform="cuda")][-1:] == [
        "peer_memory"
    ]


def test_gradients_of_weights_are_summed_by_xla():
    """XLA combines these sums, one for each weight, and nothing waits for them."""
    mesh = mesh_of(AxisType.Explicit, (DEVICES,), ("x",))

    def loss(w, x):
        return jnp.sum(jnp.sin(jax_tcgemm.matmul(x, w, implementation="wgmma")))

    with jax.set_mesh(mesh):
        x = jax.device_put(normal(64, 16, seed=0), NamedSharding(mesh, P("x")))
        w = jax.device_put(normal(16, 8, seed=1), NamedSharding(mesh, P()))
        text = for_cuda(jax.grad(loss), w, x)
    assert "@tcgemm_gemm" in text
    assert CUSTOM_CALL not in text
    assert '"stablehlo.all_reduce"' in text


LAYERS = {
    "a product": lambda x, w: x @ w,
    "an einsum": lambda x, w: jnp.einsum("mk,kn->nm", x, w),
    "a jitted function": lambda x, w: jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w),
    "a rematerialized function": lambda x, w: jax.checkpoint(lambda x, w: (x @ w) * 2)(x, w),
    "a fused layer": lambda x, w: jax_tcgemm.linear(x, w, activation="silu"),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("with_mesh", [False, True], ids=["no mesh", "set_mesh"])
def test_accelerate_finds_sums_of_layers(layer, with_mesh):
    jaxprs._sums_over_axes.cache_clear()
    x, w = normal(8, 64, seed=0), normal(64, 16, seed=1)
    f = over(lambda x, w: lax.psum(LAYERS[layer](x, w), "x"), (P(None, "x"), P("x")))
    mesh = mesh_of(AxisType.Auto, (DEVICES,), ("x",))
    with jax.set_mesh(mesh) if with_mesh else contextlib.nullcontext():
        assert for_cuda(jax_tcgemm.accelerate(f), x, w).count(f"custom_call {CUSTOM_CALL}") == 1


def test_an_axis_of_vmap_hides_a_mesh_axis():
    x = normal(3, 5, seed=0)

    def both(f):
        inside = jax.vmap(f, axis_name="x", out_axes=None)
        return over(inside, P(), check_vma=False)(x)

    assert_close(both(summing()), both(lambda x: lax.psum(x, "x")))


def test_transposes_are_those_of_psum():
    x = normal(4, 5, seed=0)

    def transposed(f):
        def run(ct):
            return jax.linear_transpose(f, ct)(ct)[0]

        return over(run, P("x"), check_vma=False)(x)

    assert_close(transposed(summing()), transposed(lambda x: lax.psum(x, "x")))


def test_accelerate_leaves_sums_of_gradients_to_xla():
    x, w = normal(8, 16, seed=0), normal(16, 8, seed=1)

    def gradient(x, w):
        return lax.psum(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), "x")

    f = over(gradient, (P("x"), P()), check_vma=False)
    text = for_cuda(jax_tcgemm.accelerate(f), x, w)
    assert CUSTOM_CALL not in text
    assert text.count('"stablehlo.all_reduce"') == 1


def test_refusals():
    x = jnp.ones((DEVICES, 8))
    with pytest.raises(ValueError, match="all_reduce: axis_name must be a mesh axis that is man"):
        jax_tcgemm.all_reduce(x, "x")
    with pytest.raises(ValueError, match="all_reduce: axis_name must be a mesh axis that is man"):
        jax.vmap(summing(), axis_name="x")(x)
    with pytest.raises(ValueError, match="all_reduce: implementation must be one of peer_memory"):
        over(summing(implementation="ring"))(x)
    with pytest.raises(ValueError, match="peer_memory cannot run this: it runs on cuda, not on c"):
        jax.jit(over(summing(implementation="peer_memory")))(x)
    large = jax.ShapeDtypeStruct((DEVICES, 1 << 20), np.float32)
    with pytest.raises(ValueError, match="the array must have at most 2796192 bytes, got 4194304"):
        explained(over(summing(implementation="peer_memory")), large)
    with pytest.raises(TypeError, match="all_reduce: x must be"):
        over(lambda x: jax_tcgemm.all_reduce("x", "x"))(x)
