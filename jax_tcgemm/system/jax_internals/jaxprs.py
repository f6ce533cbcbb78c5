"""Jaxprs, their equations and their variables."""

import copy
import functools
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_tcgemm.system.jax_internals.find import find_name


def as_jaxpr(x) -> core.Jaxpr | None:
    """The jaxpr that a parameter of an equation is, closed or not; None if it is something else."""
    x = getattr(x, "jaxpr", x)
    return x if isinstance(x, core.Jaxpr) else None


_lower_jaxpr, _dce_jaxpr = (
    find_name("partial_eval", "lower_jaxpr2"),
    find_name("partial_eval", "dce_jaxpr"),
)


def as_lowered(closed: core.ClosedJaxpr) -> core.Jaxpr:
    """The jaxpr that JAX lowers for a traced program: without equations that no result needs.

    It has what JAX replaces "hi" primitives by. JAX keeps unused equations in programs of symbolic
    shapes, and in those that are jitted with `keep_unused`.
    """
    if getattr(as_jaxpr(closed), "is_high", False) and _lower_jaxpr is not None:
        closed = _lower_jaxpr(closed)
    jaxpr = as_jaxpr(closed)
    keeps_unused = len(jaxpr.eqns) == 1 and jaxpr.eqns[0].params.get("keep_unused", False)
    sizes = (size for x in jaxpr.invars for size in getattr(x.aval, "shape", ()))
    if keeps_unused or not all(isinstance(size, int) for size in sizes) or _dce_jaxpr is None:
        return jaxpr
    return _dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)[0]


def has_hi_primitives(closed: core.ClosedJaxpr) -> bool:
    """Whether a program has primitives that JAX replaces by others before it lowers them."""
    return getattr(as_jaxpr(closed), "is_high", False)


def without_hi_primitives(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A program with what JAX replaces its "hi" primitives by; of the same program the same one.

    The program itself where it has none, or where that is not known or has constants of its own.
    """
    if not has_hi_primitives(closed) or _lower_jaxpr is None:
        return closed
    try:
        found = _lower_jaxpr(closed)
    except (AttributeError, TypeError):
        return closed
    return closed if getattr(found, "consts", ()) else found


def with_equations(x, equations, results):
    """A jaxpr, closed or not, with other equations and results, of the same types."""
    own = {"eqns": list(equations), "outvars": list(results), "debug_info": as_jaxpr(x).debug_info}
    if as_jaxpr(x) is x:
        return x.replace(**own)
    return core.ClosedJaxpr(x.jaxpr.replace(**own), x.consts)


def function_of(arguments, equations, results) -> core.ClosedJaxpr:
    """The function that equations are, from variables to variables."""
    frame = jax.make_jaxpr(lambda: ())()
    own = {"invars": list(arguments), "outvars": list(results), "eqns": list(equations)}
    found = core.ClosedJaxpr(as_jaxpr(frame).replace(**own), ())
    if any(map(_is_high, own["eqns"])):  # which only tracing notes
        found = jax.make_jaxpr(core.jaxpr_as_fun(found))(*found.in_avals)
    return found


def _is_high(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is of a "hi" primitive, or calls one."""
    is_high = getattr(eqn.primitive, "is_high", None)
    return is_high is not None and is_high(*(x.aval for x in eqn.invars), **eqn.params)


def rewrapped(function, change: Callable[[Callable], Callable]):
    """A function that an equation keeps, as JAX wraps these, with what `change` makes of it inside.

    The same one where JAX wraps them otherwise.
    """
    if not hasattr(function, "call_wrapped"):
        return change(function) if callable(function) else function
    try:
        from jax.extend.linear_util import wrap_init

        return wrap_init(change(function.call_wrapped), debug_info=function.debug_info)
    except (ImportError, AttributeError, TypeError):
        return function


def new_variable(x: core.Var, aval=None) -> core.Var:
    """Another variable, of the type of `x` or another type."""
    made = copy.copy(x)
    if aval is not None:
        made.aval = aval
    return made


def with_context_of(eqn: core.JaxprEqn, other: core.JaxprEqn) -> core.JaxprEqn:
    """An equation of the mesh, and what else is said there, of another one."""
    return eqn.replace(ctx=other.ctx) if hasattr(other, "ctx") else eqn


def has_plain_context(eqn: core.JaxprEqn) -> bool:
    """Whether nothing was said of how or where XLA is to run an equation."""
    context = getattr(eqn, "ctx", None)
    metadata = getattr(context, "xla_metadata", None)
    return getattr(context, "compute_type", None) is None and not metadata


def has_ordered_effects(eqn: core.JaxprEqn) -> bool:
    """Whether an equation does more than its results and exchanges with other devices say."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


@functools.cache
def _sums_over_axes() -> frozenset[core.Primitive]:
    """The primitives of `lax.psum` inside shard_map, with and without checks of varying axes."""
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": PartitionSpec("x"), "out_specs": PartitionSpec()}
    found = set()
    # The caller may have a mesh, also one of manual axes.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        for check_vma in (True, False):
            f = jax.shard_map(lambda x: lax.psum(x, "x"), **specs, check_vma=check_vma)
            (shard_map,) = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((1,), np.float32)).eqns
            found.update(eqn.primitive for eqn in as_jaxpr(shard_map.params["jaxpr"]).eqns)
    return frozenset(found)


def summed_axes(eqn: core.JaxprEqn) -> tuple[str, ...]:
    """Return the mesh axes over which an equation is a `lax.psum`; () if it is none."""
    if eqn.primitive not in _sums_over_axes() or not eqn.params.keys() <= _SUM_PARAMETERS:
        return ()
    axes = eqn.params["axes"]
    is_whole = eqn.params.get("axis_index_groups") is None
    return tuple(axes) if is_whole and all(isinstance(axis, str) for axis in axes) else ()


_SUM_PARAMETERS = {"axes", "axis_index_groups"}


def source_line(eqn: core.JaxprEqn) -> str:
    """Where an equation was written, outside of JAX and us, as "file:line"; "" if unknown."""
    for frame in getattr(getattr(eqn.source_info, "traceback", None), "frames", []):
        folders = frame.file_name.replace("\\", "/").split("/")
        if "jax_tcgemm" not in folders and "jax" not in folders:
            return f"{frame.file_name}:{frame.line_num}"
    return ""
