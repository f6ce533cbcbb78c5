"""Transpositions beside products, which become a part of these: of operands and of results."""

from collections.abc import Sequence

from jax.extend import core
from jax.extend.core.primitives import transpose_p

from jax_tcgemm.system.jax_internals import has_plain_context


def transposed_operands(eqn: core.JaxprEqn, made_by) -> core.JaxprEqn:
    """A product that reads operands as they are before they are transposed."""
    if eqn.params["out_sharding"] is not None:
        return eqn
    for side in (0, 1):
        while (made := made_by.get(eqn.invars[side])) is not None and is_transposition(made):
            order = [int(axis) for axis in made.params["permutation"]]
            eqn = reading(eqn, side, made.invars[0], order)
    return eqn


def is_transposition(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is one."""
    return eqn.primitive is transpose_p and has_plain_context(eqn)


def reading(eqn: core.JaxprEqn, side: int, x: core.Var, order: Sequence[int]) -> core.JaxprEqn:
    """A product that reads what its operand is a transposition of, in this order."""
    contract, batch = (list(pair) for pair in eqn.params["dimension_numbers"])
    before = _free_axes(eqn, side)
    contract[side] = tuple(order[axis] for axis in contract[side])
    batch[side] = tuple(order[axis] for axis in batch[side])
    invars = list(eqn.invars)
    invars[side] = x
    # The free dimensions come in the order of the operand's axes.
    moved = sorted(order[axis] for axis in before)
    first = len(batch[0]) + (len(_free_axes(eqn, 0)) if side else 0)
    place = {first + i: first + moved.index(order[axis]) for i, axis in enumerate(before)}
    permutation = tuple(place.get(axis, axis) for axis in eqn.params["permutation"])
    params = {"dimension_numbers": (tuple(contract), tuple(batch)), "permutation": permutation}
    return eqn.replace(invars=invars, params=eqn.params | params)


def _free_axes(eqn: core.JaxprEqn, side: int) -> list[int]:
    contract, batch = eqn.params["dimension_numbers"]
    taken = {*contract[side], *batch[side]}
    return [axis for axis in range(eqn.invars[side].aval.ndim) if axis not in taken]


def transposed_result(eqn: core.JaxprEqn, users, gone: set) -> core.JaxprEqn:
    """A product with the transposition of its result, where nothing else reads that."""
    while eqn.params["out_sharding"] is None:
        if (following := users.get(eqn.outvars[0])) is None:
            break
        before = eqn.params["permutation"]
        order = tuple(before[axis] for axis in following.params["permutation"])
        gone.add(id(following))
        eqn = eqn.replace(outvars=following.outvars, params=eqn.params | {"permutation": order})
    return eqn


def without_unused_transpositions(equations, results) -> list[core.JaxprEqn]:
    """The equations but transpositions that nothing reads."""
    used = {x for x in results if not isinstance(x, core.Literal)}
    kept = []
    for eqn in reversed(equations):
        if is_transposition(eqn) and eqn.outvars[0] not in used:
            continue
        used.update(x for x in eqn.invars if not isinstance(x, core.Literal))
        kept.append(eqn)
    return kept[::-1]
