"""Pattern match of stacked products that are split into gate and up."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from jax.extend import core

# The most elementwise equations between a product and its split.
_MOST_BETWEEN = 16


@dataclasses.dataclass(frozen=True)
class GateUp:
    """Split of a stacked product into gate and up.

    Attributes:
      product: the product.
      dimension: the dimension that is split.
      is_dropped: whether gate and up, of size 1 along the dimension, lack it.
      outputs: gate and up, that is, the first and the second output of the split.
      chain: numbers of a chain of elementwise equations from the product to the split.
      splitting: numbers of the equations that split the result of the chain.
      is_interleaved: whether gate and up are interleaved, with the gate at even indices.
    """

    product: core.Var
    dimension: int
    is_dropped: bool
    outputs: tuple[core.Var, core.Var]
    chain: tuple[int, ...]
    splitting: tuple[int, ...]
    is_interleaved: bool = False


def find_gate_up(
    product: core.Var,
    equations: Sequence[core.JaxprEqn],
    users: Mapping[core.Var, Collection[int]],
    can_fuse: Callable[[int], bool],
) -> GateUp | None:
    """Find gate and up of a product that is read only by its split; None without such a split.

    Args:
      product: the product.
      equations: the equations of the program.
      users: for each variable, the units that read it, such as numbers of equations.
      can_fuse: whether the equation with a number has no group yet and is an elementwise primitive
        of the product's shape.
    """
    x, chain = product, []
    while len(users[x]) == 1 and len(chain) < _MOST_BETWEEN:
        (number,) = users[x]
        if not can_fuse(number) or len(equations[number].outvars) != 1:
            break
        chain.append(number)
        (x,) = equations[number].outvars
    splitting = sorted(users[x])
    if not splitting or splitting[-1] >= len(equations):
        return None
    found = _match_split(x, [equations[number] for number in splitting])
    if found is None:
        return None
    dimension, outputs, is_dropped, is_interleaved = found
    if not is_dropped and outputs[0].aval.shape[dimension] == 1:
        squeezing = [_find_squeeze(x, dimension, equations, users) for x in outputs]
        if None in squeezing:
            return None
        splitting += squeezing
        outputs = [equations[number].outvars[0] for number in squeezing]
        is_dropped = True
    numbers = tuple(chain), tuple(splitting)
    return GateUp(product, dimension, is_dropped, tuple(outputs), *numbers, is_interleaved)


def splits_gate_up(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation alone splits its operand into two arrays of equal size."""
    return len(eqn.invars) == 1 and _match_split(eqn.invars[0], [eqn]) is not None


def _match_split(x, splitting: Sequence[core.JaxprEqn]):
    """Match equations that split `x` into two arrays of equal size.

    Returns:
      The dimension; the two arrays; whether these lack the dimension; whether they are interleaved.
      None if the equations do anything else.
    """
    names = [eqn.primitive.name for eqn in splitting]
    if names == ["split"]:
        (eqn,) = splitting
        axis, sizes = eqn.params["axis"], eqn.params["sizes"]
        is_even = len(sizes) == 2 and sizes[0] == sizes[1]
        return (axis, eqn.outvars, False, False) if is_even else None
    if names == ["unstack"]:
        (eqn,) = splitting
        return (eqn.params["axis"], eqn.outvars, True, False) if len(eqn.outvars) == 2 else None
    if names != ["slice", "slice"]:
        return None
    shape = x.aval.shape
    gate, up = sorted(splitting, key=lambda eqn: tuple(eqn.params["start_indices"]))
    starts, limits = ([eqn.params[key] for eqn in (gate, up)] for key in _BOUNDS)
    differing = [dim for dim in range(len(shape)) if starts[0][dim] != starts[1][dim]]
    if len(differing) != 1:
        return None
    (dim,) = differing
    size = shape[dim] // 2
    strides = [tuple(eqn.params["strides"] or (1,) * len(shape)) for eqn in (gate, up)]
    is_interleaved = size > 1 and strides[0][dim] == 2
    step = [2 if is_interleaved and axis == dim else 1 for axis in range(len(shape))]
    gate_limits, up_starts = list(shape), [0] * len(shape)
    up_starts[dim] = 1 if is_interleaved else size
    if not is_interleaved:
        gate_limits[dim] = size
    # The limit of an interleaved gate may include the last index of up or exclude it.
    ends = {tuple(gate_limits)}
    if is_interleaved:
        gate_limits[dim] -= 1
        ends.add(tuple(gate_limits))
    is_even = (
        2 * size == shape[dim]
        and strides == [tuple(step)] * 2
        and tuple(starts[0]) == (0,) * len(shape)
        and tuple(starts[1]) == tuple(up_starts)
        and tuple(limits[0]) in ends
        and tuple(limits[1]) == tuple(shape)
    )
    outputs = gate.outvars[0], up.outvars[0]
    return (dim, outputs, False, is_interleaved) if is_even else None


_BOUNDS = ("start_indices", "limit_indices")


def _find_squeeze(output, dimension: int, equations, users) -> int | None:
    """Return the number of the only equation that reads `output`, if it squeezes the dimension."""
    if len(users[output]) != 1:
        return None
    (number,) = users[output]
    is_squeeze = number < len(equations) and equations[number].primitive.name == "squeeze"
    if not is_squeeze or tuple(equations[number].params["dimensions"]) != (dimension,):
        return None
    return number
