"""Inlining of calls in a jaxpr."""

from collections.abc import Callable

import jax
from jax.extend import core

from jax_tcgemm.epilogues.code.primitives import CALLED, CALLS
from jax_tcgemm.system.jax_internals import as_jaxpr, bound


def written_out(
    function: core.ClosedJaxpr, is_meant: Callable[[core.JaxprEqn], bool] | None = None
) -> core.ClosedJaxpr:
    """Return a function with its calls inlined.

    Args:
      function: the function. Arrays that its calls close over become constants of the result.
      is_meant: predicate of the calls to inline; None inlines all.
    """

    def run(jaxpr, constants, arguments):
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= zip(jaxpr.constvars, constants, strict=True)

        def find(atom):
            return atom.val if isinstance(atom, core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            operands = [find(x) for x in eqn.invars]
            inner = called(eqn)
            if inner is not None and (is_meant is None or is_meant(eqn)):
                results = run(as_jaxpr(inner), getattr(inner, "consts", ()), operands)
            else:
                results = bound(eqn, eqn.params, operands)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [find(x) for x in jaxpr.outvars]

    def flat(*arguments):
        return run(function.jaxpr, function.consts, arguments)

    return jax.make_jaxpr(flat)(*function.in_avals)


def called(eqn: core.JaxprEqn) -> core.ClosedJaxpr | core.Jaxpr | None:
    """Return the function that an equation calls; None if it is not a call."""
    if eqn.primitive.name not in CALLS:
        return None
    return next(eqn.params[key] for key in CALLED if key in eqn.params)


def closes_over_arrays(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation calls a jitted function that closes over arrays, at any depth."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    inner = called(eqn)
    return bool(inner.consts) or any(map(closes_over_arrays, inner.jaxpr.eqns))
