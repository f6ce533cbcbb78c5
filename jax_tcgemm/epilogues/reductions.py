"""Functions that reduce some of their results, as an elementwise one and what reduces results."""

import functools

import jax
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.cuts import variables
from jax_tcgemm.epilogues.joins import find_join
from jax_tcgemm.epilogues.parts import REDUCTIONS
from jax_tcgemm.system.jax_internals import as_jaxpr, function_of


@functools.lru_cache(maxsize=1024)
def reductions_apart(
    function: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, core.ClosedJaxpr] | None:
    """A function that reduces nothing, and one of its results that gives those of `function`.

    None where it reduces nothing, or something that is not a result or one of two arrays that a
    result joins, nor made of these alone.
    """
    jaxpr = as_jaxpr(function)
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    joins = {x: find_join(made_by[x], made_by) for x in variables(jaxpr.outvars) if x in made_by}
    joins = {x: join for x, join in joins.items() if join is not None}
    halves = {part: (x, i) for x, join in joins.items() for i, part in enumerate(join.parts)}
    joining = [eqn for join in joins.values() for eqn in join.equations]
    results, late, following = {*variables(jaxpr.outvars), *halves}, set(), []
    for eqn in jaxpr.eqns:
        read = set(variables(eqn.invars))
        is_of_results = bool(read) and read <= results and results.isdisjoint(eqn.outvars)
        is_of_results &= not any(eqn is own for own in joining)
        if eqn.primitive.name in REDUCTIONS or late & read or is_of_results:
            late.update(eqn.outvars)
            following.append(eqn)
    needed = variables(jaxpr.outvars) + [x for eqn in following for x in variables(eqn.invars)]
    read = tuple(dict.fromkeys(x for x in needed if x not in late))
    reduces = any(eqn.primitive.name in REDUCTIONS for eqn in following)
    if not (reduces and read and results.issuperset(read)) or {*read} & {*jaxpr.invars}:
        return None
    outs = {*variables(jaxpr.outvars)}
    between = tuple(dict.fromkeys(x if x in outs else halves[x][0] for x in read))
    first = [eqn for eqn in jaxpr.eqns if not any(x in late for x in eqn.outvars)]
    before = function_of(jaxpr.invars, first, between)
    after = core.jaxpr_as_fun(function_of(read, following, jaxpr.outvars))

    def of_results(*arrays):
        known = dict(zip(between, arrays, strict=True))
        for x in read:
            if x not in known:
                joined, number = halves[x]
                known[x] = _half(known[joined], number, joins[joined].dimension, x.aval.ndim)
        return after(*(known[x] for x in read))

    return before, jax.make_jaxpr(of_results)(*before.out_avals)


def _half(joined: jax.Array, number: int, dimension: int, ndim: int) -> jax.Array:
    """One of the two arrays that are along, or before, a dimension."""
    if joined.ndim > ndim:
        return lax.index_in_dim(joined, number, dimension, keepdims=False)
    size = joined.shape[dimension] // 2
    return lax.slice_in_dim(joined, number * size, (number + 1) * size, axis=dimension)
