"""Operations on a jaxpr's equations: inlining calls, removing unused ones, and sorting."""

import collections
import heapq
from collections.abc import Callable, Sequence

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType

from jax_tcgemm.epilogues.calls import called
from jax_tcgemm.system.jax_internals import as_jaxpr, has_ordered_effects, new_variable

IsMeant = Callable[[core.JaxprEqn], bool]


def written_out(equations, results, is_meant: IsMeant) -> tuple[list[core.JaxprEqn], list]:
    """Inline the calls for which `is_meant`; return the equations and the results."""
    known: dict = {}
    written: list[core.JaxprEqn] = []
    for eqn in equations:
        eqn = renamed(eqn, known)
        if is_meant(eqn):
            write(as_jaxpr(called(eqn)), eqn.invars, eqn.outvars, known, written, is_meant)
        else:
            written.append(eqn)
    return written, [found_as(x, known) for x in results]


def found_as(atom, known):
    """Return the replacement of a variable in `known`; the variable itself without one."""
    return atom if isinstance(atom, core.Literal) else known.get(atom, atom)


def renamed(eqn: core.JaxprEqn, known) -> core.JaxprEqn:
    """Return an equation with the replacements of its inputs in `known`."""
    for x in eqn.invars if known else ():
        if found_as(x, known) is not x:
            return eqn.replace(invars=[found_as(x, known) for x in eqn.invars])
    return eqn


def write(
    jaxpr: core.Jaxpr, operands, results, known: dict, written: list, is_meant: IsMeant
) -> None:
    """Append a function's equations to `written` with new variables; add results to `known`."""
    replaced = dict(zip(jaxpr.invars, operands, strict=True))
    for inner in jaxpr.eqns:
        inner = inner.replace(invars=[found_as(x, replaced) for x in inner.invars])
        made = [new_variable(x) for x in inner.outvars]
        replaced |= zip(inner.outvars, made, strict=True)
        inner = inner.replace(outvars=made)
        if is_meant(inner):
            new: dict = {}
            write(as_jaxpr(called(inner)), inner.invars, inner.outvars, new, written, is_meant)
            replaced |= {
                x: new.get(y, y) for x, y in replaced.items() if not isinstance(y, core.Literal)
            }
        else:
            written.append(inner)
    known |= {x: found_as(y, replaced) for x, y in zip(results, jaxpr.outvars, strict=True)}


def without_unused(equations: Sequence[core.JaxprEqn], results) -> list[core.JaxprEqn]:
    """Return the equations that the results or effects need."""
    used = {x for x in results if not isinstance(x, core.Literal)}
    kept = []
    for eqn in reversed(equations):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(x for x in eqn.invars if not isinstance(x, core.Literal))
            kept.append(eqn)
    return kept[::-1]


def in_order(equations: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Sort equations topologically; keep the given order where possible, always for effects.

    Raises:
      ValueError: where equations depend on each other in a cycle.
    """
    made_by = {x: number for number, eqn in enumerate(equations) for x in eqn.outvars}
    before = None  # number of the previous equation with ordered effects
    placed = [False] * len(equations)
    missing: dict[int, int] = {}  # number of unplaced dependencies of each waiting equation
    waiting: dict[int, list[int]] = collections.defaultdict(list)  # equations waiting for each one
    found = []
    for number, eqn in enumerate(equations):
        needs = [made_by[x] for x in eqn.invars if not isinstance(x, core.Literal) and x in made_by]
        if has_ordered_effects(eqn):
            needs += [] if before is None else [before]
            before = number
        needs = {other for other in needs if not placed[other]}
        if needs:
            missing[number] = len(needs)
            for other in needs:
                waiting[other].append(number)
            continue
        ready = [number]
        while ready:
            own = heapq.heappop(ready)
            placed[own] = True
            found.append(equations[own])
            for other in waiting.pop(own, ()):
                missing[other] -= 1
                if missing[other] == 0:
                    heapq.heappush(ready, other)
    if len(found) != len(equations):
        raise ValueError("equations must not need each other in a circle")
    return found


def is_manual(mesh: AbstractMesh) -> bool:
    """Return whether all axes of a mesh are manual, as in a shard_map, or it has no axes."""
    return all(kind == AxisType.Manual for kind in mesh.axis_types or ())


def traced(
    function: Callable, types: Sequence, mesh: AbstractMesh, *, varies: bool
) -> core.ClosedJaxpr:
    """Trace a function to a jaxpr.

    Args:
      function: function of arrays.
      types: types of the arrays.
      mesh: mesh of the types; if it has axes, all are manual axes of a shard_map.
      varies: whether the types say over which axes they vary.
    """
    if not mesh.axis_names or mesh == jax.sharding.get_abstract_mesh():
        return jax.make_jaxpr(function)(*types)
    found = []

    def inside():
        found.append(jax.make_jaxpr(function)(*types))
        return ()

    outside = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    with jax.sharding.use_abstract_mesh(outside):
        own = jax.shard_map(inside, mesh=outside, in_specs=(), out_specs=(), check_vma=varies)
        jax.eval_shape(own)
    return found[0]
