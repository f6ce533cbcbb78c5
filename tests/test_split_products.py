"""Operands in terms as a GPU's kernel stores them: what it is asked for, what products read."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from precise_cases import PRESETS
from random_arrays import normal
from split_cases import by_definition

import jax_tcgemm
from jax_tcgemm.device import grouped, split_precision
from jax_tcgemm.device.dense import plan as dense_plan
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.selection.devices import ASSUMED_GPU
from jax_tcgemm.system import modules

X3, X6, X9, TF32 = PRESETS

# Shapes, dimension numbers and the order of the result: rows that are no whole vectors, batches,
# several dimensions of K, operands that must be permuted.
PRODUCTS = {
    "nn": ((13, 21), (21, 11), (((1,), (0,)), ((), ())), (0, 1)),
    "nt": ((13, 21), (11, 21), (((1,), (1,)), ((), ())), (0, 1)),
    "tn": ((21, 13), (21, 11), (((0,), (0,)), ((), ())), (0, 1)),
    "tt": ((21, 13), (11, 21), (((0,), (1,)), ((), ())), (1, 0)),
    "aligned": ((16, 24), (24, 8), (((1,), (0,)), ((), ())), (0, 1)),
    "batch": ((3, 5, 7), (3, 7, 9), (((2,), (1,)), ((0,), (0,))), (0, 1, 2)),
    "batches": ((2, 3, 5, 7), (2, 3, 9, 7), (((3,), (3,)), ((0, 1), (0, 1))), (0, 1, 3, 2)),
    "two of k": ((5, 2, 7), (2, 7, 9), (((1, 2), (0, 1)), ((), ())), (0, 1)),
    "k within": ((5, 7, 3), (7, 9), (((1,), (0,)), ((), ())), (0, 1, 2)),
    "heads": ((2, 5, 3, 7), (2, 6, 3, 7), (((3,), (3,)), ((0, 2), (0, 2))), (0, 1, 2, 3)),
    "row": ((1, 9), (9, 5), (((1,), (0,)), ((), ())), (0, 1)),
    "vector": ((9,), (9, 5), (((0,), (0,)), ((), ())), (0,)),
    "nothing of k": ((3,), (5,), (((), ()), ((), ())), (0, 1)),
}

# Of which no kernel makes the terms, or not for both operands.
UNALIGNED = ("nothing of k", "two of k")


def product_of(name, preset, dtype):
    lhs_shape, rhs_shape, numbers, order = PRODUCTS[name]
    operands = normal(*lhs_shape, dtype=dtype), normal(*rhs_shape, seed=1, dtype=dtype)
    result = jnp.transpose(lax.dot_general(*operands, numbers), order)
    dtype = np.dtype(dtype)
    product = dense.Product(
        *(CallOptions("matmul"), lhs_shape, dtype, rhs_shape, dtype, result.shape, dtype),
        dimension_numbers=numbers,
        permutation=order,
        precision=canonical_precision("matmul", preset),
    )
    return product, operands


def stored_by_xla(x, product, numerics, is_rhs):
    how = dense.split_of(product, numerics, is_rhs)
    return split_precision.split(
        x, dataclasses.replace(how, numerics=split_precision.split_by_xla(numerics))
    )


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("preset", [X3, X9, TF32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_the_kernel_is_asked_for(name, preset, dtype):
    """It is what XLA would store, by the definition of the problem."""
    product, operands = product_of(name, preset, dtype)
    numerics, _, _ = dense.fold_product(product, ASSUMED_GPU)
    for is_rhs, x in enumerate(operands):
        is_rhs = bool(is_rhs)
        problem = split_precision._problem(dense.split_of(product, numerics, is_rhs))
        if isinstance(problem, str):
            assert name in ("nothing of k", *UNALIGNED) or x.ndim == 1, problem
            continue
        expected = np.asarray(stored_by_xla(x, product, numerics, is_rhs)).astype(np.float32)
        got = by_definition(problem, np.asarray(x))
        assert np.prod(problem.shape) == expected.size
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)


GROUPED = {
    "rows": {},
    "matrices that lie transposed": {"rhs_transposed": True},
    "gated": {"gated": True},
    "gated matrices that lie transposed": {"gated": True, "rhs_transposed": True},
    "gathered": {"gathered_rows": 11},
    "batches": {"batches": ((2, 3), (1, 3), (2, 3))},
    "contraction": {"form": "contraction"},
    "gathered contraction": {"form": "contraction", "gathered_rows": 11},
    "nothing to gather from": {"gathered_rows": 0},
}


@pytest.mark.parametrize("preset", [X6, TF32])
@pytest.mark.parametrize("name", GROUPED)
def test_what_the_kernel_is_asked_for_by_grouped_products(name, preset):
    """It is what XLA would store, of the shapes that the call's operands have."""
    fields = {"options": CallOptions("ragged_dot"), "form": "rows", "batches": ((), (), ())}
    fields |= {"m": 24, "n": 16, "k": 32, "groups": 3, "num_sizes": 3}
    fields |= {"rhs_transposed": False, "gated": False, "gathered_rows": None}
    fields |= {f"{x}_dtype": np.dtype(np.float32) for x in ("lhs", "rhs", "result")}
    precision = canonical_precision("ragged_dot", preset)
    fields |= {"precision": precision}
    product = grouped.Product(**fields | GROUPED[name])
    numerics = grouped.numerics_of(product, ASSUMED_GPU)
    sizes = jnp.array([10, 0, 14], jnp.int32)
    operands = [normal(*grouped._shape(product, is_rhs), seed=is_rhs) for is_rhs in (False, True)]
    by_xla = grouped._split_operands(
        product, split_precision.split_by_xla(numerics), *operands, sizes
    )
    for is_rhs, x in enumerate(operands):
        problem = split_precision._problem(grouped._split_of(product, numerics, bool(is_rhs)))
        expected = np.asarray(by_xla[is_rhs]).astype(np.float32)
        if x.size == 0:
            assert problem == "there is nothing to split"
            assert expected.size == 0
            continue
        got = by_definition(problem, np.asarray(x))
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)


def read(x, operand, problem, rows, *, is_a):
    """An operand of the problem, (batch, rows, k), read by its strides."""
    batch = np.arange(problem.batch)
    outer, inner = batch // problem.batch_inner, batch % problem.batch_inner
    offsets = outer * operand.outer_stride + inner * operand.inner_stride
    is_k_major = operand.transposed != is_a
    row_stride, k_stride = (operand.ld, 1) if is_k_major else (1, operand.ld)
    index = np.arange(rows)[:, None] * row_stride + np.arange(problem.k) * k_stride
    return np.asarray(x).astype(np.float64).ravel()[offsets[:, None, None] + index]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("preset", [X6, TF32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_where_products_read(name, preset, dtype):
    """What lies at the strides of the problem is what adds up to the product."""
    product, operands = product_of(name, preset, dtype)
    numerics, fold, problem = dense.fold_product(product, ASSUMED_GPU)
    stored = [
        stored_by_xla(x, product, numerics, bool(is_rhs)) for is_rhs, x in enumerate(operands)
    ]
    stored = [
        x if order is None else jnp.transpose(x, order)
        for x, order in zip(stored, (fold.lhs_order, fold.rhs_order), strict=True)
    ]
    assert (problem.a.is_aligned and problem.b.is_aligned) or name in UNALIGNED
    a, b = stored[::-1] if fold.swapped else stored
    a = read(a, problem.a, problem, problem.m, is_a=True)
    b = read(b, problem.b, problem, problem.n, is_a=False)
    d = jnp.asarray(np.einsum("bmk,bnk->bmn", a, b).astype(np.float32)).reshape(fold.shape)
    if fold.result_order is not None:
        d = jnp.transpose(d, fold.result_order)
    component = dense.layout_of(product, numerics).component
    got = split_precision.with_components(d, component, product.result_shape)
    wide = [
        np.asarray(x).astype(np.complex128 if dtype == "complex64" else float) for x in operands
    ]
    numbers, order = product.dimension_numbers, product.permutation
    exact = _dot_general(*wide, numbers, order)
    magnitude = _dot_general(*map(abs, wide), numbers, order)
    allowed = {X6: 2.0**-24, TF32: 2.0**-21}[preset] + 2.0**-22
    assert got.shape == product.result_shape
    assert (abs(np.asarray(got) - exact) <= 2 * allowed * magnitude).all()


def _dot_general(lhs, rhs, numbers, order):
    letters = iter("abcdefghijklmnop")
    of_lhs = [next(letters) for _ in lhs.shape]
    of_rhs = [next(letters) for _ in rhs.shape]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    for i, j in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
        of_rhs[j] = of_lhs[i]
    free = [x for i, x in enumerate(of_lhs) if i not in (*lhs_contract, *lhs_batch)]
    free += [x for j, x in enumerate(of_rhs) if j not in (*rhs_contract, *rhs_batch)]
    result = [*(of_lhs[i] for i in lhs_batch), *free]
    subscripts = f"{''.join(of_lhs)},{''.join(of_rhs)}->{''.join(result)}"
    return np.einsum(subscripts, lhs, rhs).transpose(order)


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
def test_what_is_called():
    """Each operand's kernel, where it has one, and a product of what they store."""

    def product(a, b):
        return jax_tcgemm.matmul(a, b, precision=X6)

    a, b = normal(33, 70), normal(70, 21, seed=1)
    (call,) = jax_tcgemm.explain(product, a, b, platform="cuda")
    assert (call.problem.k, call.problem.a.ld, call.problem.b.ld) == (6 * 72, 6 * 72, 24)
    assert [x.split(" (")[0] for x in call.copies] == [
        "lhs split into terms of bfloat16 by split/default",
        "rhs split into terms of bfloat16 by split/default",
    ]


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
@pytest.mark.parametrize("name", UNALIGNED)
def test_rows_that_cannot_be_filled_up_are_xlas(name):
    """Of two contracted dimensions the last one is as long as it is."""
    product, _ = product_of(name, X3, "float32")
    plan = dense_plan.make_plan(product, ASSUMED_GPU)
    assert " by XLA, since " in plan.copies[0]


def test_xla_splits_what_it_multiplies():
    """Of its own product, which was asked for by name, nothing is filled up."""
    a, b = normal(33, 70), normal(70, 21, seed=1)

    def product(a, b):
        return jax_tcgemm.matmul(a, b, precision=X3, implementation="xla")

    (call,) = jax_tcgemm.explain(product, a, b, platform="cuda")
    bytes_of_lhs = 33 * 70 * (4 + 3 * 2)
    assert (
        call.copies[0] == f"lhs split into terms of bfloat16 by XLA ({bytes_of_lhs / 1e6:.3g} MB)"
    )


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
@pytest.mark.parametrize(
    ("n", "by"),
    [
        (64, "split/default"),
        (60, "XLA, since rows of terms must be of whole 16 bytes, got 60 of bfloat16"),
    ],
)
def test_who_splits_operands_of_groups(n, by):
    """Rows of matrices are packed: where they are no whole 16 bytes, XLA splits them."""
    operands = normal(48, 72), normal(3, 72, n, seed=1), jnp.array([10, 0, 38], jnp.int32)

    def product(*operands):
        return jax_tcgemm.ragged_dot(*operands, precision=X3)

    (call,) = jax_tcgemm.explain(product, *operands, platform="cuda")
    assert call.implementation != "xla"
    assert list(call.copies) == [
        "lhs split into terms of bfloat16 by split/default",
        f"rhs split into terms of bfloat16 by {by}",
    ]
