"""Rewrite pass that merges transpositions of operands and results into the layouts of products."""

from collections.abc import Sequence

from jax.extend import core
from jax.extend.core.primitives import transpose_p

from jax_tcgemm.primitives.transposes import Reading, read_through, through
from jax_tcgemm.system.jax_internals import has_plain_context


def transposed_operands(eqn: core.JaxprEqn, made_by, reading: Reading) -> core.JaxprEqn:
    """Return a product that reads the operands of transpositions, if its layout allows.

    `made_by` has the equation that computes each variable; `reading` has the position of the layout
    among the primitive's parameters.
    """
    if (layout := reading.layout_of(eqn.params)) is None:
        return eqn

    def order_of(x):
        made = None if isinstance(x, core.Literal) else made_by.get(x)
        if made is None or not is_transposition(made):
            return None
        return made.invars[0], tuple(int(axis) for axis in made.params["permutation"])

    ndims = [x.aval.ndim for x in eqn.invars[:2]]
    invars, changed = read_through(eqn.invars, layout, order_of, ndims)
    if changed is layout:
        return eqn
    return eqn.replace(invars=invars, params=reading.with_layout(eqn.params, changed))


def is_transposition(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a transposition."""
    return eqn.primitive is transpose_p and has_plain_context(eqn)


def reading(eqn: core.JaxprEqn, side: int, x: core.Var, order: Sequence[int]) -> core.JaxprEqn:
    """Return a product that reads `x`, of which its operand is the transposition by `order`."""
    keys = "dimension_numbers", "permutation"
    ndims = [x.aval.ndim for x in eqn.invars[:2]]
    changed = through(*(eqn.params[key] for key in keys), ndims, side, order)
    invars = list(eqn.invars)
    invars[side] = x
    return eqn.replace(invars=invars, params=eqn.params | dict(zip(keys, changed, strict=True)))


def transposed_result(eqn: core.JaxprEqn, users, gone: set) -> core.JaxprEqn:
    """Return a product that includes the transposition of its result, if that alone reads it."""
    while eqn.params["out_sharding"] is None:
        if (following := users.get(eqn.outvars[0])) is None:
            break
        before = eqn.params["permutation"]
        order = tuple(before[axis] for axis in following.params["permutation"])
        gone.add(id(following))
        eqn = eqn.replace(outvars=following.outvars, params=eqn.params | {"permutation": order})
    return eqn


def without_unused_transpositions(equations, results) -> list[core.JaxprEqn]:
    """Return the equations without transpositions whose results are unused."""
    used = {x for x in results if not isinstance(x, core.Literal)}
    kept = []
    for eqn in reversed(equations):
        if is_transposition(eqn) and eqn.outvars[0] not in used:
            continue
        used.update(x for x in eqn.invars if not isinstance(x, core.Literal))
        kept.append(eqn)
    return kept[::-1]
