"""Traces: equations that a trace binds or writes, and the settings of a trace."""

import contextlib
import inspect
from collections.abc import Callable

import jax
from jax.extend import core

from jax_tcgemm.system.jax_internals.find import find_name
from jax_tcgemm.system.jax_internals.jaxprs import as_jaxpr, has_hi_primitives
from jax_tcgemm.system.routing import routing


def bound(eqn: core.JaxprEqn, params: dict, operands) -> list[jax.Array]:
    """The results of an equation's primitive with other operands and parameters.

    Written, as far as what is made of it is told, where the equation is.
    """
    primitive = eqn.primitive
    if hasattr(primitive, "get_bind_params"):
        params = primitive.get_bind_params(params)
    with _written_at(eqn):
        results = primitive.bind(*operands, **params)
    return list(results) if primitive.multiple_results else [results]


def _written_at(eqn: core.JaxprEqn) -> contextlib.AbstractContextManager:
    try:
        from jax._src.source_info_util import user_context

        return user_context(eqn.source_info.traceback)
    except (ImportError, AttributeError, TypeError):
        return contextlib.nullcontext()


def _writing_trace():
    """The trace that is under way, if it only writes equations down as this library knows it."""
    try:
        from jax._src.core import trace_ctx

        known = inspect.signature(_TracerOfProgram).parameters, inspect.signature(_emit).parameters
        if tuple(map(tuple, known)) == _WRITING_PARAMETERS:
            return trace_ctx.trace if type(trace_ctx.trace) is _TraceOfProgram else None
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    return None


_TraceOfProgram = find_name("partial_eval", "DynamicJaxprTrace")
_TracerOfProgram = find_name("partial_eval", "DynamicJaxprTracer")
_emit = getattr(_TraceOfProgram, "emit_eqn", None)
_WRITING_PARAMETERS = (
    ("trace", "aval", "val", "line_info", "parent"),
    ("self", "in_tracers", "out_avals", "primitive", "params", "effects", "source_info", "ctx"),
)


def run_program(closed: core.ClosedJaxpr, arrays, is_new: Callable[[core.JaxprEqn], bool]) -> list:
    """Apply a jaxpr to arrays of the types for which it was traced; return its results.

    While JAX traces to a jaxpr, equations are added without binding their primitives again, as for
    functions that `jax.jit` inlines, since their types are known. Equations for which `is_new` have
    not been traced before and are bound. Outside such a trace, all equations are bound.
    """
    trace = _writing_trace()
    if trace is None or has_hi_primitives(closed):
        return core.jaxpr_as_fun(closed)(*arrays)
    from jax._src import source_info_util

    here, jaxpr = source_info_util.current(), as_jaxpr(closed)
    variables = (*jaxpr.constvars, *jaxpr.invars)
    given = (trace.to_jaxpr_tracer(x, here) for x in (*closed.consts, *arrays))
    known = dict(zip(variables, given, strict=True))
    stack = source_info_util.current_name_stack()

    def find(x, source_info):
        if isinstance(x, core.Literal):
            return _TracerOfProgram(trace, x.aval, x, source_info)
        return known[x]

    for eqn in jaxpr.eqns:
        source_info = eqn.source_info
        if source_info.traceback is None:
            source_info = source_info.replace(traceback=here.traceback)
        if stack.stack:
            source_info = source_info.replace(name_stack=stack + source_info.name_stack)
        operands = [find(x, source_info) for x in eqn.invars]
        if eqn.effects or is_new(eqn):
            with (
                eqn.ctx.manager,
                source_info_util.user_context(
                    source_info.traceback, name_stack=source_info.name_stack
                ),
            ):
                found = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            found = found if eqn.primitive.multiple_results else [found]
        else:
            own = [x.aval for x in eqn.outvars], eqn.primitive, eqn.params, eqn.effects
            found = trace.emit_eqn(operands, *own, source_info, eqn.ctx)
        known |= zip(eqn.outvars, found, strict=True)
    return [find(x, here) for x in jaxpr.outvars]


def is_tracer(x) -> bool:
    """Whether an array is one of a trace that is under way."""
    return isinstance(x, jax.core.Tracer)


def trace_context() -> tuple:
    """Return the settings on which a trace depends besides its function and argument types."""
    config = jax.config
    return (
        config.jax_enable_x64,
        config.jax_numpy_dtype_promotion,
        config.jax_numpy_rank_promotion,
        config.jax_default_matmul_precision,
        config.jax_default_prng_impl,
        config.jax_threefry_partitionable,
        jax.sharding.get_abstract_mesh(),
        routing.value,
    )
