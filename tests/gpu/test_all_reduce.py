"""Sums over GPUs by peer memory, beside float64 sums."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm

pytestmark = pytest.mark.gpu

EPS = {"float32": 2**-22, "bfloat16": 2**-8, "float16": 2**-11}
all_reduce = functools.partial(jax_tcgemm.all_reduce, implementation="peer_memory")


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    return jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,))


def drawn(mesh, size, dtype, seed=0):
    """One row of random numbers on each device."""
    values = np.random.default_rng(seed).standard_normal((mesh.size, size)).astype(np.float32)
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, P("x")))


def most_bytes(mesh):
    """Return the largest size in bytes of an array that the kernel takes."""
    return (8 << 20) // (mesh.size - 1) // 16 * 16


def over(mesh, f, out_specs=None):
    """A function of all devices' rows; each device's result by itself."""
    specs = {"in_specs": P("x"), "out_specs": out_specs or P("x"), "check_vma": False}
    return jax.jit(jax.shard_map(f, mesh=mesh, **specs))


def check(got, x):
    """Each device's row of the result is the sum of all rows, to the bit as on every other one."""
    expected = np.asarray(x, np.float64).sum(0)
    got = np.asarray(got)
    assert (got.view(np.uint8) == got[:1].view(np.uint8)).all()
    eps = EPS[str(x.dtype)]
    np.testing.assert_allclose(got[0].astype(np.float64), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1, 7, 8, 1000, 4096, 8192 * 64 + 3, "most"])
def test_sums(mesh, size, dtype):
    if size == "most":
        size = most_bytes(mesh) // np.dtype(jnp.dtype(dtype)).itemsize
    f = over(mesh, lambda x: all_reduce(x, "x"))
    for seed in range(4):
        x = drawn(mesh, size, dtype, seed)
        check(f(x), x)
    assert 'custom_call_target="tcgemm_all_reduce"' in f.lower(x).compile().as_text()


def test_larger_arrays_are_refused(mesh):
    most = most_bytes(mesh)
    x = drawn(mesh, most // 4 + 1, "float32")
    with pytest.raises(ValueError, match=f"at most {most} bytes, got {most + 4}"):
        over(mesh, lambda x: all_reduce(x, "x"))(x)
    check(over(mesh, lambda x: jax_tcgemm.all_reduce(x, "x"))(x), x)


def test_slices_that_are_not_aligned(mesh):
    x = drawn(mesh, 1003, "bfloat16")

    def f(x):
        # XLA keeps a slice in place, from which the kernel then reads.
        return all_reduce(lax.optimization_barrier(x)[:, 3:], "x")

    check(over(mesh, f)(x), x[:, 3:])


def test_many_sums_of_many_sizes(mesh):
    """Slots and flags of one sum are those of others, also of other programs."""
    sizes = [3, 70_000, 8, 5000, 200_000, 1]
    xs = [drawn(mesh, size, "float32", seed) for seed, size in enumerate(sizes)]

    def f(*xs):
        def step(_, ys):
            # Sums of means stay what they are.
            return tuple(all_reduce(y, "x") / mesh.size for y in ys)

        return lax.fori_loop(0, 50, step, xs)

    whole = over(mesh, f, tuple([P("x")] * len(xs)))
    single = over(mesh, lambda x: all_reduce(x, "x") / mesh.size)
    for _ in range(20):
        for x, got in zip(xs, whole(*xs), strict=True):
            check(got * mesh.size, x)
        check(single(xs[1]) * mesh.size, xs[1])


def test_a_device_that_lags(mesh):
    """Others wait for a device with work of its own."""
    first = jax.devices("cuda")[0]
    a = jax.device_put(jnp.ones((8192, 8192), jnp.bfloat16) / 8192, first)
    work = jax.jit(lambda a: lax.fori_loop(0, 400, lambda _, x: x @ a, a))
    jax.block_until_ready(work(a))
    f = over(mesh, lambda x: all_reduce(x, "x"))
    x = drawn(mesh, 5000, "bfloat16")
    check(f(x), x)
    busy = work(a)
    check(f(x), x)
    busy.block_until_ready()


def test_gradient_and_batch(mesh):
    x = drawn(mesh, 256, "float32")

    def loss(x):
        specs = {"in_specs": P("x"), "out_specs": P()}
        total = jax.shard_map(lambda x: all_reduce(x, "x"), mesh=mesh, **specs)(x)
        return jnp.sum(jnp.sin(total))

    expected = np.cos(np.asarray(x, np.float64).sum(0))
    got = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(got, np.broadcast_to(expected, x.shape), rtol=1e-5, atol=1e-5)
    batch = over(mesh, jax.vmap(lambda x: all_reduce(x, "x"), in_axes=1, out_axes=1))
    check(batch(x), x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_products_with_a_sharded_contracted_dimension(axis_type):
    """They sum over devices by the kernel, without being asked to."""
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(axis_type,))
    rng = np.random.default_rng(0)
    a, w = rng.standard_normal((16, 2048)), rng.standard_normal((2048, 1024))
    with jax.set_mesh(mesh):
        operands = [
            jax.device_put(jnp.asarray(v, jnp.bfloat16), NamedSharding(mesh, spec))
            for v, spec in ((a, P(None, "x")), (w, P("x")))
        ]
        explicit = {"out_sharding": P()} if axis_type == AxisType.Explicit else {}
        f = jax.jit(functools.partial(jax_tcgemm.matmul, implementation="wgmma", **explicit))
        assert "tcgemm_all_reduce" in f.lower(*operands).compile().as_text()
        got = f(*operands)
    expected = np.asarray(operands[0], np.float64) @ np.asarray(operands[1], np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2**-6, atol=2**-6 * 45)


def test_threads(mesh):
    """Programs that two threads call in turns give each its own sums."""
    f, lock, failures = over(mesh, lambda x: all_reduce(x, "x")), threading.Lock(), []
    xs = [drawn(mesh, 3000, "float32", seed) for seed in range(4)]

    def calls(x):
        try:
            for _ in range(50):
                with lock:
                    got = f(x)
                check(got, x)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=calls, args=(x,)) for x in xs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
