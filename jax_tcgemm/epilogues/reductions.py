"""Functions that reduce some of their results, as an elementwise one and what reduces results."""

import functools

from jax.extend import core

from jax_tcgemm.epilogues.cuts import variables
from jax_tcgemm.epilogues.parts import REDUCTIONS
from jax_tcgemm.system.jax_internals import as_jaxpr, function_of


@functools.lru_cache(maxsize=1024)
def reductions_apart(
    function: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, core.ClosedJaxpr] | None:
    """A function that reduces nothing, and one of its results that gives those of `function`.

    None where it reduces nothing, or something that is not a result, nor made of these alone.
    """
    jaxpr = as_jaxpr(function)
    results, late, following = set(variables(jaxpr.outvars)), set(), []
    for eqn in jaxpr.eqns:
        read = set(variables(eqn.invars))
        is_of_results = read and read <= results and not results.intersection(eqn.outvars)
        if eqn.primitive.name in REDUCTIONS or late & read or is_of_results:
            late.update(eqn.outvars)
            following.append(eqn)
    needed = variables(jaxpr.outvars) + [x for eqn in following for x in variables(eqn.invars)]
    between = tuple(dict.fromkeys(x for x in needed if x not in late))
    reduces = any(eqn.primitive.name in REDUCTIONS for eqn in following)
    if not (reduces and between and results.issuperset(between)) or {*between} & {*jaxpr.invars}:
        return None
    first = [eqn for eqn in jaxpr.eqns if not any(x in late for x in eqn.outvars)]
    before = function_of(jaxpr.invars, first, between)
    return before, function_of(between, following, jaxpr.outvars)
