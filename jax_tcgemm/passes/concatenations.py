"""Rewrite pass for concatenations, which calls of products can have as results.

JAX's derivative of slices is a sum of padded arrays; the pass replaces it by a concatenation. A
reduction of a concatenation becomes a concatenation of reductions, which calls can compute.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.concatenation import find_concatenation
from jax_tcgemm.system.jax_internals import as_jaxpr, has_plain_context, with_context_of


def with_concatenations(equations: Sequence[core.JaxprEqn], results) -> Sequence[core.JaxprEqn]:
    """Return the equations of a program with both patterns replaced."""
    made_by: dict[core.Var, core.JaxprEqn] = {}
    found: list[core.JaxprEqn] = []
    for eqn in equations:
        new = [eqn]
        if has_plain_context(eqn) and all(x.aval.sharding.mesh.empty for x in eqn.outvars[:1]):
            new = _concatenation(eqn, made_by) or _separate_sums(eqn, made_by) or new
        for x in new:
            made_by |= dict.fromkeys(x.outvars, x)
        found += new
    used = {x for eqn in found for x in eqn.invars if not isinstance(x, core.Literal)}
    used.update(x for x in results if not isinstance(x, core.Literal))
    return [eqn for eqn in found if not _is_padding(eqn) or eqn.outvars[0] in used]


def _concatenation(eqn: core.JaxprEqn, made_by) -> list[core.JaxprEqn] | None:
    """Return the concatenation that equals a sum of two padded arrays; None for other equations."""
    if eqn.primitive.name not in ("add", "add_any"):
        return None
    pads = [None if isinstance(x, core.Literal) else made_by.get(x) for x in eqn.invars]
    if not all(map(_is_padding, pads)):
        return None
    pads.sort(key=lambda pad: _widths(pad)[0])
    (low, high), (other_low, other_high) = map(_widths, pads)
    dimensions = [dim for dim, width in enumerate(high) if width]
    if len(dimensions) != 1 or any(low) or any(other_high):
        return None
    (dim,) = dimensions
    operands = [pad.invars[0] for pad in pads]
    sizes = [x.aval.shape[dim] for x in operands]
    before = [sizes[0] if axis == dim else 0 for axis in range(len(low))]
    if list(other_low) != before or high[dim] != sizes[1]:
        return None
    return _traced(lambda *x: [lax.concatenate(x, dim)], operands, eqn)


def _is_padding(eqn: core.JaxprEqn | None) -> bool:
    """Return whether an equation pads an array with zeros at its ends."""
    if eqn is None or eqn.primitive.name != "pad" or not has_plain_context(eqn):
        return False
    array, value = eqn.invars
    is_zero = isinstance(value, core.Literal) and np.asarray(value.val) == 0
    widths = eqn.params["padding_config"]
    only_adds = all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in widths)
    return bool(is_zero) and only_adds and isinstance(array, core.Var)


def _widths(eqn: core.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of zeros before and after an array, for each dimension."""
    low, high, _ = zip(*eqn.params["padding_config"], strict=True)
    return low, high


def _separate_sums(eqn: core.JaxprEqn, made_by) -> list[core.JaxprEqn] | None:
    """Return the sums of a concatenation's operands, concatenated; None for other equations.

    The sum must keep the dimension of the concatenation.
    """
    if eqn.primitive.name != "reduce_sum" or isinstance(eqn.invars[0], core.Literal):
        return None
    made = made_by.get(eqn.invars[0])
    found = None if made is None else find_concatenation(made, made_by)
    if found is None or found.dimension in eqn.params["axes"]:
        return None
    axes, dim = eqn.params["axes"], found.dimension
    is_stack = found.operands[0].aval.ndim < eqn.invars[0].aval.ndim
    operand_axes = tuple(axis - (is_stack and axis > dim) for axis in axes)
    concatenate = jnp.stack if is_stack else lax.concatenate
    result_dim = dim - sum(axis < dim for axis in axes)

    def concatenated_sums(*operands):
        sums = [eqn.primitive.bind(x, **eqn.params | {"axes": operand_axes}) for x in operands]
        return [concatenate(sums, result_dim)]

    return _traced(concatenated_sums, found.operands, eqn)


def _traced(function: Callable, operands, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """Return the equations of a function of variables that computes the results of `eqn`."""
    jaxpr = as_jaxpr(jax.make_jaxpr(function)(*(x.aval for x in operands)))
    names = dict(zip((*jaxpr.invars, *jaxpr.outvars), (*operands, *eqn.outvars), strict=True))

    def named(atoms):
        return [x if isinstance(x, core.Literal) else names.get(x, x) for x in atoms]

    return [
        with_context_of(x, eqn).replace(
            invars=named(x.invars), outvars=named(x.outvars), source_info=eqn.source_info
        )
        for x in jaxpr.eqns
    ]
