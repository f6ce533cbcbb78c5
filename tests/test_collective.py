"""Products overlapped with the exchange of operands or results, on CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import assert_close, compiled, is_ours, mesh_of, normal

import jax_tcgemm

gather_product = functools.partial(jax_tcgemm.all_gather_matmul, implementation="host")
product_scatter = functools.partial(jax_tcgemm.matmul_reduce_scatter, implementation="host")

DEVICES = pytest.mark.parametrize("devices", [1, 2, 4, 8])


def over(mesh, f, in_specs, out_specs, check_vma=True):
    """A function of whole arrays, which are divided as `in_specs` say."""
    if isinstance(mesh, int):
        mesh = mesh_of(AxisType.Auto, (mesh,), ("model",))
    f = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    if not mesh.are_all_axes_explicit:
        return f
    shardings = [NamedSharding(mesh, spec) for spec in in_specs]
    return lambda *args: f(*map(jax.sharding.reshard, args, shardings))


def gathering(devices, chunks=None):
    f = functools.partial(gather_product, axis_name="model", chunks=chunks)
    return over(devices, f, (P("model"), P(None, "model")), P(None, "model"))


def scattering(devices, chunks=None):
    f = functools.partial(product_scatter, axis_name="model", chunks=chunks)
    return over(devices, f, (P(None, "model"), P("model")), P("model"))


@DEVICES
@pytest.mark.parametrize("chunks", [None, 1, 3])
@pytest.mark.parametrize("make", [gathering, scattering], ids=["gather", "scatter"])
def test_values_and_gradients(make, chunks, devices):
    x, w = normal(48, 16, seed=0), normal(16, 24, seed=1)
    f = make(devices, chunks)
    text, found = compiled(f, x, w)
    assert is_ours(text)
    kind = "all-gather" if make is gathering else "all-to-all"
    assert set(found) == ({kind} if devices > 1 else set())
    assert_close(jax.jit(f)(x, w), x.astype(np.float64) @ w)
    grads = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))
    g = np.cos(x.astype(np.float64) @ w)
    assert_close(grads(x, w), (g @ w.T, x.T @ g))
    assert is_ours(compiled(grads, x, w)[0])


@pytest.mark.parametrize(
    ("make", "products"),
    [(gathering, 3 + 3 + 1), (scattering, 2 + 2 * 2)],
    ids=["gather", "scatter"],
)
def test_forward_mode(make, products):
    """One exchange for the value and one for its tangent; forward over reverse mode, too."""
    kind = "all-gather" if make is gathering else "all-to-all"
    x, w, dx, dw = (normal(*shape, seed=i) for i, shape in enumerate([(24, 8), (8, 12)] * 2))
    wide = [v.astype(np.float64) for v in (x, w, dx, dw)]
    f = make(4, chunks=2)
    tangent = jax.jit(lambda x, w, *tangents: jax.jvp(f, (x, w), tangents))
    text, found = compiled(tangent, x, w, dx, dw)
    assert is_ours(text)
    assert set(found) == {kind}
    assert_close(tangent(x, w, dx, dw), (wide[0] @ wide[1], wide[2] @ wide[1] + wide[0] @ wide[3]))

    calls = jax_tcgemm.explain(tangent, x, w, dx, dw, platform="cpu")
    assert [call.implementation for call in calls] == ["host"] * products

    def hvp(f, x, w, *tangents):
        grads = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))
        return jax.jvp(grads, (x, w), tangents)[1]

    with jax.enable_x64(True):
        expected = hvp(jnp.matmul, *wide)
    assert_close(jax.jit(functools.partial(hvp, f))(x, w, dx, dw), expected, terms=512)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tensor_parallel_mlp(axis_type, check_vma):
    """Against the same layer by XLA alone; the gradient of the gradient, too."""

    def layer(x, up, down):
        h = jnp.tanh(gather_product(x, up, "model"))
        return product_scatter(h, down, "model")

    specs = P("model"), P(None, "model"), P("model")
    f = over(mesh_of(axis_type, (4,), ("model",)), layer, specs, P("model"), check_vma)
    args = normal(8, 6, seed=0), normal(6, 16, seed=1), normal(16, 6, seed=2)

    def losses(f):
        def loss(*args):
            return jnp.sum(jnp.sin(f(*args)))

        def penalty(*args):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*args))

        return [jax.value_and_grad(loss, (0, 1, 2)), jax.grad(penalty, (0, 1, 2))]

    with jax.enable_x64(True):
        wide = [v.astype(np.float64) for v in args]
        expected = [g(*wide) for g in losses(lambda x, u, d: jnp.tanh(x @ u) @ d)]
    got = [jax.jit(g)(*args) for g in losses(f)]
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-4), got, expected)


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.vmap], ids=["remat", "vmap"])
def test_transformations(transform):
    """Inside and outside of shard_map."""
    x, w = normal(3, 8, 6, seed=0), normal(6, 16, seed=1)
    if transform is jax.vmap:
        inner = jax.vmap(functools.partial(gather_product, axis_name="model"), (0, None))
    else:
        inner = jax.checkpoint(functools.partial(gather_product, axis_name="model"))
    f = over(4, inner, (P(None, "model"), P(None, "model")), P(None, None, "model"))
    assert_close(f(x, w), x.astype(np.float64) @ w)
    got = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(x, w)
    g = np.cos(x.astype(np.float64) @ w)
    assert_close(got, (g @ w.T, np.einsum("bmk,bmn->kn", x, g)))


@pytest.mark.parametrize("make", [gathering, scattering], ids=["gather", "scatter"])
@pytest.mark.parametrize("dims", [(0, None), (None, 1), (1, 0)], ids=str)
def test_gradients_and_tangents_of_a_batch(dims, make):
    shapes = [(8, 4), (4, 8)]
    shapes = [s if d is None else (*s[:d], 3, *s[d:]) for s, d in zip(shapes, dims, strict=True)]
    args = [normal(*shape, seed=seed) for seed, shape in enumerate(2 * shapes)]
    f = make(4)

    def derivatives(f, x, w, *tangents):
        loss = lambda x, w: jnp.sum(jnp.sin(jax.vmap(f, dims)(x, w)))  # noqa: E731
        grads = jax.grad(loss, (0, 1))
        each = jax.vmap(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)), dims)(x, w)
        return grads(x, w), jax.jvp(loss, (x, w), tangents)[1], each

    with jax.enable_x64(True):
        expected = derivatives(jnp.matmul, *(v.astype(np.float64) for v in args))
    assert_close(jax.jit(functools.partial(derivatives, f))(*args), expected, terms=512)


def test_an_axis_of_two_names_and_weights_that_do_not_vary():
    mesh = mesh_of(AxisType.Auto, (2, 2), ("x", "y"))
    x, w = normal(8, 6, seed=0), normal(6, 16, seed=1)
    f = jax.shard_map(
        lambda x, w: lax.pmean(gather_product(x, w, ("x", "y")), ("x", "y")),
        mesh=mesh,
        in_specs=(P(("x", "y")), P()),
        out_specs=P(),
    )
    assert_close(jax.jit(f)(x, w), x.astype(np.float64) @ w)
    got = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(f(x, w)))))(w)
    assert_close(got, x.T @ np.cos(x.astype(np.float64) @ w))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_narrow_types_are_summed_wide(dtype):
    x = jnp.asarray(3 * normal(16, 64, seed=0)).astype(dtype)
    w = jnp.asarray(3 * normal(64, 8, seed=1)).astype(dtype)
    got = jax.jit(scattering(8))(x, w)
    assert got.dtype == dtype
    if dtype == "int8":
        whole = np.asarray(x, np.int64) @ np.asarray(w, np.int64)
        np.testing.assert_array_equal(got, whole.astype(np.int8))
        return
    x, w = np.asarray(x).astype(np.float64), np.asarray(w).astype(np.float64)
    parts = np.abs(np.einsum("mdk,dkn->dmn", x.reshape(16, 8, 8), w.reshape(8, 8, 8)))
    # One rounding of each device's product and one of the sum.
    eps = float(jnp.finfo(dtype).eps) / 2
    bound = 1.01 * eps * (parts.sum(0) + np.abs(x @ w)) + 1e-4
    assert (np.abs(np.asarray(got).astype(np.float64) - x @ w) <= bound).all()


def test_a_product_without_columns():
    assert jax.jit(scattering(8))(jnp.ones((16, 8)), jnp.ones((8, 0))).shape == (16, 0)


def test_every_device_gathers_the_same_bits():
    def f(x, w):
        return gather_product(x, w, "model")[None]

    f = over(8, f, (P("model"), P()), P("model"))
    got = np.asarray(jax.jit(f)(normal(16, 64, seed=0), normal(64, 8, seed=1)))
    assert (got == got[0]).all()


def test_errors():
    x, w = normal(12, 6, seed=0), normal(6, 16, seed=1)
    with pytest.raises(ValueError, match="axis_name must be a mesh axis that is manual here"):
        gather_product(x, w, "model")
    with pytest.raises(ValueError, match="chunks must divide the rows of x, got chunks=2"):
        gathering(4, 2)(x, w)
    with pytest.raises(ValueError, match="multiple of devices times chunks"):
        scattering(4, 2)(normal(12, 8, seed=0), normal(8, 4, seed=1))
    with pytest.raises(ValueError, match="chunks must be a positive integer"):
        gathering(4, 0)(x, w)
    with pytest.raises(ValueError, match=r"must have shapes \(\.\.\., m, k\) and \(k, n\)"):
        gathering(4)(normal(12, 8, seed=0), w)
    f = functools.partial(jax_tcgemm.all_gather_matmul, axis_name="model", implementation="magic")
    with pytest.raises(ValueError, match="all_gather_matmul: implementation must be"):
        over(4, f, (P("model"), P()), P("model"))(x, w)
