"""Values of an epilogue that its call keeps for its derivative: those of the fewest bytes.

The tangent of an epilogue reads values that depend on the accumulators. Each of them is a further
result of the call, or is computed from such results and the operands when the tangent is. Which
ones are kept is a minimum cut of the epilogue's jaxpr whose cost is the bytes of an element. What
the call returns anyway costs nothing; of values of the same size the accumulators are kept.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm.epilogues.calls import written_out
from jax_tcgemm.epilogues.cuts import cheapest_cut, needed_equations, variables
from jax_tcgemm.primitives.rules import is_moving, jvp_of_moving
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import as_jaxpr, function_of, zero_tangent


def jvp(
    function: core.ClosedJaxpr,
    run: Callable,
    operands: Sequence,
    daccs: Sequence,
    doperands: Sequence,
    *,
    expand: Callable[[Sequence], Sequence] = lambda xs: xs,
    mask: Callable[[Sequence], Sequence] = lambda xs: xs,
):
    """Return the results of a product with an epilogue, and their tangents.

    Args:
      function: the epilogue, of the accumulators and of `expand(operands)`.
      run: runs the call with an epilogue in the place of `function`.
      operands: of the call.
      daccs: tangents of the accumulators, None where they are zero.
      doperands: tangents of the operands.
      expand: linear function from the operands, or Nones, to what `function` takes.
      mask: linear function from results of `function` to those of the call.
    """
    doperands = expand([t if is_moving(t) else None for t in doperands])
    moving = [*daccs, *doperands]
    found = _linearized(function, tuple(t is not None for t in moving), len(daccs))
    results = run(found.function)
    out = results[: len(function.out_avals)]
    if not any(found.moves):
        return out, [zero_tangent(x) for x in out]
    read = [results[number] for number in found.read]
    given = (t for t in moving if t is not None)
    tangents = core.jaxpr_as_fun(found.tangents)(*expand(operands), *read, *given)
    rest = iter(mask(tangents))
    return out, [
        partitioning.resharded(next(rest), jax.typeof(x).sharding) if moves else zero_tangent(x)
        for x, moves in zip(out, found.moves, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Linearized:
    """An epilogue, and its tangent as a function of values that it returns.

    Attributes:
      function: the epilogue, whose last results are the values that are kept for the tangent.
      read: the numbers of its results that the tangent reads.
      tangents: jaxpr of the operands, those results and the given tangents.
      moves: which results of the epilogue have a tangent other than zero.
    """

    function: core.ClosedJaxpr
    read: tuple[int, ...]
    tangents: core.ClosedJaxpr
    moves: tuple[bool, ...]


@functools.lru_cache(maxsize=1024)
def _linearized(
    function: core.ClosedJaxpr, moving: tuple[bool, ...], num_accumulators: int
) -> _Linearized:
    """Split the derivative of an epilogue of which these arguments have tangents."""
    if not any(moving):
        return _Linearized(function, (), function, (False,) * len(function.out_avals))
    closed, moves = _derivative(function, moving)
    jaxpr, num_arguments = as_jaxpr(closed), len(moving)
    arguments, given = jaxpr.invars[:num_arguments], jaxpr.invars[num_arguments:]
    accs, operands = arguments[:num_accumulators], arguments[num_accumulators:]
    results, tangents = jaxpr.outvars[: len(moves)], jaxpr.outvars[len(moves) :]
    of_tangents = _dependent(jaxpr.eqns, given)
    of_accs = _dependent(jaxpr.eqns, accs)
    # Kernels take no constants.
    beyond = of_tangents | _dependent(jaxpr.eqns, jaxpr.constvars)
    known = {
        number: variables(eqn.invars)
        for number, eqn in enumerate(jaxpr.eqns)
        if of_accs.intersection(eqn.outvars) and not of_tangents.intersection(eqn.outvars)
    }
    producer = {x: number for number in known for x in jaxpr.eqns[number].outvars}
    needed = needed_equations(jaxpr.eqns, tangents)
    reading = [eqn for eqn in needed if of_tangents.intersection(eqn.outvars)]
    wanted = variables(x for eqn in reading for x in eqn.invars) + variables(tangents)
    wanted = [x for x in wanted if x in of_accs and x not in of_tangents]
    # Whether a kernel may compute the results by the derivative's equations.
    can_replace = beyond.isdisjoint(variables(results))
    returned = set(variables(results)) if can_replace else set()

    def cost(x: core.Var) -> int:
        if x not in of_accs or x in returned:
            return 0
        is_storable = x not in beyond and x.aval.shape == accs[0].aval.shape
        is_storable &= jnp.issubdtype(x.aval.dtype, jnp.floating) and x.aval.dtype.itemsize > 1
        if x in accs or is_storable:
            return 16 * x.aval.dtype.itemsize + (x not in accs)
        return _NEVER

    read = [x for x in cheapest_cut(wanted, producer, known, cost).read if x in of_accs]
    kept = [x for x in read if x not in returned]
    before = needed_equations(jaxpr.eqns, [*results, *kept] if can_replace else kept)
    keeping = function
    if kept and can_replace:
        keeping = function_of(arguments, before, [*results, *kept])
    elif kept:
        keeping = _joined(function, function_of(arguments, before, kept))
    places = [*(results if can_replace else [None] * len(moves)), *kept]
    after = function_of(
        (*operands, *read, *given), needed_equations(jaxpr.eqns, tangents, set(read)), tangents
    )
    if closed.consts:
        own = after.jaxpr.replace(constvars=jaxpr.constvars)
        after = core.ClosedJaxpr(own, closed.consts)
    return _Linearized(keeping, tuple(map(places.index, read)), after, moves)


# The cost of a value that is not kept, above that of all that may be.
_NEVER = 1 << 20


def _derivative(function: core.ClosedJaxpr, moving: tuple[bool, ...]):
    """Return the flat jaxpr of results and their tangents, and which results have tangents."""
    types, moves = function.in_avals, ()

    def derivative(*arguments):
        nonlocal moves
        primals, given = arguments[: len(moving)], iter(arguments[len(moving) :])
        pairs = zip(moving, primals, strict=True)
        tangents = [next(given) if does_move else zero_tangent(x) for does_move, x in pairs]
        out, found = jvp_of_moving(core.jaxpr_as_fun(function), primals, tangents)
        moves = tuple(map(is_moving, found))
        return [*out, *(t for t in found if is_moving(t))]

    moved = [x for x, does_move in zip(types, moving, strict=True) if does_move]
    return written_out(jax.make_jaxpr(derivative)(*types, *moved)), moves


def _joined(function: core.ClosedJaxpr, other: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the function with the results of both, of the same arguments."""
    f, g = map(core.jaxpr_as_fun, (function, other))
    return jax.make_jaxpr(lambda *arguments: [*f(*arguments), *g(*arguments)])(*function.in_avals)


def _dependent(equations: Sequence[core.JaxprEqn], sources: Iterable[core.Var]) -> set[core.Var]:
    """Return the variables that depend on others, with those."""
    found = set(sources)
    for eqn in equations:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found
