"""How XLA is asked for products: on the CPU so that it compiles, on a GPU as users write them."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import draw

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.device.dense import call as dense_call
from jax_tcgemm.device.dense import plan as dense_plan
from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import xla_forms
from jax_tcgemm.system import jax_internals, modules

BF16 = jnp.bfloat16
# Rows, columns and k of which XLA:CPU has no product of bfloat16 in float32 with a transposed lhs.
M, N, K = 5, 9, 7


def by_columns(f):
    """A function of an operand that XLA lays out by columns, as a gather of columns is."""
    return lambda x, order, *rest: f(x[:, order], *rest)


PRODUCTS = {
    "float32": lambda x, w, b: jax_tcgemm.matmul(x, w, preferred_element_type=jnp.float32),
    "linear": lambda x, w, b: jax_tcgemm.linear(x, w, b, activation="silu"),
    "epilogue": lambda x, w, b: jax_tcgemm.matmul(x, w, epilogue=lambda acc: acc.astype(BF16) * 2),
    "gated": lambda x, w, b: jax_tcgemm.gated_linear(x, jnp.stack((w, w), 1)),
    "einsum": lambda x, w, b: jax_tcgemm.tensor.einsum(
        "mk,kn->mn", x, w, preferred_element_type=jnp.float32
    ),
}
EXACT = {
    "float32": lambda x, w, b: x @ w,
    "linear": lambda x, w, b: jax.nn.silu(x @ w + b),
    "epilogue": lambda x, w, b: 2 * (x @ w),
    "gated": lambda x, w, b: jax.nn.silu(x @ w) * (x @ w),
    "einsum": lambda x, w, b: x @ w,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_laid_out_by_columns(name):
    x, w, b = (draw(shape, BF16) for shape in ((M, K), (K, N), (N,)))
    order = np.random.default_rng(0).permutation(K)
    got = jax.jit(by_columns(PRODUCTS[name]))(x, jnp.asarray(order), w, b)
    exact = EXACT[name](*(np.asarray(a, np.float64) for a in (x[:, order], w, b)))
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-7, atol=2**-5)


def test_without_layouts_nothing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.layout", None)
    x = jnp.ones((2, 3))
    assert jax_internals.row_major(x) is x


ACTIVATIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_small_layer_is_the_expression_of_users_on_a_gpu(name):
    """With a wider product XLA would not add the bias and apply relu in cuBLASLt's kernel."""
    types = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((10, 57), (57, 690), (690,))]

    def operations(f):
        text = jax.jit(f).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
        lines = [line for line in text.splitlines() if "stablehlo." in line]
        return [line for line in lines if "broadcast_in_dim" not in line]

    def ours(x, w, b):
        return jax_tcgemm.linear(x, w, b, activation=name)

    assert {c.implementation for c in jax_tcgemm.explain(ours, *types, platform="cuda")} == {"xla"}
    products = [x for x in operations(ours) if "dot_general" in x]
    assert products == [
        x for x in operations(lambda x, w, b: ACTIVATIONS[name](x @ w + b)) if "dot_general" in x
    ]
    assert not any("f32" in x for x in operations(ours))


# --- other forms than a dot -----------------------------------------------------------------------


def product(batch, m, n, k, dtype, layout="NN"):
    """Types of the operands of a product of a layout, and the product."""
    shapes = [(m, k) if layout[0] == "N" else (k, m), (k, n) if layout[1] == "N" else (n, k)]
    lead = (batch,) if batch > 1 else ()
    contract = (len(lead) + (layout[0] == "N"),), (len(lead) + (layout[1] == "T"),)
    numbers = contract, ((0,), (0,)) if lead else ((), ())
    preferred = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else None

    def f(a, b, **how):
        how = {"preferred_element_type": preferred} | how
        return jax_tcgemm.dot_general(a, b, numbers, **how)

    return [jax.ShapeDtypeStruct((*lead, *shape), dtype) for shape in shapes], f


def chosen(types, f):
    (call,) = jax_tcgemm.explain(f, *types, platform="cuda")
    return f"{call.implementation}/{call.config}"


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bfloat16", "int8"])
@pytest.mark.parametrize("extents", [(2, 2, 2), (3, 3, 3), (8, 8, 8), (12, 12, 12), (3, 3, 16)])
def test_batches_of_tiny_matrices_are_broadcast(extents, dtype):
    with jax.enable_x64(True):
        assert chosen(*product(1000, *extents, dtype)) == "xla/broadcast"


@pytest.mark.parametrize("extents", [(1, 12, 12), (12, 1, 12), (17, 3, 3), (16, 16, 16)])
def test_other_batches_are_not(extents):
    assert chosen(*product(1000, *extents, "float32")) != "xla/broadcast"
    assert chosen(*product(2, 3, 3, 3, "float32")) != "xla/broadcast"
    with jax.enable_x64(True):
        assert chosen(*product(1000, 9, 9, 9, "float64", "NN")) == "xla/broadcast"
        assert chosen(*product(1000, 9, 9, 9, "float64", "TN")) != "xla/broadcast"


@pytest.mark.parametrize(
    ("batch", "extents", "layout", "dtype", "is_broadcast"),
    [
        (64000, (8, 8, 8), "TT", "float64", False),
        (64000, (8, 8, 8), "TN", "float64", False),
        (64000, (8, 8, 8), "NT", "float64", True),
        (1380, (6, 6, 6), "TN", "float64", True),
        (39017, (11, 11, 11), "NT", "float32", False),
        (39017, (11, 11, 11), "NN", "float32", True),
        (39017, (11, 11, 11), "NT", "bfloat16", True),
        (1000, (11, 11, 11), "NT", "float32", True),
        (100000, (5, 3, 14), "TT", "float32", True),
    ],
)
def test_large_batches_whose_lines_are_read_apart_are_not(
    batch, extents, layout, dtype, is_broadcast
):
    m, n, k = extents
    dtype = {"float32": "f32", "float64": "f64", "bfloat16": "bf16"}[dtype]
    a = Operand(dtype, layout[0] == "T", m if layout[0] == "T" else k, 0, m * k)
    b = Operand(dtype, layout[1] == "T", k if layout[1] == "T" else n, 0, k * n)
    compute = "f64" if dtype == "f64" else "f32"
    problem = Problem(batch, batch, m, n, k, a, b, dtype, compute)
    assert xla_forms.broadcast_pays(problem) == is_broadcast


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("extents", [(3, 4, 5), (6, 5, 11)])
def test_values_of_broadcasting(extents, layout, dtype):
    """Run here what is lowered for a GPU: it is made of XLA's own operations."""
    with jax.enable_x64(True):
        types, f = product(20, *extents, dtype, layout)
        f = functools.partial(f, implementation="xla", config="broadcast")
        assert chosen(types, f) == "xla/broadcast"
        a, b = (draw(x.shape, x.dtype, seed) for seed, x in enumerate(types))
        if dtype == "int8":
            a, b = a * 40, b * 40
        plan = dense_plan.make_plan(product_of(f, *types), selection.target_device("cuda"))
        got = jax.jit(lambda *x: dense_call.dot_general(*x, plan))(a, b)
        wide = np.complex128 if dtype == "complex64" else np.float64
        rows, columns = (np.asarray(x).astype(wide) for x in (a, b))
        rows = rows if layout[0] == "N" else rows.swapaxes(1, 2)
        columns = columns if layout[1] == "N" else columns.swapaxes(1, 2)
        limit = {"float64": 1e-14, "int8": 0, "bfloat16": 2**-8}.get(dtype, 1e-6)
        assert got.dtype == (jnp.int32 if dtype == "int8" else a.dtype)
        exact = rows @ columns
        error = np.abs(np.asarray(got).astype(wide) - exact).max()
        assert error <= limit * np.abs(exact).max()


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
@pytest.mark.parametrize(
    ("extents", "form"),
    [
        ((13, 3052, 5), "bfloat16"),
        ((145, 10, 2), "bfloat16"),
        ((13, 6, 9), "bfloat16"),
        ((3, 3, 3), "broadcast"),
        ((2, 100, 2), "broadcast"),
        ((2, 3, 70), "broadcast"),
        ((8, 8, 8), "default"),
        ((448, 2368, 64), "bfloat16"),
        ((16, 1184, 144), "default"),
        ((5, 1, 14968), "default"),
        ((5, 1, 14969), "int32"),
    ],
)
def test_small_products_of_8_bit_integers(extents, form):
    """XLA's own dot of them is wrong for k that four does not divide."""
    m, n, k = extents
    types, f = product(1, m, n, k, "int8", "NT")
    assert chosen(types, f) == f"xla/{form}"
    plan = dense_plan.make_plan(product_of(f, *types), selection.target_device("cuda"))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, x.shape).astype(np.int8) for x in types)
    got = jax.jit(lambda *x: dense_call.dot_general(*x, plan))(a, b)
    np.testing.assert_array_equal(got, a.astype(int) @ b.astype(int).T)


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_tiny_products_of_8_bit_integers_are_one_loop(layout):
    """As bfloat16, XLA would convert operands by kernels of their own, and wgmma copy them."""
    types, f = product(1, 3, 5, 7, "int8", layout)
    types[1] = jax.ShapeDtypeStruct(types[1].shape, "uint8")
    assert chosen(types, f) == "xla/broadcast"
    plan = dense_plan.make_plan(product_of(f, *types), selection.target_device("cuda"))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, x.shape).astype(x.dtype) for x in types)
    got = jax.jit(lambda *x: dense_call.dot_general(*x, plan))(a, b)
    a, b = (x.T if y == "T" else x for x, y in zip((a, b), layout, strict=True))
    np.testing.assert_array_equal(got, a.astype(int) @ b.astype(int))


def test_what_is_forced_is_asked_of_xla_in_a_form_that_is_right():
    types, f = product(1, 64, 64, 7, "int8", "NT")
    assert chosen(types, lambda a, b: f(a, b, implementation="xla")) == "xla/int32"
    forced = lambda a, b: f(a, b, implementation="xla", config="broadcast")  # noqa: E731
    with pytest.raises(ValueError, match="an extent is 64, not 16 at most"):
        jax_tcgemm.explain(forced, *types, platform="cuda")


def test_sums_of_bfloat16_are_exact():
    """The largest k of each pair of dtypes: one more could leave the integers of float32."""
    for dtypes, most in ((("s8", "s8"), 1024), (("u8", "u8"), 258), (("s8", "u8"), 514)):
        for k, is_exact in ((most, True), (most + 1, False)):
            a, b = (Operand(dtype, False, 64) for dtype in dtypes)
            problem = Problem(1, 1, 64, 64, k, a, b, "s32", "s32")
            assert (xla_forms.obstacle(xla_forms.BFLOAT16, problem) == "") == is_exact


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
def test_operands_that_must_be_converted_are_left_to_xla():
    """A loop of its own converts them for a kernel of ours, which costs more than is gained."""
    types = [jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((64, 512), BF16)]
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, *types, platform="cuda")
    assert call.implementation == "xla"
    assert "with conversions of operands" in call.why


def product_of(f, *types):
    """Return the product that the only call of a function says."""
    (eqn,) = jax.make_jaxpr(f)(*types).eqns
    return primitive.product_of(*(x.aval for x in (*eqn.invars, *eqn.outvars)), eqn.params)
