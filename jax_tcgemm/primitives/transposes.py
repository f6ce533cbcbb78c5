"""Transposes of operands, which products read through instead of having XLA write them.

XLA folds a transpose into its own products. The operand of a custom call it would write to memory
first: `matmul(x, w.T)` would copy `w`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class ProductLayout(NamedTuple):
    """The dimensions of a product.

    Attributes:
      dimension_numbers: as of `tcgemm_dot_general`.
      permutation: as of `tcgemm_dot_general`.
      num_rhs: number of right operands of one shape.
    """

    dimension_numbers: tuple
    permutation: tuple[int, ...]
    num_rhs: int = 1


class Reading(NamedTuple):
    """Where a primitive that reads through transposes has its layout.

    Attributes:
      layout_of: from the parameters of a call to its layout, None if it reads operands as they are.
      with_layout: from the parameters and another layout to other parameters.
    """

    layout_of: Callable[[dict], ProductLayout | None]
    with_layout: Callable[[dict, ProductLayout], dict]


def read_through(
    operands: Sequence, layout: ProductLayout, order_of: Callable, ndims: Sequence[int]
) -> tuple[list, ProductLayout]:
    """The operands and layout of the product that reads what its operands are transposes of.

    Args:
      operands: lhs, right operands, which are read through only if all are transposed alike, and
        others.
      layout: that of the product.
      order_of: from an operand to what it is a transpose of and the permutation; None if it is
        none.
      ndims: numbers of dimensions of lhs and rhs.
    """
    operands = list(operands)
    for side, places in enumerate(((0,), range(1, 1 + layout.num_rhs))):
        while True:
            found = [order_of(operands[place]) for place in places]
            if None in found or len({order for _, order in found}) > 1:
                break
            for place, (x, _) in zip(places, found, strict=True):
                operands[place] = x
            numbers, permutation, num_rhs = layout
            changed = through(numbers, permutation, ndims, side, found[0][1])
            layout = ProductLayout(*changed, num_rhs)
    return operands, layout


def through(
    dimension_numbers, permutation, ndims: Sequence[int], side: int, order: Sequence[int]
) -> tuple[tuple, tuple[int, ...]]:
    """Dimension numbers and permutation of a product that reads x, not `transpose(x, order)`."""
    contract, batch = (list(pair) for pair in dimension_numbers)
    before = _free_axes(contract, batch, ndims, side)
    contract[side] = tuple(order[axis] for axis in contract[side])
    batch[side] = tuple(order[axis] for axis in batch[side])
    # The free dimensions come in the order of the operand's axes.
    moved = sorted(order[axis] for axis in before)
    first = len(batch[0]) + (len(_free_axes(contract, batch, ndims, 0)) if side else 0)
    place = {first + i: first + moved.index(order[axis]) for i, axis in enumerate(before)}
    permutation = tuple(place.get(axis, axis) for axis in permutation)
    return (tuple(contract), tuple(batch)), permutation


def _free_axes(contract, batch, ndims: Sequence[int], side: int) -> list[int]:
    taken = {*contract[side], *batch[side]}
    return [axis for axis in range(ndims[side]) if axis not in taken]
