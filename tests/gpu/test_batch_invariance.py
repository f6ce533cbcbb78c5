"""Rows whose bits are their own on a GPU: any number of rows, groups, layers and shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits_of_rows import bits, rows_that_differ
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_arrays import normal

import jax_tcgemm
from jax_tcgemm.selection import implementations
from jax_tcgemm.selection.configs import order_of_sums

pytestmark = pytest.mark.gpu

# Every size at which a tile begins or ends, and the kernel of few rows.
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 256, 257, 511, 1000)
NT, TN = (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))


differing = functools.partial(rows_that_differ, rows=ROWS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("decided_by", [True, 64])
@pytest.mark.parametrize(("n", "k"), [(512, 768), (333, 1111), (8, 4096)])
def test_numbers_of_rows(n, k, decided_by, dtype):
    x, w = normal(4096, k).astype(dtype), normal(k, n, seed=1).astype(dtype)
    f = functools.partial(
        jax_tcgemm.matmul, batch_invariant=decided_by, preferred_element_type="float32"
    )
    assert differing(f, x, w) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("order", [(1, 1), (2, 1), (4, 1)], ids=str)
def test_configs_of_one_order(order, dtype):
    """All that `considered_alike` takes for one another, of as wide a range as floats may have."""
    x, w = normal(200, 1000), normal(1000, 304, seed=1)
    x, w = ((a * jnp.exp(2 * normal(*a.shape, seed=2))).astype(dtype) for a in (x, w))
    how = {"precision": "tensorfloat32"} if dtype == "float32" else {}
    how |= {"implementation": "wgmma", "preferred_element_type": "float32"}
    alike = [c for c in implementations.configs_of("wgmma") if order_of_sums(c) == order]
    assert len(alike) > 4
    assert len({bits(jax_tcgemm.matmul(x, w, config=c, **how)).tobytes() for c in alike}) == 1


@pytest.mark.parametrize("precision", ["highest", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6"])
def test_precisions(precision):
    x, w = normal(1024, 512), normal(512, 256, seed=1)
    f = functools.partial(jax_tcgemm.matmul, batch_invariant=True, precision=precision)
    assert differing(f, x, w) == []


@pytest.mark.parametrize("numbers", [NT, TN], ids=["NT", "TN"])
@pytest.mark.parametrize("k", [512, 515])
def test_layouts(k, numbers):
    x, w = normal(1024, k, dtype="bfloat16"), normal(k, 384, seed=1, dtype="bfloat16")
    w = w.T if numbers == NT else w

    def f(x, w):
        x = x.T if numbers == TN else x
        return jax_tcgemm.dot_general(x, w, numbers, batch_invariant=True)

    assert differing(f, x, w) == []


def test_batches():
    x, w = normal(6, 50, 512, dtype="bfloat16"), normal(512, 384, seed=1, dtype="bfloat16")
    f = jax.jit(functools.partial(jax_tcgemm.matmul, batch_invariant=True))
    among_all = f(x, w)
    for i in range(6):
        np.testing.assert_array_equal(bits(f(x[i], w)), bits(among_all[i]))
    np.testing.assert_array_equal(bits(jax.vmap(f, (0, None))(x, w)), bits(among_all))
    np.testing.assert_array_equal(bits(jax.vmap(f, (1, None), 1)(x, w)), bits(among_all))


@pytest.mark.parametrize("kind", ["linear", "gated", "function", "mlp", "gradient of mlp"])
def test_layers(kind):
    dtype = "bfloat16"
    x, g = normal(2048, 512, dtype=dtype), normal(2048, 512, seed=1, dtype=dtype)
    w, bias = normal(512, 384, seed=2, dtype=dtype), normal(384, seed=3, dtype=dtype)
    weights = normal(512, 2, 384, seed=4, dtype=dtype) / 23
    params = {"up": weights, "down": normal(384, 512, seed=5, dtype=dtype) / 19}
    params["up_bias"] = normal(2, 384, seed=6, dtype=dtype)
    how = {"batch_invariant": True}
    f = {
        "linear": lambda x: jax_tcgemm.linear(x, w, bias, activation="gelu", **how),
        "gated": lambda x: jax_tcgemm.gated_linear(x, weights, **how),
        "function": lambda x: jax_tcgemm.matmul(
            x, w, epilogue=lambda acc: (jnp.tanh(acc), acc.max(-1)), **how
        ),
        "mlp": lambda x: jax_tcgemm.mlp(x, params, residual=x, **how),
        "gradient of mlp": lambda both: jax.vjp(
            lambda x: jax_tcgemm.mlp(x, params, **how), both[:, :512]
        )[1](both[:, 512:])[0],
    }[kind]
    x = jnp.concatenate([x, g], 1) if kind.startswith("gradient") else x
    assert differing(f, x) == []


@pytest.mark.parametrize("kind", ["plain", "gradient", "layer", "gated", "gathered", "function"])
def test_sizes_of_groups(kind):
    """Each row as in a group that has all of them."""
    x = normal(600, 512, dtype="bfloat16")
    w, up = (normal(5, *s, seed=1, dtype="bfloat16") for s in ((512, 256), (256, 512)))
    bias, how = normal(5, 256, seed=2, dtype="bfloat16"), {"batch_invariant": True}
    f = jax.jit(
        {
            "plain": lambda x, sizes: jax_tcgemm.ragged_dot(x, w, sizes, **how),
            "gradient": lambda x, sizes: jax.vjp(
                lambda x: jax_tcgemm.ragged_dot(x, up, sizes, **how), x[:, :256]
            )[1](x)[0],
            "layer": lambda x, sizes: jax_tcgemm.ragged_dot(
                x, w, sizes, activation="silu", bias=bias, **how
            ),
            "gated": lambda x, sizes: jax_tcgemm.gated_ragged_linear(
                x, w.reshape(5, 512, 2, 128), sizes, **how
            ),
            "gathered": lambda x, sizes: jax_tcgemm.ragged_dot(
                x[::-1], w, sizes, gather_indices=jnp.arange(len(x))[::-1], **how
            ),
            "function": lambda x, sizes: jax_tcgemm.ragged_dot(
                x, w, sizes, epilogue=jnp.tanh, **how
            ),
        }[kind]
    )
    of_one_group = [
        np.asarray(f(x, jnp.asarray(600 * np.eye(5, dtype=int)[group]))) for group in range(5)
    ]
    rng = np.random.default_rng(4)
    cuts = [np.sort(rng.integers(0, 600, 4)) for _ in range(10)]
    for sizes in ([1, 0, 1, 597, 1], *(np.diff([0, *own, 600]) for own in cuts)):
        got = np.asarray(f(x, jnp.asarray(sizes)))
        of_row = np.repeat(np.arange(5), sizes)
        expected = np.stack([of_one_group[group][row] for row, group in enumerate(of_row)])
        np.testing.assert_array_equal(bits(got), bits(expected))


def test_experts_elsewhere():
    """How many groups a device has does not matter to their rows."""
    x, w = normal(200, 512, dtype="bfloat16"), normal(8, 512, 256, seed=1, dtype="bfloat16")
    f = jax.jit(functools.partial(jax_tcgemm.ragged_dot, batch_invariant=True))
    sizes = jnp.array([30, 0, 50, 20, 40, 10, 25, 25])
    among_all = f(x, w, sizes)
    np.testing.assert_array_equal(bits(f(x[:100], w[:4], sizes[:4])), bits(among_all[:100]))


def test_rows_over_devices():
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((2,), ("x",), devices=devices[:2])
    x, w = normal(64, 512, dtype="bfloat16"), normal(512, 384, seed=1, dtype="bfloat16")
    f = jax.jit(functools.partial(jax_tcgemm.matmul, batch_invariant=True))
    expected = f(x, w)
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in ((x, P("x")), (w, P()))
        )
        np.testing.assert_array_equal(bits(f(*placed)), bits(expected))
