"""Sharded products and collective products on two GPUs or more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm

pytestmark = pytest.mark.gpu

NN = (((1,), (0,)), ((), ()))
M, N, K = 512, 768, 640


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    size = 4 if len(devices) >= 4 else 2
    return jax.make_mesh((size,), ("x",), axis_types=(request.param,), devices=devices[:size])


def draw(shape, dtype, seed):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def assert_close(got, expected, terms, dtype):
    """Sums of `terms` products of standard normals, rounded a few times."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    eps = 2**-10 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, expected, rtol=4 * eps, atol=4 * eps * terms**0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("implementation", ["wgmma", "cublaslt", None], ids=str)
@pytest.mark.parametrize(
    ("lhs", "rhs", "out"),
    [
        (P("x"), P(), P("x")),
        (P(), P(None, "x"), P(None, "x")),
        (P(None, "x"), P("x"), P()),
        (P(None, "x"), P("x"), P("x")),
        (P("x"), P("x"), P("x")),
    ],
    ids=["m", "n", "k", "k, result m", "m and k of rhs"],
)
def test_sharded_products(mesh, lhs, rhs, out, implementation, dtype):
    a, b = draw((M, K), dtype, 0), draw((K, N), dtype, 1)
    with jax.set_mesh(mesh):
        x, y = (jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((a, lhs), (b, rhs)))

        def f(x, y):
            if mesh.are_all_axes_explicit:
                kwargs = {"out_sharding": out, "implementation": implementation}
                return jax_tcgemm.dot_general(x, y, NN, **kwargs)
            got = jax_tcgemm.dot_general(x, y, NN, implementation=implementation)
            return lax.with_sharding_constraint(got, NamedSharding(mesh, out))

        text = jax.jit(f).lower(x, y).compile().as_text()
        got = jax.jit(f)(x, y)
        grads = jax.jit(jax.grad(lambda x, y: jnp.sum(f(x, y).astype(jnp.float32)), (0, 1)))(x, y)
    if implementation is not None:
        assert 'custom_call_target="tcgemm_gemm"' in text
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert_close(got, a @ b, K, dtype)
    ones = np.ones((M, N))
    assert_close(grads[0], ones @ b.T, N, dtype)
    assert_close(grads[1], a.T @ ones, M, dtype)


@pytest.mark.parametrize("mesh", [AxisType.Explicit], ids=str, indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("implementation", ["wgmma", None], ids=str)
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "out"),
    [
        (P("x"), P(), P("x")),
        (P(), P(None, "x"), P(None, "x")),
        (P(None, "x"), P("x"), P()),
        (P(None, "x"), P("x"), P("x")),
    ],
    ids=["m", "n", "k", "k, result m"],
)
def test_a_layer_with_out_sharding(mesh, x_spec, w_spec, out, implementation, dtype):
    """Bias, activation and residual once, after the sum over devices where there is one."""
    x, w, bias = (draw(s, dtype, i) for i, s in enumerate([(M, K), (K, N), (N,)]))
    w, residual = w / 16, draw((M, N), dtype, 3)

    def f(x, w, bias, residual):
        return jax_tcgemm.linear(
            x,
            w,
            bias,
            activation="relu",
            residual=residual,
            out_sharding=out,
            implementation=implementation,
        )

    with jax.set_mesh(mesh):
        args = [
            jax.device_put(v, NamedSharding(mesh, s))
            for v, s in ((x, x_spec), (w, w_spec), (bias, P()), (residual, out))
        ]
        got = jax.jit(f)(*args)
        grads = jax.jit(jax.grad(lambda *a: jnp.sum(f(*a).astype(jnp.float32)), (0, 1, 2)))(*args)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    x, w, bias, residual = (np.asarray(v, np.float64) for v in (x, w, bias, residual))
    z = x @ w + bias
    assert_close(got, np.maximum(z, 0) + residual, K, dtype)
    # Where z rounds to the other side of 0, a gradient may count an element that is none.
    slope, doubtful = z > 0, (np.abs(z) < 2**-6).astype(np.float64)
    bounds = doubtful @ np.abs(w).T, np.abs(x).T @ doubtful, doubtful.sum(0)
    expected = slope @ w.T, x.T @ slope, slope.sum(0)
    for grad, value, bound, terms in zip(grads, expected, bounds, (N, M, M), strict=True):
        eps = 2**-10 if dtype == "float32" else float(jnp.finfo(dtype).eps)
        error = np.abs(np.asarray(grad, np.float64) - value)
        assert (error <= bound + 4 * eps * (np.abs(value) + 4 * terms**0.5)).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_use_memcpy_local_p2p": True},
    ],
    ids=["defaults", "copy engines"],
)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("implementation", ["wgmma", "cublaslt"])
def test_collective_layer(mesh, implementation, chunks, options):
    how = {"axis_name": "x", "chunks": chunks, "implementation": implementation}
    gather_product = functools.partial(jax_tcgemm.all_gather_matmul, **how)
    product_scatter = functools.partial(jax_tcgemm.matmul_reduce_scatter, **how)
    specs = P("x"), P(None, "x"), P("x")
    layer = jax.shard_map(
        lambda x, up, down: product_scatter(jax.nn.silu(gather_product(x, up)), down),
        mesh=mesh,
        in_specs=specs,
        out_specs=P("x"),
    )
    arrays = (
        draw((M, K), "bfloat16", 0),
        draw((K, N), "bfloat16", 1) * K**-0.5,
        draw((N, K), "bfloat16", 2) * N**-0.5,
    )
    args = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(arrays, specs, strict=True)]

    def step(layer, *args):
        y, backward = jax.vjp(layer, *args)
        return y, *backward(y)

    got = jax.jit(functools.partial(step, layer), compiler_options=options)(*args)
    with jax.default_matmul_precision("highest"):
        expected = step(
            lambda x, u, d: jax.nn.silu(x @ u) @ d, *(v.astype("float32") for v in arrays)
        )
    for g, e in zip(got, expected, strict=True):
        g, e = np.asarray(g, np.float64), np.asarray(e, np.float64)
        assert np.linalg.norm(g - e) <= 0.02 * np.linalg.norm(e)
