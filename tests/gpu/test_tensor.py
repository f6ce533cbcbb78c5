"""tensor on a GPU: every implementation against NumPy in float64, plans, graphs and threads.

Tests of cuTENSOR are skipped where it is not installed; those of our kernels never are.
"""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import draw, widened

import jax_tcgemm
from jax_tcgemm import tensor
from jax_tcgemm.problem.compute_types import CONTRACTION_COMPUTE
from jax_tcgemm.problem.tensor.operators import BINARY, UNARY
from jax_tcgemm.selection import cutensor as library
from jax_tcgemm.system import modules

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("x64")]

# Of max |error| / max |expected|: the rounding of the result and of float32 sums of about 50 terms.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "complex64": 8e-6}
TOLERANCE |= {"float64": 4e-15, "complex128": 8e-15}
DTYPES = list(TOLERANCE)
# Of compute types: what a product of operands rounded so is off by.
COMPUTE_TOLERANCE = {"tf32": 2e-3, "bf16": 1.6e-2, "f16": 2e-3, "3xtf32": 4e-6, "9xbf16": 4e-6}
COMPUTE_TOLERANCE |= {"8xint8": 4e-15, "f64": 8e-15, "f32": 8e-6, "4xf16": 4e-6}
# The first compute capability and the first cuTENSOR that contract in these; the others are
# everywhere. From NVIDIA's table of cutensorCreateContraction and its release notes.
LATER_COMPUTE = {"9xbf16": (90, 20300), "8xint8": (90, 20300), "4xf16": (100, 20500)}


def require_cutensor():
    if reason := library.reason():
        pytest.skip(reason)


@pytest.fixture(params=["cutensor", "gemm", "xla", None], ids=str)
def implementation(request):
    if request.param == "cutensor":
        require_cutensor()
    return request.param


@pytest.fixture
def cutensor():
    require_cutensor()
    return "cutensor"


def ordered(operators):
    """Operators and dtypes; complex numbers have no largest and no smallest."""
    return [
        (op, dtype)
        for op in operators
        for dtype in DTYPES
        if op not in ("max", "min") or "complex" not in dtype
    ]


def assert_near(got, expected, tolerance):
    assert got.shape == expected.shape
    error = np.abs(widened(got) - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{error:.3g} of the largest element, over {tolerance:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract(dtype, implementation):
    """The worked example, with C, in full precision."""
    a, b = draw((36, 20, 24, 12), dtype), draw((20, 24, 28, 20), dtype, 1)
    c = draw((36, 20, 12, 28), dtype, 2)

    @jax.jit
    def f(a, b, c):
        with jax.default_matmul_precision("highest"):
            return tensor.contract(
                "mhkn,ukvh->munv", a, b, c=c, alpha=1.1, beta=0.9, implementation=implementation
            )

    expected = 1.1 * np.einsum("mhkn,ukvh->munv", *map(widened, (a, b)), optimize=True)
    assert_near(f(a, b, c), expected + 0.9 * widened(c), 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("modes", ["ab,bc->ac", "ab,cb->ca", "abc,bad->dca", "zab,zbc->azc"])
@pytest.mark.parametrize("extent", [1, 3, 17, 64])
def test_contract_of_odd_extents(modes, extent, implementation):
    inputs = modes.partition("->")[0].split(",")
    a, b = (draw((extent,) * len(term), "float32", i) for i, term in enumerate(inputs))
    with jax.default_matmul_precision("highest"):
        got = tensor.contract(modes, a, b, implementation=implementation)
    assert_near(got, np.einsum(modes, widened(a), widened(b)), 2e-5)


@pytest.mark.parametrize(
    ("dtype", "compute_type"),
    [(np.dtype(d).name, c) for d, types in CONTRACTION_COMPUTE.items() for c in types],
)
def test_compute_types(dtype, compute_type, cutensor):
    a, b = draw((40, 48), dtype), draw((32, 48), dtype, 1)

    def f(a, b):
        return tensor.contract(
            "ik,jk->ji", a, b, compute_type=compute_type, implementation=cutensor
        )

    try:
        got = f(a, b)
    except ValueError as error:
        capability, version = LATER_COMPUTE.get(compute_type, (0, 0))
        has_it = modules.cuda_device()["compute_capability"] >= capability
        if "cuTENSOR" not in str(error) or (has_it and modules.cutensor.version() >= version):
            raise
        pytest.skip(str(error))
    tolerance = max(COMPUTE_TOLERANCE[compute_type], 4 * TOLERANCE[dtype])
    if compute_type == "f32" and dtype in ("float64", "complex128"):
        tolerance = 1e-5
    assert_near(got, widened(b) @ widened(a).T, 4 * tolerance)


@pytest.mark.parametrize("algorithm", ["default", "default_patient", "gett", "tgett", "ttgt"])
def test_algorithms(algorithm, cutensor):
    a, b = draw((24, 16, 40), "float32"), draw((40, 32, 16), "float32", 1)
    with jax.default_matmul_precision("highest"):
        got = tensor.contract("ijk,klj->li", a, b, algorithm=algorithm, implementation=cutensor)
    assert_near(got, np.einsum("ijk,klj->li", widened(a), widened(b)), 1e-5)


@pytest.mark.parametrize("name", ["cutensor", "tcgemm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("subscripts", "shape"),
    [
        ("ij->ji", (1, 7)),
        ("ij->ji", (130, 67)),
        ("ij->ji", (256, 192)),
        ("bij->bji", (5, 65, 33)),
        ("ibj->jbi", (70, 3, 129)),
        ("ijkl->lkji", (9, 34, 5, 66)),
        ("ijklmn->nlimkj", (3, 4, 5, 6, 7, 33)),
        ("ijkl->klij", (8, 16, 4, 32)),
    ],
)
def test_permute(subscripts, shape, dtype, name):
    if name == "cutensor":
        require_cutensor()
    a = draw(shape, dtype)
    if name == "tcgemm" and 1 in shape:
        with pytest.raises(ValueError, match="it leaves every element in place"):
            tensor.permute(subscripts, a, implementation=name)
        return
    got = tensor.permute(subscripts, a, implementation=name)
    np.testing.assert_array_equal(widened(got), np.einsum(subscripts, widened(a)))


@pytest.mark.parametrize("op", UNARY)
def test_unary_operators(op, cutensor):
    ranges = {"acosh": (1.1, 3), "atanh": (-0.9, 0.9), "floor": (-3, 3), "ceil": (-3, 3)}
    low, high = ranges.get(op, (0.1, 0.9))
    a = jnp.asarray(np.random.default_rng(0).uniform(low, high, (40, 36)), jnp.float32)

    def f(implementation):
        return tensor.permute("ij->ji", a, alpha=1.5, op_a=op, implementation=implementation)

    assert_near(f(cutensor), widened(f("xla")), 2e-6)


@pytest.mark.parametrize(("op", "dtype"), ordered(BINARY))
def test_elementwise(op, dtype, cutensor):
    a, b, c = draw((17, 40), dtype), draw((40,), dtype, 1), draw((40, 17), dtype, 2)

    def binary(implementation):
        return tensor.elementwise_binary(
            "ij,ji->ji", a, c, op=op, alpha=1.1, gamma=0.9, implementation=implementation
        )

    def trinary(implementation):
        return tensor.elementwise_trinary(
            "ij,j,ji->ji", a, b, c, op_ab="mul", op_abc=op, beta=2, implementation=implementation
        )

    for f in (binary, trinary):
        assert_near(f(cutensor), widened(f("xla")), TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["cutensor", "tcgemm"])
@pytest.mark.parametrize(("op", "dtype"), ordered(["add", "mul", "max", "min"]))
@pytest.mark.parametrize(
    ("subscripts", "shape"),
    [
        ("ij->i", (37, 1000)),
        ("ij->i", (3, 100_000)),
        ("ij->i", (1, 1_000_003)),
        ("ij->i", (9, 31)),
        ("ij->j", (1000, 37)),
        ("ij->j", (20_000, 3)),
        ("ij->j", (5000, 64)),
        ("ijk->ik", (7, 65, 33)),
        ("ijkl->il", (4, 5, 6, 8)),
        ("ij->", (300, 200)),
    ],
)
def test_reduce(subscripts, shape, dtype, op, name):
    if name == "cutensor":
        require_cutensor()
    a = draw(shape, dtype)
    if op == "mul":
        a = (1 + a / 1000).astype(dtype)  # Products of many numbers, all near 1.
    is_narrow_product = op == "mul" and "16" in dtype
    if is_narrow_product or (name == "tcgemm" and (op == "mul" or "complex" in dtype)):
        with pytest.raises(ValueError, match=f"{name} cannot run this"):
            tensor.reduce(subscripts, a, op=op, implementation=name)
        return
    got = tensor.reduce(subscripts, a, op=op, implementation=name)
    term, _, result = subscripts.partition("->")
    axes = tuple(i for i, letter in enumerate(term) if letter not in result)
    reduced = {"add": np.sum, "mul": np.prod, "max": np.max, "min": np.min}[op]
    expected = reduced(widened(a), axis=axes)
    terms = np.prod([shape[i] for i in axes])
    if op in ("max", "min"):
        np.testing.assert_array_equal(widened(got), expected)
        return
    size = np.abs(widened(a)).sum(axis=axes).max() if op == "add" else np.abs(expected).max()
    accumulator = 1e-16 if dtype in ("float64", "complex128") else 6e-8
    # Roundings of a long product of factors near 1 are not independent.
    accumulator *= 10 if op == "mul" else 1
    limit = TOLERANCE[dtype] * np.abs(expected).max() + accumulator * np.sqrt(terms) * size
    assert np.abs(widened(got) - expected).max() <= 4 * limit


def test_our_reduction_gives_the_same_bits_from_four_threads():
    a = draw((40_000, 65), "float32")

    def run(_):
        return np.asarray(tensor.reduce("ij->j", a, implementation="tcgemm")).tobytes()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(run, range(20)))) == 1


@pytest.mark.parametrize("op", ["max", "min"])
def test_our_reduction_spreads_nan(op):
    a = jnp.ones((300, 40)).at[123, 7].set(jnp.nan)
    got = np.asarray(tensor.reduce("ij->j", a, op=op, implementation="tcgemm"))
    assert np.isnan(got).sum() == 1
    assert np.isnan(got[7])


def test_gradients(implementation):
    """A second derivative, and one through vmap, of a contraction with C."""
    a, b, c = draw((4, 3, 5), "float64"), draw((5, 6, 3), "float64", 1), draw((6, 4), "float64", 2)

    def f(name):
        def loss(a, b, c):
            d = tensor.contract("ijk,klj->li", a, b, c=c, alpha=2, beta=3, implementation=name)
            return (d**2).sum()

        return jax.hessian(jax.vmap(loss, (None, 0, None)), (0, 1))(a, jnp.stack([b, -b]), c)

    for got, expected in zip(*map(jax.tree.leaves, (f(implementation), f("xla"))), strict=True):
        assert_near(got, widened(expected), 1e-13)


def test_plans_are_made_once_for_an_operation(cutensor):
    a, b = draw((19, 23), "float32"), draw((23, 29), "float32")

    def f(scale):
        return jax.jit(
            lambda a, b: tensor.contract("ij,jk->ik", a, b, alpha=scale, implementation=cutensor)
        )

    f(1.0)(a, b).block_until_ready()
    before = tensor.plan_cache()
    again = f(2.0)
    again(a, b).block_until_ready()
    after = tensor.plan_cache()
    assert after["misses"] == before["misses"]
    assert after["hits"] > before["hits"]
    for _ in range(5):
        again(a, b).block_until_ready()
    assert tensor.plan_cache() == after  # Looked up when it is lowered and loaded, not when called.
    assert jax_tcgemm.info().plan_cache == after


def test_calls_in_a_graph(implementation):
    """A chain long enough for XLA to capture it, replayed with other buffers."""
    a, b = draw((64, 96), "float32"), draw((96, 96), "float32", 1) / 10

    @jax.jit
    def f(a, b):
        for _ in range(8):
            a = tensor.contract("ij,kj->ik", a, b, implementation=implementation)
        return a

    with jax.default_matmul_precision("highest"):
        for scale in (1, -2, 3):
            expected = scale * widened(a) @ np.linalg.matrix_power(widened(b).T, 8)
            assert_near(f(scale * a, b), expected, 1e-4)


def test_our_kernels_in_a_graph():
    a = draw((96, 160), "float32")

    @jax.jit
    def f(a):
        for _ in range(8):
            a = tensor.permute("ij->ji", a, implementation="tcgemm")
            a = a + tensor.reduce("ij->j", a, implementation="tcgemm") / 1000
        return a

    expected = widened(a)
    for _ in range(8):
        expected = expected.T
        expected = expected + expected.sum(0) / 1000
    for _ in range(3):
        assert_near(f(a), expected, 1e-5)


def test_four_threads(cutensor):
    a, b = draw((64, 48, 20), "float32"), draw((48, 20, 40), "float32", 1)
    f = jax.jit(lambda a, b: tensor.contract("ijk,jkl->li", a, b, implementation=cutensor))

    def run(_):
        return np.asarray(f(a, b)).tobytes()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(run, range(40)))) == 1


def test_choice_is_explained():
    q = jax.ShapeDtypeStruct((4, 512, 8, 64), "bfloat16")
    report = jax_tcgemm.explain(lambda q, k: tensor.einsum("bqhd,bkhd->bhqk", q, k), q, q)
    assert report[0].implementation in ("gemm", "cutensor", "xla")
    assert "the cost model predicts" in report[0].why


def test_module_is_there():
    assert modules.cutensor is not None, modules.reason("cutensor")
