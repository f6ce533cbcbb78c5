"""Folding, checked by walking flat buffers with the strides that a fold gives."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_tcgemm.device.dense.folding import fold


def _matrices(flat, layout, fold, rows, columns):
    """op(X)[b, row, column] of csrc/core/problem.h, addressed element by element."""
    index = np.arange(fold.batch) if fold.batch else np.zeros(0, int)
    inner = max(fold.batch_inner, 1)
    start = index // inner * layout.outer_stride + index % inner * layout.inner_stride
    row_stride, column_stride = (1, layout.ld) if layout.transposed else (layout.ld, 1)
    offsets = np.arange(rows)[:, None] * row_stride + np.arange(columns) * column_stride
    assert layout.ld >= (rows if layout.transposed else columns)
    return flat[start[:, None, None] + offsets]


def _run(found, lhs, rhs):
    """What an implementation and the device-local code would compute from a fold."""
    lhs = lhs if found.lhs_order is None else lhs.transpose(found.lhs_order)
    rhs = rhs if found.rhs_order is None else rhs.transpose(found.rhs_order)
    a, b = (rhs, lhs) if found.swapped else (lhs, rhs)
    if found.batch * found.m * found.n == 0 or found.k == 0:
        d = np.zeros((found.batch, found.m, found.n), int)
    else:
        a = _matrices(a.ravel(), found.a, found, found.m, found.k)
        b = _matrices(b.ravel(), found.b, found, found.k, found.n)
        d = a @ b
    d = d.reshape(found.shape)
    return d if found.result_order is None else d.transpose(found.result_order)


def _einsum(lhs, rhs, dimension_numbers, permutation):
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_labels, rhs_labels = list(range(lhs.ndim)), list(range(100, 100 + rhs.ndim))
    lhs_axes = (*lhs_contract, *lhs_batch)
    for i, j in zip(lhs_axes, (*rhs_contract, *rhs_batch), strict=True):
        rhs_labels[j] = lhs_labels[i]
    out = [lhs_labels[i] for i in lhs_batch]
    out += [lhs_labels[i] for i in range(lhs.ndim) if i not in lhs_axes]
    out += [label for label in rhs_labels if label >= 100]
    names = {label: chr(97 + i) for i, label in enumerate(dict.fromkeys(lhs_labels + rhs_labels))}
    text = ["".join(names[label] for label in labels) for labels in (lhs_labels, rhs_labels, out)]
    return np.einsum(f"{text[0]},{text[1]}->{text[2]}", lhs, rhs).transpose(permutation)


def _check(lhs_shape, rhs_shape, dimension_numbers, permutation=None):
    (contract, _), (batch, _) = dimension_numbers
    if permutation is None:
        permutation = range(len(lhs_shape) + len(rhs_shape) - 2 * len(contract) - len(batch))
    found = fold(lhs_shape, rhs_shape, dimension_numbers, tuple(permutation))
    lhs = np.arange(math.prod(lhs_shape)).reshape(lhs_shape)
    rhs = np.arange(math.prod(rhs_shape)).reshape(rhs_shape) - 3
    expected = _einsum(lhs, rhs, dimension_numbers, tuple(permutation))
    np.testing.assert_array_equal(_run(found, lhs, rhs), expected)
    return found


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("mnk", [(5, 6, 7), (1, 6, 7), (5, 1, 7), (5, 6, 1), (1, 1, 7), (1, 1, 1)])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=["matrix", "batch3", "batch2x3"])
def test_every_layout_folds_without_copies(layout, mnk, batch):
    m, n, k = mnk
    a, b = ((k, m) if layout[0] == "T" else (m, k)), ((n, k) if layout[1] == "T" else (k, n))
    nb = len(batch)
    contract = ((nb + (layout[0] == "N"),), (nb + (layout[1] == "T"),))
    found = _check((*batch, *a), (*batch, *b), (contract, (tuple(range(nb)),) * 2))
    assert found.num_copies == 0
    assert (found.batch, found.m, found.n, found.k) == (math.prod(batch), m, n, k)
    if min(mnk) > 1:
        assert (found.a.transposed, found.b.transposed) == (layout[0] == "T", layout[1] == "T")
        assert (found.a.ld, found.b.ld) == (a[1], b[1])


def test_attention_scores_fold_into_two_batch_levels():
    found = _check((2, 16, 4, 8), (2, 20, 4, 8), (((3,), (3,)), ((0, 2), (0, 2))))
    assert found.num_copies == 0
    assert (found.batch, found.batch_inner, found.m, found.n, found.k) == (8, 4, 16, 20, 8)
    assert (found.a.ld, found.a.outer_stride, found.a.inner_stride) == (32, 16 * 32, 8)
    assert found.b.transposed


def test_attention_values_fold_without_copying_an_operand():
    found = _check((2, 4, 16, 20), (2, 20, 4, 8), (((3,), (1,)), ((0, 1), (0, 2))))
    assert found.num_copies == 0
    assert (found.b.ld, found.b.transposed) == (32, False)


@pytest.mark.parametrize(
    ("lhs", "rhs", "numbers", "permutation", "batch", "m"),
    [
        ((6, 5, 7), (7, 9), (((2,), (0,)), ((), ())), None, 1, 30),
        ((5, 7), (6, 7, 9), (((1,), (1,)), ((), ())), (1, 0, 2), 6, 5),
        ((3, 5, 7), (4, 7, 9), (((2,), (1,)), ((), ())), (0, 2, 1, 3), 12, 5),
        ((6, 7, 5), (7, 9), (((1,), (0,)), ((), ())), None, 6, 5),
    ],
    ids=["rhs shared: rows", "lhs shared", "both broadcast", "rows apart in memory"],
)
def test_broadcasting_folds_without_copies(lhs, rhs, numbers, permutation, batch, m):
    found = _check(lhs, rhs, numbers, permutation)
    assert found.num_copies == 0
    assert (found.batch, found.m) == (batch, m)


def test_gradient_order_swaps_the_operands():
    # The cotangent of the right operand, asked for in its own order, is x^T g either way round.
    for permutation, swapped in ((0, 1), False), ((1, 0), True):
        found = _check((30, 5), (30, 7), (((0,), (0,)), ((), ())), permutation)
        assert found.num_copies == 0
        assert found.swapped == swapped


def test_contracted_order_is_free():
    found = _check((5, 3, 4), (3, 4, 6), (((2, 1), (1, 0)), ((), ())))
    assert found.num_copies == 0
    assert found.k == 12


def test_only_the_offending_operand_is_copied():
    lhs, rhs = (3, 50, 4), (3, 4, 6)
    found = _check(lhs, rhs, (((0, 2), (0, 1)), ((), ())))
    assert found.lhs_order == (1, 0, 2)
    assert found.rhs_order is None
    assert found.result_order is None


def test_an_outer_dimension_of_columns_does_not_make_one_row_products():
    found = _check((64, 16), (8, 16, 4), (((1,), (1,)), ((), ())))
    assert (found.batch, found.m, found.n) == (1, 64, 32)
    assert found.rhs_order == (0, 2, 1)


@pytest.mark.parametrize(
    ("lhs", "rhs"), [((0, 3), (3, 4)), ((2, 0), (0, 4)), ((2, 3), (3, 0)), ((0, 0), (0, 0))]
)
def test_empty_dimensions(lhs, rhs):
    found = _check(lhs, rhs, (((1,), (0,)), ((), ())))
    assert (found.m, found.n, found.k) == (lhs[0], rhs[1], lhs[1])


def test_rows_over_31_bits_become_batches():
    found = fold((2**16, 2**16, 1), (1,), (((2,), (0,)), ((), ())), (0, 1))
    assert (found.batch, found.m, found.num_copies) == (2**16, 2**16, 0)


def test_a_contracted_extent_over_31_bits_has_no_fold():
    shape = (2**16, 2**16)
    assert "2147483647" in fold(shape, shape, (((0, 1), (0, 1)), ((), ())), ())


@st.composite
def _products(draw):
    num_batch = draw(st.integers(0, 3))
    num_contract = draw(st.integers(0, 3))
    num_free = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    sizes = st.sampled_from([1, 2, 3, 4, 0])
    extents = st.sampled_from([1, 2, 3, 4]) if draw(st.booleans()) else sizes
    shared = [draw(extents) for _ in range(num_batch + num_contract)]
    shapes, batches, contracts = [], [], []
    for free in num_free:
        count = len(shared) + free
        order = draw(st.permutations(range(count)))
        dims = [*shared, *(draw(extents) for _ in range(free))]
        shape = [0] * count
        for i, axis in enumerate(order):
            shape[axis] = dims[i]
        shapes.append(tuple(shape))
        batches.append(tuple(order[:num_batch]))
        contracts.append(tuple(order[num_batch : len(shared)]))
    permutation = draw(st.permutations(range(num_batch + sum(num_free))))
    return *shapes, (tuple(contracts), tuple(batches)), tuple(permutation)


@settings(max_examples=400, deadline=None)
@given(_products())
def test_any_dimension_numbers(product):
    _check(*product)
