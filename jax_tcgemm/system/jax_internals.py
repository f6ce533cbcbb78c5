"""All uses of undocumented JAX internals, each with a fallback.

JAX may move or remove any of these in any release, so that no other module uses them. The fallback
is the module that defines the name, an equivalent, or reduced functionality. Without a registry of
rules a primitive cannot be differentiated or batched, which JAX then reports; the import fails only
if nothing can be lowered.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import convert_element_type_p, dot_general_p, transpose_p
from jax.extend.lowering import LoweringRuleContext
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_tcgemm.system.routing import routing


def _find(module: str, name: str, instead=None):
    """`name` of one of JAX's interpreters, from where it is exported or else where it is defined.

    Where both lack it, `instead`.
    """
    for folder in ("jax.interpreters", "jax._src.interpreters"):
        try:
            return getattr(importlib.import_module(f"{folder}.{module}"), name)
        except (ImportError, AttributeError):
            pass
    return instead


# --- rules of primitives ------------------------------------------------------------------------


primitive_jvps = _find("ad", "primitive_jvps", {})
primitive_transposes = _find("ad", "primitive_transposes", {})
primitive_batchers = _find("batching", "primitive_batchers", {})


def _find_zero() -> type:
    """The type of tangents that are zero, from what a rule is given."""
    probe, tangents = core.Primitive("tcgemm_probe"), []
    probe.def_abstract_eval(lambda x, y: x)

    def jvp(primals, its_tangents):
        tangents.extend(its_tangents)
        return primals[0], its_tangents[0]

    primitive_jvps[probe] = jvp
    jax.eval_shape(lambda x: jax.jvp(lambda x: probe.bind(x, 1.0), (x,), (x,)), 1.0)
    return type(tangents[1])


def _is_undefined_primal(x) -> bool:
    return hasattr(x, "aval") and not isinstance(x, jax.Array | np.ndarray)


def _instantiate_zeros(tangent):
    """Zeros for a tangent or cotangent that is a `Zero`, without their sharding."""
    if type(tangent) is not Zero:
        return tangent
    zeros = np.zeros if tangent.aval.dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(tangent.aval.shape, tangent.aval.dtype)


def _defbilinear(primitive, transpose_lhs: Callable, transpose_rhs: Callable) -> None:
    """Differentiates a primitive that is linear in each of its two operands."""

    def jvp(primals, tangents, **params):
        (x, y), (dx, dy) = primals, tangents
        pairs = [(dx, y)] * (type(dx) is not Zero) + [(x, dy)] * (type(dy) is not Zero)
        terms = [primitive.bind(*pair, **params) for pair in pairs]
        return primitive.bind(x, y, **params), functools.reduce(lax.add, terms)

    def transpose(ct, x, y, **params):
        if type(ct) is Zero:
            return [None, None]
        if is_undefined_primal(x):
            return [transpose_lhs(ct, x, y, **params), None]
        return [None, transpose_rhs(ct, x, y, **params)]

    primitive_jvps[primitive], primitive_transposes[primitive] = jvp, transpose


class _FancyPrimitiveBatchers(dict):
    """Makes rules that are told the mapped axis of those that are not, and so know less of it."""

    def __setitem__(self, primitive, rule):
        def batch(args, dims, **params):
            size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
            axis_data = types.SimpleNamespace(size=size, explicit_mesh_axis=None)
            return rule(axis_data, args, dims, **params)

        primitive_batchers[primitive] = batch


def _apply_primitive(primitive, *args, **params):
    return _compiled(primitive, tuple(params.items()))(*args)


@functools.lru_cache(maxsize=4096)
def _compiled(primitive, params):
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


Zero = _find("ad", "Zero") or _find_zero()
is_undefined_primal = _find("ad", "is_undefined_primal", _is_undefined_primal)

# Under the names that JAX's own modules have in every primitive's rules.
ad = types.SimpleNamespace(
    Zero=Zero,
    is_undefined_primal=is_undefined_primal,
    instantiate_zeros=_find("ad", "instantiate_zeros", _instantiate_zeros),
    defbilinear=_find("ad", "defbilinear", _defbilinear),
    primitive_jvps=primitive_jvps,
    primitive_transposes=primitive_transposes,
)
batching = types.SimpleNamespace(
    primitive_batchers=primitive_batchers,
    fancy_primitive_batchers=_find(
        "batching", "fancy_primitive_batchers", _FancyPrimitiveBatchers()
    ),
)
xla = types.SimpleNamespace(apply_primitive=_find("xla", "apply_primitive", _apply_primitive))


# --- types --------------------------------------------------------------------------------------


def varying_axes(x) -> frozenset[str]:
    """The manual mesh axes over which an array, or a type, varies, inside of a shard_map."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying
    return getattr(aval, "vma", frozenset())


def zero_tangent(x: jax.Array):
    """The tangent of a result that does not move."""
    aval = jax.typeof(x)
    return Zero(aval.to_tangent_aval() if hasattr(aval, "to_tangent_aval") else aval)


def strong_type(aval):
    """A type that is not weak."""
    return aval.strip_weak_type() if hasattr(aval, "strip_weak_type") else aval


def with_partitions(spec: PartitionSpec, partitions) -> PartitionSpec:
    """A spec that differs in how dimensions are divided only."""
    if hasattr(spec, "update"):
        return spec.update(partitions=tuple(partitions))
    return PartitionSpec(*partitions, unreduced=spec.unreduced, reduced=spec.reduced)


def product_type(lhs, rhs, **params):
    """The type of `lax.dot_general(lhs, rhs, **params)`."""
    try:
        return dot_general_p.abstract_eval(lhs, rhs, **params)[0]
    except (AttributeError, TypeError):
        pass  # Also where operands do not go together, which is said again here.
    with routing(None):
        return jax.make_jaxpr(functools.partial(lax.dot_general, **params))(lhs, rhs).out_avals[0]


def like(aval, shape, dtype, sharding: NamedSharding):
    """The type of an array that varies over the manual mesh axes that one of type `aval` does."""
    if hasattr(aval, "update"):
        return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
    return jax.core.ShapedArray(shape, dtype, sharding=sharding)


def converted(x: jax.Array, dtype, *, weak_type: bool) -> jax.Array:
    """`x` in another dtype and weak or not; not weak where JAX has another way of making that."""
    try:
        return convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak_type, sharding=None)
    except TypeError:
        return lax.convert_element_type(x, dtype)


# --- lowering -----------------------------------------------------------------------------------

mlir = types.SimpleNamespace(
    register_lowering=_find("mlir", "register_lowering"), lower_fun=_find("mlir", "lower_fun")
)
_ShardingContext = _find("mlir", "ShardingContext")

for _name, _function in vars(mlir).items():
    if _function is None:
        raise ImportError(
            f"jax_tcgemm: JAX must have jax.interpreters.mlir.{_name}, got JAX {jax.__version__} "
            "without it; install another version of JAX"
        )


_jaxpr_subcomp = _find("mlir", "jaxpr_subcomp")
# What it takes; where that is something else, programs are traced again.
_SUBCOMP_PARAMETERS = (
    *("ctx", "jaxpr", "name_stack", "tokens", "consts_for_constvars", "args"),
    *("dim_var_values", "const_lowering", "outer_traceback"),
)


@functools.cache
def _lowers_programs() -> bool:
    found = () if _jaxpr_subcomp is None else inspect.signature(_jaxpr_subcomp).parameters
    return tuple(found) == _SUBCOMP_PARAMETERS


def lower_program(ctx: LoweringRuleContext, closed: core.ClosedJaxpr, *operands):
    """Lowers a program that has been traced, if possible without tracing it again."""
    if closed.consts or not _lowers_programs():
        return mlir.lower_fun(core.jaxpr_as_fun(closed), multiple_results=True)(ctx, *operands)
    context = ctx.module_context
    if ctx.platforms is not None:
        context = context.replace(platforms=ctx.platforms)
    out, tokens = _jaxpr_subcomp(
        context,
        as_jaxpr(closed),
        ctx.name_stack,
        ctx.tokens_in,
        (),
        *operands,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=None,
    )
    ctx.set_tokens_out(tokens)
    return out


def platforms(ctx: LoweringRuleContext) -> tuple[str, ...]:
    """The platforms that a program is lowered for."""
    for context in (ctx, getattr(ctx, "module_context", None)):
        if found := getattr(context, "platforms", None):
            return tuple(found)
    return (jax.default_backend(),)


def module_function(ctx: LoweringRuleContext, name: str, types, make: Callable) -> func.FuncOp:
    """The private function without arguments of a name in the module; made if it has none yet.

    Args:
      ctx: the context of the lowering.
      name: the name, which tells what the function does.
      types: the MLIR types of its results.
      make: emits the function's body and returns its results.
    """
    symbols = ctx.module_context.symbol_table
    if name in symbols:
        return symbols[name]
    with ir.InsertionPoint(ctx.module_context.module.body):
        made = func.FuncOp(name, ir.FunctionType.get([], types), visibility="private")
    symbols.insert(made)
    with ir.InsertionPoint(made.add_entry_block()):
        func.ReturnOp(make())
    return made


_lower_per_platform = _find("mlir", "lower_per_platform")


def by_platform(rule: Callable) -> Callable:
    """The rule for every platform, of one that is told which; "cpu/cuda" where JAX has no choice.

    Rules are not registered for each platform: of primitives whose lowering it does not keep,
    JAX 0.12 gives them types in a tuple, which then it adds to a list in programs for several.
    """

    def lower(ctx, *operands, **params):
        names = platforms(ctx)
        if len(names) == 1 or _lower_per_platform is None:
            return rule(ctx, *operands, platform="/".join(names), **params)
        rules = {name: functools.partial(rule, platform=name) for name in names}
        ctx = ctx.replace(avals_out=list(ctx.avals_out))
        description = str(ctx.primitive)
        return _lower_per_platform(ctx, description, rules, None, frozenset(), *operands, **params)

    return lower


def started_platform() -> str:
    """The platform of the default device; "" where JAX has not started, which is left to others."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return ""
    return jax.default_backend() if backends_are_initialized() else ""


def num_automatic_devices(ctx: LoweringRuleContext) -> int:
    """Over how many devices XLA divides a program that is being lowered, if it can be told how.

    Those along manual mesh axes are not counted. Where nothing is known it is one: what XLA is not
    told how to divide it repeats on every device.
    """
    axis_context = getattr(getattr(ctx, "module_context", None), "axis_context", None)
    if _ShardingContext is None:
        return 1
    if hasattr(axis_context, "manual_axes"):
        sizes = axis_context.mesh.shape.items()
        return math.prod(size for axis, size in sizes if axis not in axis_context.manual_axes)
    return getattr(axis_context, "num_devices", 1)


def on_mesh(ctx: LoweringRuleContext, mesh: AbstractMesh) -> LoweringRuleContext:
    """The context of a program for several devices, with a mesh of them."""
    # Devices are needed only to number them, so that any will do.
    axis_context = _ShardingContext(mesh.size, (jax.devices()[0],) * mesh.size, mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axis_context))


def is_exported(ctx: LoweringRuleContext) -> bool:
    """Whether a program is lowered by `jax.export`."""
    module_context = getattr(ctx, "module_context", None)
    return getattr(getattr(module_context, "lowering_parameters", None), "for_export", False)


def has_symbolic_dimensions(ctx: LoweringRuleContext) -> bool:
    """Whether shapes of the program that is lowered have variables in them."""
    return bool(getattr(ctx, "dim_var_values", ()))


def uses_shardy() -> bool:
    """Whether programs are partitioned by Shardy, and not by GSPMD."""
    return getattr(jax.config, "jax_use_shardy_partitioner", True)


# --- jaxprs -------------------------------------------------------------------------------------


def as_jaxpr(x) -> core.Jaxpr | None:
    """The jaxpr that a parameter of an equation is, closed or not; None if it is something else."""
    x = getattr(x, "jaxpr", x)
    return x if isinstance(x, core.Jaxpr) else None


_lower_jaxpr, _dce_jaxpr = _find("partial_eval", "lower_jaxpr2"), _find("partial_eval", "dce_jaxpr")


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


_TraceOfProgram = _find("partial_eval", "DynamicJaxprTrace")
_TracerOfProgram = _find("partial_eval", "DynamicJaxprTracer")
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


def row_major(x: jax.Array) -> jax.Array:
    """An array that XLA lays out by rows where it runs this; unchanged where JAX cannot say so."""
    try:
        from jax.experimental.layout import Layout, with_layout_constraint
    except ImportError:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def has_ordered_effects(eqn: core.JaxprEqn) -> bool:
    """Whether an equation does more than its results and exchanges with other devices say."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


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


def source_line(eqn: core.JaxprEqn) -> str:
    """Where an equation was written, outside of JAX and us, as "file:line"; "" if unknown."""
    for frame in getattr(getattr(eqn.source_info, "traceback", None), "frames", []):
        folders = frame.file_name.replace("\\", "/").split("/")
        if "jax_tcgemm" not in folders and "jax" not in folders:
            return f"{frame.file_name}:{frame.line_num}"
    return ""


# --- what `patch` replaces ----------------------------------------------------------------------


def _find_sharding_type_error() -> type[Exception]:
    """Return JAX's exception for operands with incompatible shardings over explicit axes."""
    try:
        return importlib.import_module("jax._src.core").ShardingTypeError
    except (ImportError, AttributeError):
        return TypeError


ShardingTypeError = _find_sharding_type_error()


def _find_ragged_dot_general_p() -> core.Primitive | None:
    """The primitive of `lax.ragged_dot`, which has no public name, from a trace of one.

    None where JAX makes its ragged products of other primitives.
    """
    shapes = ((1, 1), jnp.float32), ((1, 1, 1), jnp.float32), ((1,), jnp.int32)
    jaxpr = jax.make_jaxpr(lax.ragged_dot)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    found = (eqn.primitive for eqn in jaxpr.eqns if eqn.primitive.name.startswith("ragged_dot"))
    return next(found, None)


ragged_dot_general_p = _find_ragged_dot_general_p()


def in_pallas_kernel() -> bool:
    """Whether what is being traced is the body of a Pallas kernel.

    Pallas says so to itself only, in a place that changes. But whoever traces, differentiates,
    batches or lowers a body is one of its modules, and that is on the stack.
    """
    if "jax.experimental.pallas" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if _is_of_pallas(frame.f_globals.get("__name__", "")):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _is_of_pallas(module: str) -> bool:
    folders = module.split(".")
    # Its `ops` are users of Pallas, with products of their own outside of kernels.
    return folders[0] == "jax" and "pallas" in folders and "ops" not in folders


# --- rules for JAX's other interpreters ---------------------------------------------------------

# Of modules that are not imported yet, what is to be told to each.
_waiting: list[tuple[str, Callable[[types.ModuleType], None]]] = []


def when_imported(module: str, register: Callable[[types.ModuleType], None]) -> None:
    """Calls `register` with a module of JAX's: now, or when a product is bound after its import.

    We do not import it, because few need it and it takes time. Where it lacks what `register` looks
    for, its interpreter does without our rule.
    """
    _waiting.append((module, register))
    register_imported()


def register_imported() -> None:
    """Registers what has waited for modules that are imported now."""
    for entry in [entry for entry in _waiting if entry[0] in sys.modules]:
        module, register = entry
        try:
            register(sys.modules[module])
        except (AttributeError, KeyError):
            continue  # It is still being imported, or of a JAX that has no such table.
        _waiting.remove(entry)


def check_nans(primitive: core.Primitive) -> None:
    """Lets `checkify.float_checks` look for NaN in what a primitive returns."""

    def register(checkify):
        rule = functools.partial(checkify.nan_error_check, primitive)
        checkify.error_checks[primitive] = rule

    when_imported("jax._src.checkify", register)


def register_jet(primitive: core.Primitive, rule: Callable) -> None:
    """Gives `jax.experimental.jet` the rule of a primitive, as its table `jet_rules` wants it."""

    def register(jet):
        jet.jet_rules[primitive] = rule

    with contextlib.suppress(ImportError):  # It takes no time.
        importlib.import_module("jax.experimental.jet")
    when_imported("jax.experimental.jet", register)


def register_sparse_product(primitive: core.Primitive, to_lax: Callable) -> None:
    """Gives `jax.experimental.sparse` a product: its own of sparse arrays, transposed.

    Args:
      primitive: the primitive.
      to_lax: from its parameters to those of `lax.dot_general_p`, and the order of the result.
    """

    def register(sparse):
        for rules in (sparse.sparse_rules_bcoo, sparse.sparse_rules_bcsr):
            rules[primitive] = functools.partial(run, rules[dot_general_p], sparse)

    def run(product, sparse, environment, *operands, **params):
        params, permutation = to_lax(params)
        (out,) = product(environment, *operands, **params)
        if permutation == tuple(range(len(permutation))):
            return (out,)
        if out.is_sparse():
            transpose = sparse.sparse_rules_bcoo[transpose_p]
            return transpose(environment, out, permutation=permutation)
        return (environment.dense(lax.transpose(environment.data(out), permutation)),)

    when_imported("jax.experimental.sparse.transform", register)


def register_roofline(primitive: core.Primitive, flops: Callable) -> None:
    """Gives `jax.experimental.roofline` the cost of a primitive.

    Args:
      primitive: the primitive.
      flops: from the types of its operands and its parameters to its operations, by JAX's count: a
        multiplication and an addition for each pair of factors, of whatever type.
    """

    def register(roofline):
        def cost(ctx, *_, **params):
            count = flops(*ctx.avals_in, **params)
            moved = sum(x.size * x.dtype.itemsize for x in (*ctx.avals_in, *ctx.avals_out))
            return roofline.RooflineResult(
                flops=count, unfused_flops=count, hbm_bytes=moved, unfused_hbm_bytes=moved
            )

        roofline.register_roofline(primitive)(cost)

    when_imported("jax.experimental.roofline", register)
