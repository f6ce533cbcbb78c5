"""Folds the dimensions of a dot_general into (batch, M, N, K), strides and layout flags.

Operands are row-major. Every dimension of the result belongs to the left operand, the right one or
(batch dimensions) to both, so it has a stride in each, 0 where it is absent. The result's
dimensions, in order, are cut into three runs:

    batch   any dimensions that collapse to at most two levels of constant stride in both operands;
            a dimension of one operand only broadcasts the other with stride 0
    M       dimensions of A only, collapsing to one stride
    N       dimensions of B only, collapsing to one stride

and the contracting dimensions, in whichever order suits, to one stride in each operand. A and B are
the left and right operand or, when the result wants the right one's dimensions first, the reverse.
Where no such cut exists, the cheapest of these is copied into an order that has one: the left
operand, the right one, the result, or several of them.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jax_tcgemm.problem.dtypes import MAX_EXTENT


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """Where one operand's elements lie; the fields of `problem.Operand` but its dtype."""

    transposed: bool
    ld: int
    outer_stride: int
    inner_stride: int


@dataclasses.dataclass(frozen=True)
class Fold:
    """A dot_general as one matrix product.

    Attributes:
      batch: product of both batch levels.
      batch_inner: extent of the inner batch level.
      m: rows of the result.
      n: columns of the result.
      k: contracted extent.
      a: layout of A.
      b: layout of B.
      swapped: whether A is the right operand and B the left one.
      lhs_order: None, or how to permute the left operand first (a copy).
      rhs_order: None, or how to permute the right operand first (a copy).
      shape: the shape of D; the same elements as (batch, m, n).
      result_order: None, or how to permute D of that shape (a copy).
    """

    batch: int
    batch_inner: int
    m: int
    n: int
    k: int
    a: MatrixLayout
    b: MatrixLayout
    swapped: bool
    lhs_order: tuple[int, ...] | None
    rhs_order: tuple[int, ...] | None
    shape: tuple[int, ...]
    result_order: tuple[int, ...] | None

    @property
    def num_copies(self) -> int:
        """How many of the left operand, the right operand and the result are copied."""
        return sum(
            order is not None for order in (self.lhs_order, self.rhs_order, self.result_order)
        )


@dataclasses.dataclass(frozen=True)
class _Dim:
    """A dimension of the result or a contracted one: its axis in each operand, None if absent."""

    extent: int
    lhs: int | None
    rhs: int | None


def fold(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    dimension_numbers,
    permutation: Sequence[int],
    itemsizes: tuple[int, int, int] = (1, 1, 1),
    stored: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Fold | str:
    """Finds the fold that copies the fewest bytes; mostly none.

    Args:
      lhs_shape: extents of the left operand.
      rhs_shape: extents of the right operand.
      dimension_numbers: as of `lax.dot_general`.
      permutation: the result is `transpose(dot_general(lhs, rhs), permutation)`.
      itemsizes: bytes of an element of the left operand, the right operand and the result.
      stored: extents of the arrays that hold the operands, where these are filled up; None: theirs.

    Returns:
      A Fold; or why there is none, which only extents over 2**31 - 1 can cause.
    """
    natural, contracted = _dims(lhs_shape, rhs_shape, dimension_numbers)
    stored = stored or (lhs_shape, rhs_shape)
    permuted = [natural[i] for i in permutation]
    is_permuted = list(permutation) != list(range(len(permutation)))
    by_lhs = sorted(contracted, key=lambda d: d.lhs)
    by_rhs = sorted(contracted, key=lambda d: d.rhs)
    sizes = math.prod(lhs_shape), math.prod(rhs_shape), math.prod(d.extent for d in natural)
    nbytes = [size * itemsize for size, itemsize in zip(sizes, itemsizes, strict=True)]
    best, least = None, math.inf
    for copies in itertools.product((False, True), repeat=3):
        # What costs at least this much cannot be better, and the first of equals is kept. (A copy
        # into the order that there is costs nothing, but was tried before as none.)
        bound = 2 * sum(itertools.compress(nbytes, copies))
        if bound >= least:
            continue
        copy_lhs, copy_rhs, copy_result = copies
        result = natural if copy_result else permuted
        lhs_order = rhs_order = None
        # A copied operand takes the result's order, then the other's order of contraction.
        if copy_lhs:
            contracted_order = by_lhs if copy_rhs else by_rhs
            lhs_order = [d.lhs for d in (*result, *contracted_order) if d.lhs is not None]
        if copy_rhs:
            rhs_order = [d.rhs for d in (*result, *by_lhs) if d.rhs is not None]
        result_order = tuple(permutation) if copy_result and is_permuted else None
        for found in _folds(*stored, result, contracted, lhs_order, rhs_order):
            found = dataclasses.replace(found, result_order=result_order)
            cost = _cost(found, nbytes, itemsizes)
            if cost < least:
                best, least = found, cost
            if bound >= least:
                break
    return f"a folded extent is over {MAX_EXTENT}" if best is None else best


def _cost(found: Fold, nbytes: Sequence[int], itemsizes: Sequence[int]) -> float:
    """Memory traffic: what is read, each copy twice, and re-reading for broadcasts at a quarter.

    A broadcast operand is read again for each batch index, mostly from cache; without that term an
    outer dimension of A would turn a product with many rows into many products of one row.
    """
    orders = found.lhs_order, found.rhs_order, found.result_order
    copied = sum(size for size, order in zip(nbytes, orders, strict=True) if order is not None)
    a_itemsize, b_itemsize = itemsizes[1::-1] if found.swapped else itemsizes[:2]
    read = found.batch * found.k * (found.m * a_itemsize + found.n * b_itemsize)
    distinct = nbytes[0] + nbytes[1]
    return 2 * copied + max(read - distinct, 0) / 4


def _dims(lhs_shape, rhs_shape, dimension_numbers) -> tuple[list[_Dim], list[_Dim]]:
    """The result's dimensions in dot_general's order, and the contracted ones."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    batch = [_Dim(lhs_shape[i], i, j) for i, j in zip(lhs_batch, rhs_batch, strict=True)]
    contracted = [_Dim(lhs_shape[i], i, j) for i, j in zip(lhs_contract, rhs_contract, strict=True)]
    lhs_used, rhs_used = {*lhs_batch, *lhs_contract}, {*rhs_batch, *rhs_contract}
    lhs_free = [_Dim(e, i, None) for i, e in enumerate(lhs_shape) if i not in lhs_used]
    rhs_free = [_Dim(e, None, i) for i, e in enumerate(rhs_shape) if i not in rhs_used]
    return batch + lhs_free + rhs_free, contracted


def _strides(shape: Sequence[int], order: Sequence[int] | None) -> list[int]:
    """Stride of each axis of `shape`, were its axes laid out in `order`; empty ones count as 1."""
    strides = [0] * len(shape)
    stride = 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = stride
        stride *= max(shape[axis], 1)
    return strides


def _folds(lhs_stored, rhs_stored, result, contracted, lhs_order, rhs_order) -> Iterator[Fold]:
    """Every cut of the result's dimensions that folds, the operands being laid out as given."""
    lhs_strides, rhs_strides = _strides(lhs_stored, lhs_order), _strides(rhs_stored, rhs_order)

    def levels(dims):
        return _collapse(
            (
                d.extent,
                0 if d.lhs is None else lhs_strides[d.lhs],
                0 if d.rhs is None else rhs_strides[d.rhs],
            )
            for d in dims
        )

    k_levels = levels(sorted(contracted, key=lambda d: -lhs_strides[d.lhs]))
    if len(k_levels) > 1:
        return
    k = math.prod(d.extent for d in contracted)
    dims = [d for d in result if d.extent != 1]
    # The shortest batch run first: what can be rows or columns of one product should be.
    for split, swapped in itertools.product(range(len(dims) + 1), (False, True)):
        in_a = [(d.rhs if swapped else d.lhs) is not None for d in dims[split:]]
        in_b = [(d.lhs if swapped else d.rhs) is not None for d in dims[split:]]
        num_m = in_b.index(True) if any(in_b) else len(in_b)
        if any(in_a[num_m:]):
            continue
        runs = dims[:split], dims[split : split + num_m], dims[split + num_m :]
        batch_levels, m_levels, n_levels = map(levels, runs)
        batch, m, n = (math.prod(d.extent for d in run) for run in runs)
        if len(batch_levels) > 2 or len(m_levels) > 1 or len(n_levels) > 1:
            continue
        if max(batch, m, n, k) > MAX_EXTENT:
            continue
        a_stride, b_stride = (2, 1) if swapped else (1, 2)
        a = _matrix(m_levels, k_levels, batch_levels, a_stride, m, k)
        b = _matrix(k_levels, n_levels, batch_levels, b_stride, k, n)
        if a is not None and b is not None:
            yield Fold(
                batch=batch,
                batch_inner=batch_levels[-1][0] if len(batch_levels) == 2 else batch,
                m=m,
                n=n,
                k=k,
                a=a,
                b=b,
                swapped=swapped,
                lhs_order=_unless_identity(lhs_order),
                rhs_order=_unless_identity(rhs_order),
                shape=tuple(d.extent for d in result),
                result_order=None,
            )


def _unless_identity(order):
    return None if order is None or order == list(range(len(order))) else tuple(order)


def _collapse(dims) -> list[tuple[int, int, int]]:
    """Merges neighbors (extent, lhs stride, rhs stride) that one stride in each operand spans."""
    levels = []
    for extent, lhs, rhs in dims:
        if extent <= 1:
            continue
        if levels and levels[-1][1:] == (extent * lhs, extent * rhs):
            levels[-1] = (levels[-1][0] * extent, lhs, rhs)
        else:
            levels.append((extent, lhs, rhs))
    return levels


def _matrix(row_levels, column_levels, batch_levels, stride, rows, columns):
    """The layout of one operand, rows by columns, or None when neither has stride 1."""
    row_stride = row_levels[0][stride] if row_levels else None
    column_stride = column_levels[0][stride] if column_levels else None
    outer, inner = [0, 0, *(level[stride] for level in batch_levels)][-2:]
    if column_stride == 1 or (column_stride is None and row_stride != 1):
        return MatrixLayout(
            False, max(columns, 1) if row_stride is None else row_stride, outer, inner
        )
    if row_stride in (1, None):
        return MatrixLayout(
            True, max(rows, 1) if column_stride is None else column_stride, outer, inner
        )
    return None
