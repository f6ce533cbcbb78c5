"""Split of epilogues that reduce results into an elementwise function and the reductions."""

import functools

import jax
from jax import lax
from jax.extend import core

from jax_tcgemm.epilogues.concatenation import find_concatenation
from jax_tcgemm.epilogues.cuts import variables
from jax_tcgemm.epilogues.shard_function import REDUCTIONS
from jax_tcgemm.system.jax_internals import as_jaxpr, function_of


@functools.lru_cache(maxsize=1024)
def split_off_reductions(
    function: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, core.ClosedJaxpr] | None:
    """Split an epilogue into an elementwise function and the reductions of that function's results.

    Returns:
      The elementwise function, and a function of its results that returns the epilogue's results.
      None if the epilogue reduces nothing, or if a reduction needs values other than results and
      operands of concatenated results.
    """
    jaxpr = as_jaxpr(function)
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    outs = variables(jaxpr.outvars)
    found = [find_concatenation(made_by[x], made_by) for x in outs if x in made_by]
    concatenations = {x.result: x for x in found if x is not None}
    # For each operand of a concatenated result, the result and the operand's index.
    concatenated = {y: (x.result, i) for x in found if x for i, y in enumerate(x.operands)}
    concatenating = [eqn for x in concatenations.values() for eqn in x.equations]
    results, late, following = {*outs, *concatenated}, set(), []
    for eqn in jaxpr.eqns:
        read = set(variables(eqn.invars))
        is_of_results = bool(read) and read <= results and results.isdisjoint(eqn.outvars)
        is_of_results &= not any(eqn is x for x in concatenating)
        if eqn.primitive.name in REDUCTIONS or late & read or is_of_results:
            late.update(eqn.outvars)
            following.append(eqn)
    needed = outs + [x for eqn in following for x in variables(eqn.invars)]
    read = tuple(dict.fromkeys(x for x in needed if x not in late))
    reduces = any(eqn.primitive.name in REDUCTIONS for eqn in following)
    if not (reduces and read and results.issuperset(read)) or {*read} & {*jaxpr.invars}:
        return None
    between = tuple(dict.fromkeys(x if x in outs else concatenated[x][0] for x in read))
    first = [eqn for eqn in jaxpr.eqns if not any(x in late for x in eqn.outvars)]
    before = function_of(jaxpr.invars, first, between)
    after = core.jaxpr_as_fun(function_of(read, following, jaxpr.outvars))

    def of_results(*arrays):
        known = dict(zip(between, arrays, strict=True))
        for x in read:
            if x not in known:
                whole, index = concatenated[x]
                dimension = concatenations[whole].dimension
                known[x] = _operand(known[whole], index, dimension, x.aval.ndim)
        return after(*(known[x] for x in read))

    return before, jax.make_jaxpr(of_results)(*before.out_avals)


def _operand(concatenated: jax.Array, index: int, dimension: int, ndim: int) -> jax.Array:
    """Return one of two arrays of `ndim` dimensions that are concatenated or stacked."""
    if concatenated.ndim > ndim:
        return lax.index_in_dim(concatenated, index, dimension, keepdims=False)
    size = concatenated.shape[dimension] // 2
    return lax.slice_in_dim(concatenated, index * size, (index + 1) * size, axis=dimension)
