"""tensor: values of every function against NumPy in float64, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_arrays import draw, widened

from jax_tcgemm import tensor
from jax_tcgemm.problem.tensor.operators import BINARY, UNARY

pytestmark = pytest.mark.usefixtures("x64")

# Relative to the largest element: an ulp or two of the result, and float32 sums of a few terms.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "complex64": 4e-6}
TOLERANCE |= {"float64": 1e-14, "complex128": 1e-14}
DTYPES = list(TOLERANCE)


def assert_near(got, expected, dtype, terms=1):
    assert got.dtype == dtype
    scale = np.abs(expected).max() if expected.size else 1.0
    tolerance = TOLERANCE[np.dtype(dtype).name] * (1 + np.sqrt(terms) / 4)
    np.testing.assert_allclose(widened(got), expected, rtol=0, atol=tolerance * max(scale, 1e-3))


# The worked example, smaller: C[m,u,n,v] = 1.1 * A[m,h,k,n] B[u,k,v,h] + 0.9 * C.
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract(dtype):
    a, b = draw((5, 3, 7, 4), dtype), draw((6, 7, 2, 3), dtype, 1)
    c = draw((5, 6, 4, 2), dtype, 2)
    got = jax.jit(
        lambda a, b, c: tensor.contract("mhkn,ukvh->munv", a, b, c=c, alpha=1.1, beta=0.9)
    )(a, b, c)
    expected = 1.1 * np.einsum("mhkn,ukvh->munv", widened(a), widened(b)) + 0.9 * widened(c)
    assert_near(got, expected, dtype, terms=21)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_contract_any_modes(data):
    """Any split of up to six modes into batch, contracted and free ones, in any order."""
    kinds = data.draw(st.lists(st.sampled_from(["batch", "sum", "a", "b"]), max_size=6))
    letters = "abcdef"[: len(kinds)]
    extents = {x: data.draw(st.integers(1, 4), label=f"extent of {x}") for x in letters}
    of = dict(zip(letters, kinds, strict=True))
    order = [data.draw(st.permutations(letters), label="order") for _ in range(3)]
    terms = [
        "".join(x for x in one if of[x] in keep)
        for one, keep in zip(
            order,
            ({"batch", "sum", "a"}, {"batch", "sum", "b"}, {"batch", "a", "b"}),
            strict=True,
        )
    ]
    a, b = (draw([extents[x] for x in term], "float32", i) for i, term in enumerate(terms[:2]))
    subscripts = f"{terms[0]},{terms[1]}->{terms[2]}"
    got = tensor.contract(subscripts, a, b)
    assert_near(got, np.einsum(subscripts, widened(a), widened(b)), "float32", terms=64)


@pytest.mark.parametrize("op", UNARY)
def test_unary_operators(op):
    """On the range where each is a function of real numbers, against NumPy in float64."""
    low, high = {"acosh": (1.1, 3), "atanh": (-0.9, 0.9)}.get(op, (0.1, 0.9))
    a = jnp.asarray(np.random.default_rng(0).uniform(low, high, (4, 5)), jnp.float32)
    x = widened(a)
    softplus = np.log1p(np.exp(x))
    expected = {
        "identity": x,
        "relu": np.maximum(x, 0),
        "rcp": 1 / x,
        "sigmoid": 1 / (1 + np.exp(-x)),
        "neg": -x,
        "mish": x * np.tanh(softplus),
        "swish": x / (1 + np.exp(-x)),
        "softplus": softplus,
        "softsign": x / (1 + np.abs(x)),
    }
    names = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
    names |= {"asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh"}
    if op not in expected:
        expected[op] = getattr(np, names.get(op, op))(x)
    got = tensor.permute("ij->ji", a, alpha=2.5, op_a=op)
    assert_near(got, 2.5 * expected[op].T, "float32", terms=16)


def test_unary_operators_of_a_contraction():
    a, b = draw((4, 5), "complex64"), draw((5, 3), "complex64", 1)
    got = tensor.contract("ij,jk->ik", a, b, op_a="conj", op_b="exp")
    assert_near(got, widened(a).conj() @ np.exp(widened(b)), "complex64", terms=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subscripts", ["ijkl->ljki", "ijkl->ijkl", "ijkl->klij", "ijkl->jikl"])
def test_permute(subscripts, dtype):
    a = draw((3, 4, 5, 2), dtype)
    expected = np.einsum(subscripts, widened(a))
    np.testing.assert_array_equal(widened(tensor.permute(subscripts, a)), expected)
    assert_near(tensor.permute(subscripts, a, alpha=-1.5), -1.5 * expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", BINARY)
def test_elementwise_binary(op, dtype):
    a, c = draw((3, 4, 2), dtype), draw((2, 4), dtype, 1)

    def call():
        return tensor.elementwise_binary(
            "ijk,kj->kij", a, c, op=op, alpha=1.1, gamma=0.9, op_c="sin"
        )

    if op in ("max", "min") and "complex" in dtype:
        with pytest.raises(ValueError, match="op must be defined for complex numbers"):
            call()
        return
    x, y = 1.1 * np.einsum("ijk->kij", widened(a)), 0.9 * np.sin(widened(c))[:, None, :]
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    assert_near(call(), combine(x, y), dtype)


@pytest.mark.parametrize(("op_ab", "op_abc"), list(itertools.product(BINARY, repeat=2)))
def test_elementwise_trinary(op_ab, op_abc):
    a, b, c = draw((3, 4), "float32"), draw((4, 3), "float32", 1), draw((3,), "float32", 2)
    got = tensor.elementwise_trinary(
        "ij,ji,i->ij", a, b, c, op_ab=op_ab, op_abc=op_abc, alpha=2, beta=-1, gamma=0.5, op_b="abs"
    )
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
    first = combine[op_ab](2 * widened(a), -np.abs(widened(b)).T)
    expected = combine[op_abc](first, 0.5 * widened(c)[:, None])
    assert_near(got, expected, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["add", "mul", "max", "min"])
def test_reduce(op, dtype):
    a, c = draw((3, 4, 5, 2), dtype), draw((2, 4), dtype, 1)

    def call():
        return tensor.reduce("mhkn->nh", a, op=op, c=c, alpha=1.1, beta=0.9)

    if op in ("max", "min") and "complex" in dtype:
        with pytest.raises(ValueError, match="op must be defined for complex numbers"):
            call()
        return
    reduced = {"add": np.sum, "mul": np.prod, "max": np.max, "min": np.min}[op]
    expected = 1.1 * reduced(widened(a), axis=(0, 2)).T + 0.9 * widened(c)
    assert_near(call(), expected, dtype, terms=15)


@pytest.mark.parametrize("op", ["max", "min"])
def test_reduce_spreads_nan(op):
    a = jnp.ones((3, 4)).at[1, 2].set(jnp.nan)
    np.testing.assert_array_equal(np.isnan(tensor.reduce("ij->i", a, op=op)), [False, True, False])


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bqhd,bkhd->bhqk", [(2, 5, 3, 4), (2, 6, 3, 4)]),
        ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 2)]),
        ("ij,jk", [(3, 4), (4, 5)]),
        ("ba,cb", [(3, 4), (5, 3)]),
        ("i,i->", [(4,), (4,)]),
        ("i,j->ij", [(4,), (3,)]),
        ("ij,ij->ij", [(4, 3), (4, 3)]),
        ("iij->j", [(4, 4, 3)]),
        ("iji,j->ij", [(4, 3, 4), (3,)]),
        ("ijk->k", [(4, 3, 2)]),
        ("ijk,l->k", [(4, 3, 2), (5,)]),
        ("...ij,...jk->...ik", [(2, 3, 4, 5), (3, 5, 2)]),
        ("i...->...", [(3, 4)]),
        ("ij,jk->ik", [(3, 1), (4, 5)]),
        ("bi,bij,bj->b", [(3, 4), (3, 4, 5), (3, 5)]),
        ("->", [()]),
        (",i->i", [(), (3,)]),
        ("ij,jk,kl,lm->im", [(3, 0), (0, 5), (5, 2), (2, 2)]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_einsum_is_that_of_numpy(subscripts, shapes):
    arrays = [draw(shape, "float64", i) for i, shape in enumerate(shapes)]
    expected = np.einsum(subscripts, *map(widened, arrays))
    for optimize in ("auto", False):
        got = jax.jit(lambda *x, o=optimize: tensor.einsum(subscripts, *x, optimize=o))(*arrays)
        assert got.shape == expected.shape
        assert_near(got, expected, "float64", terms=64)


def test_einsum_in_turns():
    a, b = draw((3, 4), "float64"), draw((4, 5), "float64")
    got = tensor.einsum(a, [0, 1], b, [1, 2], [2, 0])
    assert_near(got, (widened(a) @ widened(b)).T, "float64", terms=4)
    got = tensor.einsum(a, [0, 1], b, [1, 2])
    assert_near(got, widened(a) @ widened(b), "float64", terms=4)


@pytest.mark.parametrize("preferred", [None, "float32"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("int8", "int32"), ("bool", "int8")])
def test_einsum_types_as_jax_numpy(dtypes, preferred):
    a, b = (jnp.ones((3, 4), dtype) for dtype in dtypes)
    args = ("ij,kj,kl->il", a, b, a)
    got = tensor.einsum(*args, preferred_element_type=preferred)
    expected = jnp.einsum(*args, preferred_element_type=preferred)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("operands", [(2.0, 3.0), (2.0, 3), (2.0, jnp.float32(3))])
def test_einsum_keeps_weak_types_as_jax_numpy(operands):
    got, expected = (f(",", *operands) for f in (tensor.einsum, jnp.einsum))
    assert jax.typeof(got) == jax.typeof(expected)
    assert float(got) == 6


@pytest.mark.parametrize("extent", [0, 1])
def test_extents_of_zero_and_one(extent):
    a, b = jnp.ones((3, extent)), jnp.ones((extent, 2))
    np.testing.assert_array_equal(tensor.contract("ij,jk->ki", a, b), np.full((2, 3), extent))
    np.testing.assert_array_equal(tensor.reduce("ij->i", a), np.full(3, extent))
    assert tensor.permute("ij->ji", a).shape == (extent, 3)


def test_compute_types_on_cpu_are_at_least_as_precise():
    a, b = draw((4, 64), "float32"), draw((64, 3), "float32")
    for compute_type in ("f32", "tf32", "3xtf32", "bf16", "f16", "9xbf16", "4xf16"):
        got = tensor.contract("ij,jk->ik", a, b, compute_type=compute_type)
        assert_near(got, widened(a) @ widened(b), "float32", terms=64)


A, B = jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4, 5), "float32")
WIDE = jax.ShapeDtypeStruct((1,) * 65, "float32")
MANY = "".join(chr(0x4E00 + i) for i in range(65))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, b: tensor.contract("ij,jk", a, b), ValueError, "must name the modes of a and b"),
        (
            lambda a, b: tensor.contract("ij->ij", a, b),
            ValueError,
            "must name the modes of a and b",
        ),
        (lambda a, b: tensor.contract(3, a, b), TypeError, "subscripts must be a string"),
        (lambda a, b: tensor.contract("i1,1k->ik", a, b), ValueError, "modes must be letters"),
        (lambda a, b: tensor.contract("ijl,jk->ik", a, b), ValueError, "of a must name each"),
        (
            lambda a, b: tensor.contract("ij,kj->ik", a, b),
            ValueError,
            "a mode must have one extent",
        ),
        (lambda a, b: tensor.contract("ii,jk->ijk", a, b), ValueError, "of a must be distinct"),
        (lambda a, b: tensor.contract("ij,jk->iik", a, b), ValueError, "its elements overlap"),
        (lambda a, b: tensor.contract("ij,jk->il", a, b), ValueError, "modes of an operand, got l"),
        (lambda a, b: tensor.contract("ij,jk->i", a, b), ValueError, "got k in one alone"),
        (lambda a, b: tensor.contract("ij,jk->ik", a, b, beta=1), ValueError, "c must be given"),
        (
            lambda a, b: tensor.contract("ij,jk->ik", a, b, c=1j * (a @ b), beta=1),
            TypeError,
            "c must be real where the operands are, got c.dtype=complex64",
        ),
        (
            lambda a, b: tensor.contract("ij,jk->ik", a, b, c=a, beta=1),
            ValueError,
            "c must have the result's shape",
        ),
        (
            lambda a, b: tensor.contract("ij,jk->ik", a, b, alpha=jnp.ones(())),
            TypeError,
            "alpha must be a real number",
        ),
        (lambda a, b: tensor.contract("ij,jk->ik", a, b, alpha=1j), TypeError, "a real number"),
        (lambda a, b: tensor.contract("ij,jk->ik", a, b, op_a="cube"), ValueError, "op_a must be"),
        (
            lambda a, b: tensor.contract("ij,jk->ik", a, b, compute_type="f64"),
            ValueError,
            "compute_type must be one of f32, tf32",
        ),
        (
            lambda a, b: tensor.contract("ij,jk->ik", a, b, implementation="wgmma"),
            ValueError,
            "implementation must be one of xla, gemm, cutensor",
        ),
        (
            lambda a, b: tensor.contract("ij,jk->ik", a, b, algorithm="gett"),
            ValueError,
            "algorithm must come with",
        ),
        (
            lambda a, b: tensor.contract(
                "ij,jk->ik", a, b, algorithm="best", implementation="cutensor"
            ),
            ValueError,
            "algorithm must be one of default",
        ),
        (lambda a, b: tensor.permute("ij->i", a), ValueError, "must have every mode of a"),
        (lambda a, b: tensor.permute("ij->ji", a.astype("int8")), TypeError, "floating-point"),
        (
            lambda a, b: tensor.elementwise_binary("ij,jk->ik", a, b),
            ValueError,
            "modes of the operands must be modes of the result",
        ),
        (
            lambda a, b: tensor.elementwise_binary("ij,ij->ij", a, a, op="sub"),
            ValueError,
            "op must",
        ),
        (lambda a, b: tensor.reduce("ij->i", a, op="mean"), ValueError, "op must be one of add"),
        (
            lambda a, b: tensor.reduce("ij->i", a[:, :0], op="max"),
            ValueError,
            "at least one element",
        ),
        (lambda a, b: tensor.einsum("ij,kj->ik", a, b), ValueError, "a mode must have one extent"),
        (lambda a, b: tensor.einsum("ijk,jk->ik", a, b), ValueError, "einsum: "),
        (lambda a, b: tensor.einsum("ij,jk->ik", a), ValueError, "einsum: "),
        (
            lambda a, b: tensor.einsum("ij,jk,ki->", a, b, b.T @ a.T, optimize=[(0, 1, 2)]),
            ValueError,
            "at most two",
        ),
        (
            lambda a, b: tensor.einsum("ij,jk,kl", a, b, b.T, optimize="best"),
            ValueError,
            "optimize must be",
        ),
        (
            lambda a, b: tensor.einsum("ij,jk,kl", a, b, b.T, optimize=[(5, 6)]),
            ValueError,
            "optimize must be",
        ),
        (
            lambda a, b: tensor.einsum("ij,jk", a, b, precision="exact"),
            ValueError,
            "einsum: precision must be",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        jax.eval_shape(call, A, B)


def test_too_many_modes():
    with pytest.raises(ValueError, match="a must have at most 64 modes, got a.ndim=65"):
        jax.eval_shape(lambda a: tensor.permute(f"{MANY}->{MANY[::-1]}", a), WIDE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reads_c_only_where_beta_is_not_0(dtype):
    a, c = draw((3, 4), dtype), jnp.full((3, 3), jnp.nan, dtype)
    assert np.isfinite(tensor.contract("ij,kj->ik", a, a, c=c)).all()
    assert np.isfinite(tensor.reduce("ij->i", a, c=c[0])).all()
