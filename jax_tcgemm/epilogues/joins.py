"""Two arrays of a product's shape in one, the second after the first: kernels write them there."""

import dataclasses
import functools
from collections.abc import Mapping

from jax.extend import core

from jax_tcgemm.epilogues.cuts import needed_equations
from jax_tcgemm.system.jax_internals import as_jaxpr, function_of


@dataclasses.dataclass(frozen=True)
class Join:
    """How two arrays are put together.

    Attributes:
      parts: the two, of one type.
      dimension: that along which, or before which, they are.
      equations: those that do so, in order; the last one gives the array of both.
    """

    parts: tuple[core.Var, core.Var]
    dimension: int
    equations: tuple[core.JaxprEqn, ...]


def find_join(eqn: core.JaxprEqn, made_by: Mapping[core.Var, core.JaxprEqn]) -> Join | None:
    """How an equation puts two arrays together; None where it does something else.

    Args:
      eqn: the equation.
      made_by: of variables that it may read, the equations.
    """
    name, parts = eqn.primitive.name, tuple(eqn.invars)
    if name not in _DIMENSION or len(parts) != 2 or parts[0] is parts[1]:
        return None
    dimension = eqn.params[_DIMENSION[name]]
    if any(isinstance(x, core.Literal) for x in parts) or parts[0].aval != parts[1].aval:
        return None
    before = [made_by.get(x) for x in parts] if name == "concatenate" else [None]
    if all(x is not None and _adds_unit(x, dimension) for x in before):
        return Join(tuple(x.invars[0] for x in before), dimension, (*before, eqn))
    return Join(parts, dimension, (eqn,))


# The parameter that says where.
_DIMENSION = {"concatenate": "dimension", "stack": "axis"}
_ADDING = frozenset({"broadcast_in_dim", "expand_dims", "reshape"})


def _adds_unit(eqn: core.JaxprEqn, dimension: int) -> bool:
    """Whether all that an equation does is to add a dimension of extent 1."""
    if eqn.primitive.name not in _ADDING or len(eqn.invars) != 1:
        return False
    (x,), shape = eqn.invars, list(eqn.outvars[0].aval.shape)
    is_var, extent = isinstance(x, core.Var), shape.pop(dimension)
    kept = tuple(dim for dim in range(len(shape) + 1) if dim != dimension)
    in_order = tuple(eqn.params.get("broadcast_dimensions", kept)) == kept
    return is_var and extent == 1 and tuple(shape) == x.aval.shape and in_order


@functools.lru_cache(maxsize=1024)
def results_apart(
    function: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, tuple[int, ...], frozenset[int]]:
    """A function of a product with results of two arrays of its shape as two results each.

    Returns:
      The function; the numbers of its results that lie after the one before them in one array; the
      dimensions along which, or before which, they do.
    """
    jaxpr = as_jaxpr(function)
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    shape = jaxpr.invars[0].aval.shape
    results, beside, dimensions = [], [], set()
    for x in jaxpr.outvars:
        eqn = None if isinstance(x, core.Literal) else made_by.get(x)
        join = eqn and find_join(eqn, made_by)
        if join is None or join.parts[0].aval.shape != shape:
            results.append(x)
            continue
        results += join.parts
        beside.append(len(results) - 1)
        dimensions.add(join.dimension)
    if not beside:
        return function, (), frozenset()
    apart = function_of(jaxpr.invars, needed_equations(jaxpr.eqns, results), results)
    return apart, tuple(beside), frozenset(dimensions)
