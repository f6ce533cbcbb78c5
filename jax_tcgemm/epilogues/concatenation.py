"""Pattern match of results that concatenate or stack two arrays of the product's shape.

Kernels write the two arrays to their places in the concatenated result.
"""

import dataclasses
import functools
from collections.abc import Mapping

from jax.extend import core

from jax_tcgemm.epilogues.cuts import needed_equations
from jax_tcgemm.system.jax_internals import as_jaxpr, function_of


@dataclasses.dataclass(frozen=True)
class Concatenation:
    """Concatenation or stack of two arrays.

    Attributes:
      operands: the two arrays, of one type.
      dimension: the dimension of the result along which the arrays are concatenated or stacked.
      equations: the equations that concatenate, in order; the last one computes the result.
    """

    operands: tuple[core.Var, core.Var]
    dimension: int
    equations: tuple[core.JaxprEqn, ...]

    @property
    def result(self) -> core.Var:
        """The concatenated array."""
        return self.equations[-1].outvars[0]


def find_concatenation(
    eqn: core.JaxprEqn, made_by: Mapping[core.Var, core.JaxprEqn]
) -> Concatenation | None:
    """Match an equation that concatenates or stacks two arrays; None for any other equation.

    Args:
      eqn: the equation.
      made_by: for each variable, the equation that computes it.
    """
    name, operands = eqn.primitive.name, tuple(eqn.invars)
    if name not in _DIMENSION or len(operands) != 2 or operands[0] is operands[1]:
        return None
    dimension = eqn.params[_DIMENSION[name]]
    if any(isinstance(x, core.Literal) for x in operands) or operands[0].aval != operands[1].aval:
        return None
    before = [made_by.get(x) for x in operands] if name == "concatenate" else [None]
    if all(x is not None and _adds_unit(x, dimension) for x in before):
        return Concatenation(tuple(x.invars[0] for x in before), dimension, (*before, eqn))
    return Concatenation(operands, dimension, (eqn,))


# For each primitive, the parameter with the dimension.
_DIMENSION = {"concatenate": "dimension", "stack": "axis"}
_ADDING = frozenset({"broadcast_in_dim", "expand_dims", "reshape"})


def _adds_unit(eqn: core.JaxprEqn, dimension: int) -> bool:
    """Return whether an equation only adds a dimension of size 1."""
    if eqn.primitive.name not in _ADDING or len(eqn.invars) != 1:
        return False
    (x,), shape = eqn.invars, list(eqn.outvars[0].aval.shape)
    is_var, size = isinstance(x, core.Var), shape.pop(dimension)
    kept = tuple(dim for dim in range(len(shape) + 1) if dim != dimension)
    in_order = tuple(eqn.params.get("broadcast_dimensions", kept)) == kept
    return is_var and size == 1 and tuple(shape) == x.aval.shape and in_order


@functools.lru_cache(maxsize=1024)
def split_concatenated_results(
    function: core.ClosedJaxpr,
) -> tuple[core.ClosedJaxpr, tuple[int, ...], frozenset[int]]:
    """Return an epilogue with the two operands of each concatenated result as two results.

    Returns:
      The epilogue; the indices of the results that are second operands, which kernels write after
      the result before; the dimensions of all concatenations.
    """
    jaxpr = as_jaxpr(function)
    made_by = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    shape = jaxpr.invars[0].aval.shape
    results, second, dimensions = [], [], set()
    for x in jaxpr.outvars:
        eqn = None if isinstance(x, core.Literal) else made_by.get(x)
        concatenation = eqn and find_concatenation(eqn, made_by)
        if concatenation is None or concatenation.operands[0].aval.shape != shape:
            results.append(x)
            continue
        results += concatenation.operands
        second.append(len(results) - 1)
        dimensions.add(concatenation.dimension)
    if not second:
        return function, (), frozenset()
    split = function_of(jaxpr.invars, needed_equations(jaxpr.eqns, results), results)
    return split, tuple(second), frozenset(dimensions)
