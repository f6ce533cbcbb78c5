"""Grouped products whose epilogue is a function of JAX: values by every kernel that takes one."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference as reference

import jax_tcgemm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

BF16, F16, F32, I8 = (jnp.dtype(x) for x in ("bfloat16", "float16", "float32", "int8"))
BOOL = jnp.dtype(bool)
GROUPS, M, NUM_ROWS = 10, 840, 300
# One program serves them all.
SIZES = {
    "mixed": [1, 0, 17, 64, 33, 129, 300, 2, 255, 0],
    "one group": [0, 801, 0, 0, 0, 0, 0, 0, 0, 0],
    "none": [0] * 10,
    "more than there are": [100, 0, 200] + [300] * 7,
}
SHAPES = {"whole": (512, 128), "odd": (264, 72)}
# Of form rows; the last one alone is of gated products and gathers rows.
CONFIGS = "128x256x64_c2x1x1_co_t", "128x64x64_c1x1x1_co_t", "256x128x64_c1x2x1_co_t"


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, and of each operand the kind and the dtype: "g1" and "gn" are by group."""

    function: Callable
    operands: tuple[tuple[str, jnp.dtype], ...] = ()


def _dropout(acc, key):
    kept = jax.random.bernoulli(key, 0.75, acc.shape)
    return jnp.where(kept, acc / 0.75, 0).astype(BF16)


def _positions(acc):
    i, j = (jax.lax.broadcasted_iota(F32, acc.shape, acc.ndim - d) for d in (2, 1))
    return (acc - abs(i - j) / 64).astype(F32)


CASES = {
    "silu": Case(lambda acc: jax.nn.silu(acc).astype(BF16)),
    "bias, gelu": Case(
        lambda acc, b: jax.nn.gelu(acc + b, approximate=False).astype(BF16), (("gn", F32),)
    ),
    "every kind": Case(
        lambda acc, s, b, c, r, x: (jnp.tanh(acc * s + b) * r + c + x).astype(F32),
        (("g1", F32), ("gn", BF16), ("n", F32), ("m1", F32), ("mn", BF16)),
    ),
    "weight of each row": Case(lambda acc, r: (acc * r).astype(F16), (("m1", F32),)),
    "three results": Case(
        lambda acc, r, b: ((acc + r) > b, (acc + r).astype(BF16), jnp.round(acc).astype(jnp.int64)),
        (("mn", BF16), ("gn", F32)),
    ),
    "quantized": Case(
        lambda acc, s: jnp.clip(jnp.round(acc * s), -127, 127).astype(I8), (("g1", F32),)
    ),
    "mask": Case(lambda acc, keep: jnp.where(keep, acc, -jnp.inf), (("mn", BOOL),)),
    "dropout": Case(_dropout, (("key", BOOL),)),
    "positions": Case(_positions),
}
GATED = {
    "clipped swiglu": Case(
        lambda gate, up: (
            jnp.minimum(gate, 7) * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -7, 7) + 1)
        ).astype(BF16)
    ),
    "learned swish": Case(
        lambda gate, up, s, b: (gate * jax.nn.sigmoid(s * gate) * (up + b)).astype(BF16),
        (("g1", F32), ("gn", F32)),
    ),
    "two results": Case(
        lambda gate, up, r: (jax.nn.silu(gate) * up + r, (gate * up).astype(F16)), (("mn", BF16),)
    ),
    "not by rows": Case(lambda gate, up: (gate > up, (gate + up) > 0)),
}


def operands_of(case: Case, n: int):
    rng = np.random.default_rng(0)
    shapes = {"g1": (GROUPS, 1, 1), "gn": (GROUPS, 1, n), "n": (n,), "m1": (M, 1), "mn": (M, n)}
    for kind, dtype in case.operands:
        if kind == "key":
            yield jax.random.key(3)
        elif dtype == BOOL:
            yield jnp.asarray(rng.random(shapes[kind]) < 0.5)
        else:
            yield jnp.asarray(rng.standard_normal(shapes[kind]), dtype)


def factors_of(n: int, k: int, gated=False, gathered=False, dtype=BF16):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((NUM_ROWS if gathered else M, k))
    w = rng.standard_normal((GROUPS, k, *((2,) if gated else ()), n)) / 4
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def product(case: Case, x, w, sizes, operands, **how):
    f = jax_tcgemm.gated_ragged_linear if w.ndim == 4 else jax_tcgemm.ragged_dot
    how |= {"epilogue": case.function, "epilogue_operands": operands, "implementation": "wgmma"}
    return jax.tree.leaves(f(x, w, sizes, **how))


def expected(case: Case, x, w, sizes, operands, gather=None):
    """The function of exact sums, and zeros in the rows of no group."""
    tokens = np.asarray(x, np.float64)
    if gather is not None:
        inside = (gather >= 0) & (gather < len(tokens))
        tokens = np.where(inside[:, None], tokens[np.where(inside, gather, 0)], 0)
    w = np.asarray(w, np.float64).reshape(GROUPS, w.shape[1], -1, w.shape[-1])
    accs = [reference.rows(tokens, w[:, :, i], sizes).astype(F32) for i in range(w.shape[2])]
    groups = np.full(M, -1)
    for group, (begin, end) in enumerate(reference.bounds(sizes, M)):
        groups[begin:end] = group
    given = [x[np.maximum(groups, 0), 0] if jnp.ndim(x) == 3 else x for x in operands]
    is_there = (groups >= 0)[:, None]
    for y in jax.tree.leaves(case.function(*map(jnp.asarray, accs), *given)):
        yield np.where(is_there, y, np.zeros((), y.dtype)), is_there


def compare(case: Case, got, want):
    """Elements near a step of a result may differ; rows of no group are zeros exactly."""
    for x, (y, is_there) in zip(got, want, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        is_whole = not jnp.issubdtype(y.dtype, jnp.inexact)
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        np.testing.assert_array_equal(np.where(is_there, 0, x), 0)
        near = np.isclose(x, y, rtol=1e-2, atol=1e-2) | (np.isinf(x) & (x == y))
        if is_whole:
            near |= abs(x - y) <= 1
        assert near.mean() > 0.999, (near.mean(), abs(x - y)[~near][:5])
        assert (x != y).mean() < 2e-2 or not is_whole


def poison(results):
    """Freed memory is not zero: what is not written would be NaN or true."""
    for x in results:
        jnp.full(x.shape, np.inf if jnp.issubdtype(x.dtype, jnp.inexact) else 1, x.dtype).delete()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config", CONFIGS)
def test_values(config, name, shape):
    case, (n, k) = CASES[name], SHAPES[shape]
    x, w = factors_of(n, k)
    operands = list(operands_of(case, n))
    call = jax.jit(functools.partial(product, case, config=config))
    for sizes in SIZES.values():
        got = call(x, w, jnp.array(sizes), operands)
        compare(case, got, expected(case, x, w, sizes, operands))
        poison(got)
        again = call(x, w, jnp.array(sizes), operands)
        for first, second in zip(got, again, strict=True):
            np.testing.assert_array_equal(first, second)
    assert call._cache_size() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("name", [*GATED, *CASES])
def test_gated_and_gathered_values(name, gathered, shape, dtype):
    """By the config that has them."""
    case, (n, k) = (GATED | CASES)[name], SHAPES[shape]
    x, w = factors_of(n, k, name in GATED, gathered, dtype)
    operands = list(operands_of(case, n))
    gather = np.random.default_rng(4).integers(-3, NUM_ROWS + 3, M, np.int32) if gathered else None
    how = {"gather_indices": gather, "config": CONFIGS[-1]}
    call = jax.jit(functools.partial(product, case, **how))
    for sizes in SIZES.values():
        got = call(x, w, jnp.array(sizes), operands)
        compare(case, got, expected(case, x, w, sizes, operands, gather))


@pytest.mark.parametrize("config", CONFIGS)
def test_nan_stays_in_its_group(config):
    case, sizes = CASES["bias, gelu"], [100, 0, 65, 200, 33, 0, 0, 0, 1, 1]
    x, w = factors_of(264, 72)
    (bias,) = operands_of(case, 264)
    bad_x = x.at[100:165].set(jnp.nan).at[400:].set(jnp.inf)
    bad_w, bad_bias = w.at[1:3].set(jnp.nan), bias.at[1:3].set(jnp.inf)
    how = {"sizes": jnp.array(sizes), "config": config}
    (got,) = product(case, bad_x, bad_w, operands=[bad_bias], **how)
    (clean,) = product(case, x, w, operands=[bias], **how)
    others = np.r_[0:100, 165:M]
    np.testing.assert_array_equal(np.asarray(got)[others], np.asarray(clean)[others])


def test_offsets_and_batches():
    """Groups of which the weights have some; batch entries with operands of their own."""
    case = CASES["bias, gelu"]
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), BF16) for s in ((2, 90, 72), (2, 3, 72, 40)))
    bias = jnp.asarray(rng.standard_normal((2, 3, 1, 40)), F32)
    sizes = jnp.array([[30, 0, 20, 9, 1], [1, 60, 9, 2, 2]])

    def f(x, w, sizes, bias, implementation):
        how = {"epilogue": case.function, "epilogue_operands": (bias,), "group_offset": 1}
        return jax_tcgemm.ragged_dot(x, w, sizes, implementation=implementation, **how)

    for in_axes in ((0, 0, 0, 0), (0, None, 0, None), (None, 0, None, 0)):
        args = [
            y if axis == 0 else y[0] for y, axis in zip((x, w, sizes, bias), in_axes, strict=True)
        ]
        got, want = (
            jax.vmap(functools.partial(f, implementation=name), in_axes)(*args)
            for name in ("wgmma", "xla")
        )
        np.testing.assert_allclose(
            *(np.asarray(y, np.float64) for y in (got, want)), rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("gathered", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("name", ["bias, gelu", "every kind", "learned swish"])
def test_gradients(name, gathered):
    """Those of kernels asked for by name beside those of XLA's products."""
    case, n = (GATED | CASES)[name], 264
    x, w = factors_of(n, 136, name in GATED, gathered)
    operands = list(operands_of(case, n))
    gather = np.random.default_rng(4).integers(0, NUM_ROWS, M, np.int32) if gathered else None
    f = jax_tcgemm.gated_ragged_linear if name in GATED else jax_tcgemm.ragged_dot

    def grads(implementation):
        def loss(x, w, operands):
            out = f(
                x,
                w,
                jnp.array(SIZES["mixed"]),
                gather_indices=gather,
                epilogue=case.function,
                epilogue_operands=operands,
                implementation=implementation,
            )
            return jnp.sum(jnp.sin(out.astype(F32)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, w, operands)

    for got, want in zip(*(jax.tree.leaves(grads(x)) for x in ("wgmma", "xla")), strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()


def test_what_is_chosen():
    case = CASES["bias, gelu"]
    x, w = factors_of(264, 72)
    f = functools.partial(
        jax_tcgemm.ragged_dot,
        epilogue=case.function,
        epilogue_operands=tuple(operands_of(case, 264)),
    )
    (call,) = jax_tcgemm.explain(f, x, w, jnp.array(SIZES["mixed"]), platform="cuda")
    assert (call.implementation, call.config) == ("wgmma", CONFIGS[0])
