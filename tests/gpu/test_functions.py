"""Products whose epilogue is a function of JAX: values, by every kind of tile and every family."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tcgemm
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.primitives.epilogue_product import epilogue_product
from jax_tcgemm.problem.call_options import CallOptions

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

BF16, F16, F32, I8 = (jnp.dtype(x) for x in ("bfloat16", "float16", "float32", "int8"))
U8, I32, F64 = (jnp.dtype(x) for x in ("uint8", "int32", "float64"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, and for each operand which of the result's dimensions it has, and its dtype."""

    function: Callable
    operands: tuple[tuple[str, jnp.dtype], ...] = ()


def _alibi(acc):
    rows, columns = (jax.lax.broadcasted_iota(jnp.float32, acc.shape, acc.ndim - d) for d in (2, 1))
    return (acc - abs(rows - columns) / 64).astype(BF16)


def _dropout(acc, key):
    kept = jax.random.bernoulli(key, 0.75, acc.shape)
    return jnp.where(kept, acc / 0.75, 0).astype(BF16)


def _quantized(acc, scale):
    return jnp.clip(jnp.round(acc * scale), -127, 127).astype(I8)


def _clipped_swiglu(acc):
    x = jnp.clip(acc, -7, 7)
    return (x * jax.nn.sigmoid(1.702 * x)).astype(BF16)


CASES = {
    "soft cap": Case(lambda acc: (30 * jnp.tanh(acc / 30)).astype(BF16)),
    "learned swish": Case(
        lambda acc, slope: (acc * jax.nn.sigmoid(slope * acc)).astype(BF16), (("n", F32),)
    ),
    "dropout": Case(_dropout, (("key", U8),)),
    "alibi": Case(_alibi),
    "clipped swiglu": Case(_clipped_swiglu),
    "quantized": Case(_quantized, (("m1", F32),)),
    "two results": Case(lambda acc: (acc, jnp.exp(-(acc**2)).astype(F16))),
    "three results": Case(
        lambda acc, r: ((acc + r) > 0, (acc + r).astype(BF16), jnp.round(acc).astype(jnp.int64)),
        (("mn", BF16),),
    ),
    "bias, gelu, residual": Case(
        lambda acc, b, r: (jax.nn.gelu(acc + b, approximate=False) + r).astype(BF16),
        (("n", BF16), ("mn", BF16)),
    ),
    "transposed residual": Case(lambda acc, r: acc + jnp.swapaxes(r, -1, -2), (("nm", F32),)),
    "scales": Case(
        lambda acc, x, y, s: (acc * x * y + s).astype(F16), (("m1", F32), ("n", BF16), ("", F32))
    ),
    "mask": Case(
        lambda acc, mask: jnp.where(mask, acc, -jnp.inf).astype(F32), (("mn", jnp.dtype(bool)),)
    ),
    "bits": Case(lambda acc: jax.lax.bitcast_convert_type(acc, jnp.uint32) >> 16),
    "reductions": Case(
        lambda acc, b: ((acc + b).astype(BF16), acc.max(-1), (acc + b).sum(-2), abs(acc).sum()),
        (("n", F32),),
    ),
}

WGMMA = (
    *(
        "128x256x64_c2x1x1_co",
        "128x128x64_c1x1x1_pp",
        "192x176x64_c1x2x1_co_t",
        "256x128x64_c1x1x1_co_t",
        "64x256x64_c1x1x1_pp_t",
    ),
    *(
        "64x64x64_c1x1x4_pp",
        "128x16x64_c1x1x4_co_t",
        "128x160x64_c2x1x1_pp",
        "128x256x64_c2x1x1_co_split3",
    ),
)
OTHERS = (("mma_sync", "128x128x32_w64x64_s4"), ("mma_sync", "64x64x64_w32x32_s4_k2"))
OTHERS += tuple(
    ("wmma_tiled", f"{shape}_{tile}")
    for shape, tile in (
        ("m16n16k16", "128x128x32"),
        ("m16n16k16", "64x64x32"),
        ("m32n8k16", "128x128x32"),
        ("m8n32k16", "128x128x32"),
    )
)
SHAPES = {"whole": (256, 512, 128), "odd": (193, 203, 72)}


def operands_of(case: Case, m: int, n: int, batch=()):
    rng = np.random.default_rng(0)
    shapes = {"n": (n,), "m1": (*batch, m, 1), "mn": (*batch, m, n), "nm": (*batch, n, m), "": ()}
    for dims, dtype in case.operands:
        if dims == "key":
            yield jax.random.key(3)
        elif dtype == np.bool_:
            yield jnp.asarray(rng.random(shapes[dims]) < 0.5)
        else:
            yield jnp.asarray(rng.standard_normal(shapes[dims]), dtype)


def product(case: Case, a, b, operands, layout="NN", **how):
    nb = a.ndim - 2
    of_a, of_b = (nb + (layout[0] == "N"), nb + (layout[1] == "T"))
    shape = (*a.shape[:nb], a.shape[2 * nb + 1 - of_a], b.shape[2 * nb + 1 - of_b])
    acc = jax.ShapeDtypeStruct(shape, I32 if a.dtype == I8 else F32)
    function = jax.make_jaxpr(lambda *x: jax.tree.leaves(case.function(*x)))(acc, *operands)
    numbers = (((of_a,), (of_b,)), (tuple(range(nb)),) * 2)
    options = CallOptions("matmul", how.pop("implementation", None), how.pop("config", None))
    encoding = Plain.of(a, b, numbers, **how)

    def call(a, b, *operands):
        return epilogue_product(encoding, (a, b), operands, options, function)

    return jax.jit(call)(a, b, *operands)


def compare(case: Case, a, b, operands, got):
    """With the function of exact sums, as float64; elements near a step of a result may differ.

    `b`: a matrix, or the two of a gated product.
    """
    wide = np.float64 if a.dtype != I8 else np.int32
    both = b if isinstance(b, tuple) else (b,)
    accs = [jnp.asarray(np.asarray(a).astype(wide) @ np.asarray(x).astype(wide)) for x in both]
    accs = [x.astype(F32) if a.dtype != I8 else x for x in accs]
    for x, y in zip(got, jax.tree.leaves(case.function(*accs, *operands)), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        if (
            np.issubdtype(np.asarray(got[0]).dtype, np.integer)
            or case.function is CASES["bits"].function
        ):
            assert (abs(x - y) > 1).mean() < 2e-3
            continue
        near = np.isclose(x, y, rtol=1e-2, atol=1e-2) | (np.isinf(x) & (x == y))
        assert near.mean() > 0.999, (near.mean(), abs(x - y)[~near][:5])


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", [("wgmma", x) for x in WGMMA] + list(OTHERS), ids="-".join)
def test_values(how, name, size):
    case, (m, n, k) = CASES[name], SHAPES[size]
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.standard_normal(s), BF16) for s in ((m, k), (k, n)))
    operands = list(operands_of(case, m, n))
    got = product(case, a, b, operands, implementation=how[0], config=how[1])
    compare(case, a, b, operands, got)


@pytest.mark.parametrize("name", ["bias, gelu, residual", "alibi", "quantized", "dropout"])
@pytest.mark.parametrize("config", ["128x128x64_c1x1x1_pp", "192x176x64_c1x2x1_co_t"])
def test_batches(config, name):
    case, batch = CASES[name], (2, 3)
    rng = np.random.default_rng(2)
    a, b = (jnp.asarray(rng.standard_normal((*batch, *s)), F16) for s in ((70, 64), (64, 90)))
    operands = list(operands_of(case, 70, 90, batch))
    compare(
        case, a, b, operands, product(case, a, b, operands, implementation="wgmma", config=config)
    )


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_layouts(layout):
    """Of WMMA each has a kernel of its own; rows of K that are not aligned."""
    case, (m, n, k), batch = CASES["bias, gelu, residual"], (70, 90, 61), (2, 3)
    rng = np.random.default_rng(2)
    a, b = (jnp.asarray(rng.standard_normal((*batch, *s)), F16) for s in ((m, k), (k, n)))
    operands = list(operands_of(case, m, n, batch))
    stored = (
        jnp.swapaxes(x, -1, -2) if letter == "T" else x
        for x, letter in zip((a, b), layout, strict=True)
    )
    got = product(case, *stored, operands, layout=layout, implementation="wmma_tiled")
    compare(case, a, b, operands, got)


@pytest.mark.parametrize("implementation", ["wgmma", "wmma_tiled"])
@pytest.mark.parametrize("name", ["scales", "two results"])
def test_tf32(name, implementation):
    case = CASES[name]
    rng = np.random.default_rng(2)
    a, b = (jnp.asarray(rng.integers(-3, 4, s), F32) for s in ((130, 64), (64, 72)))
    operands = list(operands_of(case, 130, 72))
    compare(case, a, b, operands, product(case, a, b, operands, implementation=implementation))


@pytest.mark.parametrize("implementation", ["mma_sync", "wmma_tiled"])
def test_integer_sums(implementation):
    case = Case(
        lambda acc, scale: jnp.clip(jnp.round(acc * scale), -128, 127).astype(I8), (("n", F32),)
    )
    rng = np.random.default_rng(2)
    a, b = (jnp.asarray(rng.integers(-128, 128, s), I8) for s in ((130, 64), (64, 72)))
    operands = [next(operands_of(case, 130, 72)) / 500]
    got = product(case, a, b, operands, implementation=implementation)
    np.testing.assert_array_equal(
        got[0],
        case.function(jnp.asarray(np.asarray(a).astype(np.int32) @ np.asarray(b)), *operands),
    )


def test_same_bits_each_time():
    case = CASES["bias, gelu, residual"]
    rng = np.random.default_rng(2)
    a, b = (jnp.asarray(rng.standard_normal(s), BF16) for s in ((1024, 512), (512, 768)))
    operands = list(operands_of(case, 1024, 768))
    first, second = (product(case, a, b, operands)[0] for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


# --- gated products -------------------------------------------------------------------------------


def _clipped_gate(gate, up):
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)).astype(BF16)


GATED = {
    "clipped swiglu": Case(_clipped_gate),
    "learned swish": Case(
        lambda gate, up, slope: (gate * jax.nn.sigmoid(slope * gate) * up).astype(BF16),
        (("n", F32),),
    ),
    "two results": Case(
        lambda gate, up, r: (jax.nn.silu(gate) * up + r, (gate * up).astype(F16)), (("mn", BF16),)
    ),
}
# What runs the function itself, and what leaves it to another kernel, each with one case or all.
GATED_HOW = {
    ("wgmma", "128x256x64_c2x1x1_co"): tuple(GATED),
    ("wgmma", "128x128x64_c2x1x1_pp"): tuple(GATED),
    ("wgmma", "128x128x64_c2x2x1_co"): ("two results",),
    ("wgmma", "64x128x64_c2x1x1_pp"): ("learned swish",),
    ("wgmma", "128x256x64_c2x1x1_co_split3"): ("two results",),
    ("wgmma", "128x16x64_c1x1x4_co_t"): ("two results",),
    **dict.fromkeys(OTHERS, ("two results",)),
}


def gated(case: Case, a, weights, operands, **how):
    def call(a, weights, *operands):
        out = jax_tcgemm.gated_linear(
            a, weights, epilogue=case.function, epilogue_operands=operands, **how
        )
        return jax.tree.leaves(out)

    return jax.jit(call)(a, weights, *operands)


def factors_of(m, n, k, dtype=BF16):
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in ((m, k), (k, n), (k, n)))


@pytest.mark.parametrize(("how", "names"), GATED_HOW.items(), ids=map("-".join, GATED_HOW))
def test_gated_values(how, names):
    """Weights in one array, and in two, where edges are cut: the same kernels."""
    how = dict(zip(("implementation", "config"), how, strict=True))
    for size, (m, n, k) in SHAPES.items():
        a, *both = factors_of(m, n, k)
        weights = jnp.stack(both, 1) if size == "whole" else tuple(both)
        for name in names:
            operands = list(operands_of(GATED[name], m, n))
            got = gated(GATED[name], a, weights, operands, **how)
            compare(GATED[name], a, tuple(both), operands, got)


def test_gated_values_of_what_is_chosen():
    """Large enough for several tiles of each block, in any tile."""
    case, (m, n, k) = GATED["learned swish"], (2048, 2816, 1024)
    a, *both = factors_of(m, n, k)
    operands = list(operands_of(case, m, n))
    first, second = (gated(case, a, jnp.stack(both, 1), operands)[0] for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))
    compare(case, a, tuple(both), operands, [first])


def test_gated_tf32():
    case = GATED["two results"]
    rng = np.random.default_rng(2)
    a, *both = (jnp.asarray(rng.integers(-3, 4, s), F32) for s in ((130, 64), *[(64, 72)] * 2))
    operands = list(operands_of(case, 130, 72))
    got = gated(case, a, tuple(both), operands, implementation="wgmma")
    compare(case, a, tuple(both), operands, got)


def test_gated_integer_sums():
    case = Case(lambda gate, up: (jnp.maximum(gate, 0) - 2 * up, gate > up))
    rng = np.random.default_rng(2)
    shapes = (130, 64), (64, 72), (64, 72)
    a, *both = (jnp.asarray(rng.integers(-128, 128, s), I8) for s in shapes)
    got = gated(case, a, jnp.stack(both, 1), [], implementation="mma_sync")
    accs = (np.asarray(a).astype(np.int32) @ np.asarray(x) for x in both)
    for x, y in zip(got, case.function(*map(jnp.asarray, accs)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_gated_derivatives():
    case, (m, n, k) = GATED["learned swish"], (256, 384, 128)
    a, *both = factors_of(m, n, k)
    a = a / 8
    (slope,) = operands_of(case, m, n)

    def loss(product):
        return lambda *args: jnp.sum(jnp.sin(product(*args).astype(F32)))

    def ours(a, weights, slope):
        return gated(case, a, weights, [slope], implementation="wgmma")[0]

    def theirs(a, weights, slope):
        accs = (jnp.matmul(a, weights[:, i], preferred_element_type=F32) for i in (0, 1))
        return case.function(*accs, slope)

    args = a, jnp.stack(both, 1), slope
    for x, y in zip(*(jax.grad(loss(f), (0, 1, 2))(*args) for f in (ours, theirs)), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-6 * abs(y).max())
