"""Arrays that a program puts side by side, as products can have them for results.

JAX differentiates slices that take an array apart as a sum of arrays that are padded, which becomes
their concatenation; and sums over rows of two arrays together become those of each.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.joins import find_join
from jax_tcgemm.system.jax_internals import as_jaxpr, has_plain_context, with_context_of


def with_joins(equations: Sequence[core.JaxprEqn], results) -> Sequence[core.JaxprEqn]:
    """The equations of a program with such arrays as concatenations, and sums of their parts."""
    made_by: dict[core.Var, core.JaxprEqn] = {}
    found: list[core.JaxprEqn] = []
    for eqn in equations:
        new = [eqn]
        if has_plain_context(eqn) and all(x.aval.sharding.mesh.empty for x in eqn.outvars[:1]):
            new = _concatenation(eqn, made_by) or _sums_of_parts(eqn, made_by) or new
        for x in new:
            made_by |= dict.fromkeys(x.outvars, x)
        found += new
    used = {x for eqn in found for x in eqn.invars if not isinstance(x, core.Literal)}
    used.update(x for x in results if not isinstance(x, core.Literal))
    return [eqn for eqn in found if not _is_padding(eqn) or eqn.outvars[0] in used]


def _concatenation(eqn: core.JaxprEqn, made_by) -> list[core.JaxprEqn] | None:
    """A sum of two arrays of which each is padded where the other is not."""
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
    parts = [pad.invars[0] for pad in pads]
    extents = [x.aval.shape[dim] for x in parts]
    before = [extents[0] if axis == dim else 0 for axis in range(len(low))]
    if list(other_low) != before or high[dim] != extents[1]:
        return None
    return _written(lambda *x: [lax.concatenate(x, dim)], parts, eqn)


def _is_padding(eqn: core.JaxprEqn | None) -> bool:
    """Whether an equation puts zeros before or after an array."""
    if eqn is None or eqn.primitive.name != "pad" or not has_plain_context(eqn):
        return False
    array, value = eqn.invars
    is_zero = isinstance(value, core.Literal) and np.asarray(value.val) == 0
    widths = eqn.params["padding_config"]
    only_adds = all(low >= 0 and high >= 0 and inner == 0 for low, high, inner in widths)
    return bool(is_zero) and only_adds and isinstance(array, core.Var)


def _widths(eqn: core.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many zeros come before and after, along each dimension."""
    low, high, _ = zip(*eqn.params["padding_config"], strict=True)
    return low, high


def _sums_of_parts(eqn: core.JaxprEqn, made_by) -> list[core.JaxprEqn] | None:
    """A sum over dimensions of two arrays together but that along which they are."""
    if eqn.primitive.name != "reduce_sum" or isinstance(eqn.invars[0], core.Literal):
        return None
    made = made_by.get(eqn.invars[0])
    join = None if made is None else find_join(made, made_by)
    if join is None or join.dimension in eqn.params["axes"]:
        return None
    axes, dim = eqn.params["axes"], join.dimension
    is_new = join.parts[0].aval.ndim < eqn.invars[0].aval.ndim
    own = tuple(axis - (is_new and axis > dim) for axis in axes)
    put_together = jnp.stack if is_new else lax.concatenate
    place = dim - sum(axis < dim for axis in axes)

    def sums(*parts):
        found = [eqn.primitive.bind(x, **eqn.params | {"axes": own}) for x in parts]
        return [put_together(found, place)]

    return _written(sums, join.parts, eqn)


def _written(function: Callable, operands, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
    """The equations of a function of variables, which gives what an equation does."""
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
