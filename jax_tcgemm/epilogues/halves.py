"""Pattern match of stacked products that are split into gate and up."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from jax.extend import core

# The most elementwise equations between a product and its split.
_MOST_BETWEEN = 16


@dataclasses.dataclass(frozen=True)
class Halves:
    """Split of a stacked product into two halves.

    Attributes:
      product: the product.
      dimension: the dimension that is split.
      is_dropped: whether the halves, of size 1 along the dimension, lack it.
      parts: the first and the second half.
      members: numbers of a chain of elementwise equations from the product to the split.
      takers: numbers of the equations that split the result of the chain.
      is_alternating: whether the halves are interleaved, with the first half at even indices.
    """

    product: core.Var
    dimension: int
    is_dropped: bool
    parts: tuple[core.Var, core.Var]
    members: tuple[int, ...]
    takers: tuple[int, ...]
    is_alternating: bool = False


def find_halves(
    product: core.Var,
    equations: Sequence[core.JaxprEqn],
    users: Mapping[core.Var, Collection[int]],
    can_fuse: Callable[[int], bool],
) -> Halves | None:
    """Find the halves of a product that is read for its split only; None without such a split.

    Args:
      product: the product.
      equations: the equations of the program.
      users: for each variable, the units that read it, such as numbers of equations.
      can_fuse: whether the equation with a number has no group yet and is an elementwise primitive
        of the product's shape.
    """
    x, members = product, []
    while len(users[x]) == 1 and len(members) < _MOST_BETWEEN:
        (number,) = users[x]
        if not can_fuse(number) or len(equations[number].outvars) != 1:
            break
        members.append(number)
        (x,) = equations[number].outvars
    takers = sorted(users[x])
    if not takers or takers[-1] >= len(equations):
        return None
    found = _taken_apart(x, [equations[number] for number in takers])
    if found is None:
        return None
    dimension, parts, is_dropped, is_alternating = found
    if not is_dropped and parts[0].aval.shape[dimension] == 1:
        dropping = [_without(part, dimension, equations, users) for part in parts]
        if None in dropping:
            return None
        takers += dropping
        parts = [equations[number].outvars[0] for number in dropping]
        is_dropped = True
    numbers = tuple(members), tuple(takers)
    return Halves(product, dimension, is_dropped, tuple(parts), *numbers, is_alternating)


def is_halving(eqn: core.JaxprEqn) -> bool:
    """Whether an equation alone takes its operand apart into two halves."""
    return len(eqn.invars) == 1 and _taken_apart(eqn.invars[0], [eqn]) is not None


def _taken_apart(x, takers: Sequence[core.JaxprEqn]):
    """The dimension along which, the halves, whether they lack it, and whether they alternate.

    None where they are no halves.
    """
    names = [eqn.primitive.name for eqn in takers]
    if names == ["split"]:
        (eqn,) = takers
        axis, sizes = eqn.params["axis"], eqn.params["sizes"]
        are_halves = len(sizes) == 2 and sizes[0] == sizes[1]
        return (axis, eqn.outvars, False, False) if are_halves else None
    if names == ["unstack"]:
        (eqn,) = takers
        return (eqn.params["axis"], eqn.outvars, True, False) if len(eqn.outvars) == 2 else None
    if names != ["slice", "slice"]:
        return None
    shape = x.aval.shape
    first, second = sorted(takers, key=lambda eqn: tuple(eqn.params["start_indices"]))
    starts, limits = ([eqn.params[key] for eqn in (first, second)] for key in _BOUNDS)
    differing = [dim for dim in range(len(shape)) if starts[0][dim] != starts[1][dim]]
    if len(differing) != 1:
        return None
    (dim,) = differing
    half = shape[dim] // 2
    strides = [tuple(eqn.params["strides"] or (1,) * len(shape)) for eqn in (first, second)]
    is_alternating = half > 1 and strides[0][dim] == 2
    step = [2 if is_alternating and axis == dim else 1 for axis in range(len(shape))]
    first_limits, second_starts = list(shape), [0] * len(shape)
    second_starts[dim] = 1 if is_alternating else half
    if not is_alternating:
        first_limits[dim] = half
    # The last of what alternates may end with the last one of the others or before it.
    ends = {tuple(first_limits)}
    if is_alternating:
        first_limits[dim] -= 1
        ends.add(tuple(first_limits))
    are_halves = (
        2 * half == shape[dim]
        and strides == [tuple(step)] * 2
        and tuple(starts[0]) == (0,) * len(shape)
        and tuple(starts[1]) == tuple(second_starts)
        and tuple(limits[0]) in ends
        and tuple(limits[1]) == tuple(shape)
    )
    parts = first.outvars[0], second.outvars[0]
    return (dim, parts, False, is_alternating) if are_halves else None


_BOUNDS = ("start_indices", "limit_indices")


def _without(part, dimension: int, equations, users) -> int | None:
    """The number of the equation that leaves a dimension out, where that is all that is done."""
    if len(users[part]) != 1:
        return None
    (number,) = users[part]
    is_squeeze = number < len(equations) and equations[number].primitive.name == "squeeze"
    if not is_squeeze or tuple(equations[number].params["dimensions"]) != (dimension,):
        return None
    return number
