"""Rows whose bits are their own: any number of rows, groups, layouts, layers and shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits_of_rows import rows_that_differ
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal, widened

import jax_tcgemm
from jax_tcgemm.selection.configs import order_of_sums

# Every size at which tiles, blocks or the kernel of a single row would be others.
ROWS = (
    1,
    2,
    3,
    5,
    6,
    7,
    8,
    13,
    14,
    15,
    16,
    17,
    28,
    29,
    64,
    65,
    127,
    129,
    256,
    511,
    513,
    1000,
    4096,
)
FEWER = (1, 2, 7, 13, 15, 64, 129, 513)
NT, TN = (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))
invariant = functools.partial(jax_tcgemm.matmul, batch_invariant=True)


differing = functools.partial(rows_that_differ, rows=ROWS)


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "int8"])
@pytest.mark.parametrize("k", [33, 700])
def test_numbers_of_rows(dtype, k):
    scale = 30 if dtype == "int8" else 1
    x, w = (scale * normal(4096, k)).astype(dtype), (scale * normal(k, 40, seed=1)).astype(dtype)
    assert differing(invariant, x, w) == []
    got = widened(invariant(x[:9], w))
    wide = widened(x[:9]) @ widened(w)
    if dtype != "int8":
        np.testing.assert_allclose(got, wide, rtol=2e-2, atol=2e-2 * k**0.5)


@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize("numbers", [NT, TN], ids=["NT", "TN"])
def test_layouts(numbers, n):
    x, w = normal(4096, 300), normal(300, n, seed=1)
    w = w.T if numbers == NT else w

    def f(x, w):
        x = x.T if numbers == TN else x
        return jax_tcgemm.dot_general(x, w, numbers, batch_invariant=True)

    assert differing(f, x, w) == []


def test_without_it_rows_differ():
    """Of one row the same implementation has another order, and so has XLA."""
    x, w = normal(64, 700), normal(40, 700, seed=1)
    f = functools.partial(jax_tcgemm.dot_general, dimension_numbers=NT, implementation="host")
    assert differing(f, x, w, rows=(1, 2)) == [1]


def test_order_of_rows():
    x, w = normal(200, 300), normal(300, 40, seed=1)
    order = np.random.default_rng(3).permutation(200)
    f = jax.jit(invariant)
    np.testing.assert_array_equal(f(x, w)[order], f(x[order], w))


def test_batches_and_vectors():
    x, w = normal(6, 5, 300), normal(300, 40, seed=1)
    among_all = jax.jit(invariant)(x, w)
    for i in range(6):
        np.testing.assert_array_equal(jax.jit(invariant)(x[i], w), among_all[i])
        np.testing.assert_array_equal(jax.jit(invariant)(x[i, 2], w), among_all[i, 2])
    mapped = jax.jit(jax.vmap(invariant, (0, None)))(x, w)
    np.testing.assert_array_equal(mapped, among_all)
    np.testing.assert_array_equal(jax.jit(jax.vmap(invariant, (1, None), 1))(x, w), among_all)


@pytest.mark.parametrize("length", [1, 2, 33])
def test_each_entry_by_its_own_matrix(length):
    q, k = normal(2, 64, 4, 32), normal(2, 50, 4, 32, seed=1)
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    f = jax.jit(lambda q: jax_tcgemm.dot_general(q, k, numbers, batch_invariant=True))
    np.testing.assert_array_equal(f(q[:, :length]), f(q)[:, :, :length])


@pytest.mark.parametrize("precision", ["BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "highest"])
def test_precisions(precision):
    x, w = normal(513, 300), normal(300, 40, seed=1)
    f = functools.partial(invariant, precision=precision)
    assert differing(f, x, w, rows=FEWER) == []


# --- layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["linear", "gated", "function", "mlp", "gradient of mlp"])
def test_layers(kind, dtype):
    """By activations that are exact: on a CPU XLA's others may differ where loops do."""
    x, g = normal(4096, 120, dtype=dtype), normal(4096, 120, seed=1, dtype=dtype)
    w, bias = normal(120, 48, seed=2, dtype=dtype), normal(48, seed=3, dtype=dtype)
    weights = normal(120, 2, 48, seed=4, dtype=dtype) / 11
    params = {"up": weights, "down": normal(48, 120, seed=5, dtype=dtype) / 7}
    params["up_bias"] = normal(2, 48, seed=6, dtype=dtype)
    how = {"batch_invariant": True}
    f = {
        "linear": lambda x: jax_tcgemm.linear(x, w, bias, activation="relu", **how),
        "gated": lambda x: jax_tcgemm.gated_linear(x, weights, activation="relu", **how),
        "function": lambda x: jax_tcgemm.matmul(
            x, w, epilogue=lambda acc: (abs(acc), acc.max(-1)), **how
        ),
        "mlp": lambda x: jax_tcgemm.mlp(x, params, activation="relu", residual=x, **how),
        "gradient of mlp": lambda both: jax.vjp(
            lambda x: jax_tcgemm.mlp(x, params, activation="relu", **how), both[:, :120]
        )[1](both[:, 120:])[0],
    }[kind]
    x = jnp.concatenate([x, g], 1) if kind.startswith("gradient") else x
    assert differing(f, x) == []


# --- groups -------------------------------------------------------------------------------------


def grouped(kind, w, up, bias):
    how = {"batch_invariant": True}
    return {
        "plain": lambda x, sizes: jax_tcgemm.ragged_dot(x, w, sizes, **how),
        "gradient": lambda x, sizes: jax.vjp(
            lambda x: jax_tcgemm.ragged_dot(x, up, sizes, **how), jnp.zeros((len(x), 40))
        )[1](x)[0],
        "layer": lambda x, sizes: jax_tcgemm.ragged_dot(
            x, w, sizes, activation="relu", bias=bias, **how
        ),
        "gated": lambda x, sizes: jax_tcgemm.gated_ragged_linear(
            x, w.reshape(5, 120, 2, 20), sizes, "relu", **how
        ),
        "gathered": lambda x, sizes: jax_tcgemm.ragged_dot(
            x[::-1], w, sizes, gather_indices=jnp.arange(len(x))[::-1], **how
        ),
        "function": lambda x, sizes: jax_tcgemm.ragged_dot(x, w, sizes, epilogue=jnp.abs, **how),
    }[kind]


@pytest.mark.parametrize("kind", ["plain", "gradient", "layer", "gated", "gathered", "function"])
def test_sizes_of_groups(kind):
    """Each row as in a group that has all of them."""
    x, w, bias = normal(300, 120), normal(5, 120, 40, seed=1), normal(5, 40, seed=2)
    f = jax.jit(grouped(kind, w, normal(5, 40, 120, seed=3), bias))
    of_one_group = [f(x, jnp.asarray(300 * np.eye(5, dtype=int)[group])) for group in range(5)]
    rng = np.random.default_rng(4)
    cuts = [np.sort(rng.integers(0, 300, 4)) for _ in range(6)]
    for sizes in ([1, 0, 1, 297, 1], *(np.diff([0, *own, 300]) for own in cuts)):
        got = np.asarray(f(x, jnp.asarray(sizes)))
        of_row = np.repeat(np.arange(5), sizes)
        expected = np.stack([of_one_group[group][row] for row, group in enumerate(of_row)])
        np.testing.assert_array_equal(got, expected)
    assert len({bytes(np.asarray(y)) for y in of_one_group}) == 5


# --- several devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("num_devices", [2, 8])
def test_rows_over_devices(num_devices, axis_type):
    mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(axis_type,))
    x, w = normal(8, 300), normal(300, 40, seed=1)
    expected = jax.jit(invariant)(x, w)
    place = functools.partial(jax.device_put)
    with jax.set_mesh(mesh):
        placed = place(x, NamedSharding(mesh, P("x"))), place(w, NamedSharding(mesh, P()))
        np.testing.assert_array_equal(jax.jit(invariant)(*placed), expected)


# --- how it is asked for ------------------------------------------------------------------------


def test_a_block_asks_for_every_product_in_it():
    x, w = normal(64, 700), normal(40, 700, seed=1)
    f = jax.jit(lambda x: jax_tcgemm.dot_general(x, w, NT))
    outside = jax_tcgemm.explain(f, x)[0].why
    with jax_tcgemm.batch_invariant():
        assert differing(f, x, rows=(1, 2, 7)) == []
        assert "as for 4096 rows" in jax_tcgemm.explain(f, x)[0].why
        with jax_tcgemm.batch_invariant(64):
            assert "as for 64 rows" in jax_tcgemm.explain(f, x)[0].why
        with jax_tcgemm.batch_invariant(False):
            assert jax_tcgemm.explain(f, x)[0].why == outside
        own = jax_tcgemm.explain(lambda x: jax_tcgemm.matmul(x, x.T, batch_invariant=False), x)
        assert "4096" not in own[0].why
        named = jax_tcgemm.explain(lambda x: jax_tcgemm.matmul(x, x.T, implementation="xla"), x)
        assert named[0].implementation == "xla"
        with jax_tcgemm.patch():
            (call,) = jax_tcgemm.explain(lambda x: x @ w.T, x)
            assert "as for 4096 rows" in call.why
    assert jax_tcgemm.explain(f, x)[0].why == outside


@pytest.mark.parametrize("shape", ["dense", "swapped", "grouped"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_one_order_of_sums_on_a_gpu(shape, dtype):
    """For few rows as for many, whichever orientation, alignment and batch they come in."""

    def call(rows, how):
        x, w = (rows, 512), (512, 768)
        if shape == "grouped":
            shapes = (x, (3, *w))
            f = lambda x, w: jax_tcgemm.ragged_dot(x, w, jnp.array([rows, 0, 0]), **how)  # noqa: E731
        elif shape == "swapped":
            shapes = (x, w)
            f = lambda x, w: jax.vmap(  # noqa: E731
                lambda x: jax_tcgemm.matmul(x, w, **how), out_axes=1
            )(x)
        else:
            shapes = (x, w)
            f = lambda x, w: jax_tcgemm.matmul(x, w, **how)  # noqa: E731
        types = [jax.ShapeDtypeStruct(each, dtype) for each in shapes]
        (found,) = jax_tcgemm.explain(f, *types, platform="cuda")
        return found.implementation, found.config

    if shape == "grouped" and dtype == "float8_e4m3fn":
        return  # which is XLA's
    for how in ({"batch_invariant": True}, {"batch_invariant": 64}):
        found = [call(rows, how) for rows in (1, 2, 7, 64, 100, 333, 4096, 50000)]
        (implementation,) = {name for name, _ in found}
        assert implementation in ("wgmma", "mma_sync")
        # How K is divided, by clusters and by splits; of other kernels it is one config.
        order = order_of_sums if implementation == "wgmma" else str
        assert len({order(config) for _, config in found}) == 1
    free = {call(rows, {}) for rows in (1, 64, 4096)}
    assert shape == "grouped" or len(free) > 1


def test_choices_are_for_so_many_rows():
    types = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((16, 4096), (4096, 4096))]
    configs = [
        jax_tcgemm.explain(
            lambda x, w, rows=rows: jax_tcgemm.matmul(x, w, batch_invariant=rows),
            *types,
            platform="cuda",
        )[0].config
        for rows in (16, 4096, True)
    ]
    assert configs[0] != configs[1] == configs[2]


def test_refusals():
    x = normal(8, 8)
    with pytest.raises(ValueError, match="matmul: implementation must be None with batch_inv"):
        jax_tcgemm.matmul(x, x, implementation="host", batch_invariant=True)
    with pytest.raises(TypeError, match="linear: batch_invariant must be True, False, None or"):
        jax_tcgemm.linear(x, x, batch_invariant="yes")
    with pytest.raises(ValueError, match="mlp: batch_invariant must be at least 2"):
        jax_tcgemm.mlp(x, {"up": x, "down": x}, batch_invariant=1)
    with pytest.raises(TypeError, match="batch_invariant: rows must be True"):
        jax_tcgemm.batch_invariant(0.5).__enter__()
    message = "dot_general: batch_invariant must be False for what only XLA runs, .*int32"
    with pytest.raises(ValueError, match=message):
        jax_tcgemm.dot_general(x.astype(int), x.astype(int), NT, batch_invariant=True)


def test_derivatives_inherit_it():
    x, w = normal(64, 300), normal(300, 40, seed=1)
    report = jax_tcgemm.explain(
        jax.grad(lambda x, w: invariant(x, w).sum(), (0, 1)), x, w, platform="cuda"
    )
    assert all("as for 4096 rows" in call.why for call in report)
    g = normal(64, 40, seed=2)
    f = lambda both: jax.vjp(lambda x: invariant(x, w), both[:, :300])[1](both[:, 300:])[0]  # noqa: E731
    assert differing(f, jnp.concatenate([x, g], 1), rows=(1, 2, 7)) == []
