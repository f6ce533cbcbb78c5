"""Lowering of primitives and programs to MLIR, and its context."""

import functools
import inspect
import math
import types
from collections.abc import Callable

import jax
from jax.extend import core
from jax.extend.lowering import LoweringRuleContext
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.sharding import AbstractMesh

from jax_tcgemm.system.jax_internals.find import find_name
from jax_tcgemm.system.jax_internals.jaxprs import as_jaxpr

mlir = types.SimpleNamespace(
    register_lowering=find_name("mlir", "register_lowering"),
    lower_fun=find_name("mlir", "lower_fun"),
)
_ShardingContext = find_name("mlir", "ShardingContext")


for _name, _function in vars(mlir).items():
    if _function is None:
        raise ImportError(
            f"jax_tcgemm: JAX must have jax.interpreters.mlir.{_name}, got JAX {jax.__version__} "
            "without it; install another version of JAX"
        )


_jaxpr_subcomp = find_name("mlir", "jaxpr_subcomp")
# Its parameters as known here. With any other signature, programs are traced again.
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
    """Return the private function of a name, without arguments; create it if the module lacks it.

    Args:
      ctx: the context of the lowering.
      name: the name, unique to the body: a function of this name is reused.
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


_lower_per_platform = find_name("mlir", "lower_per_platform")


def by_platform(rule: Callable) -> Callable:
    """Turn a rule with a keyword `platform` into a lowering rule for all platforms.

    A JAX without `lower_per_platform` calls the rule once, with names joined such as "cpu/cuda".
    Rules are not registered per platform: for primitives whose lowering is not cached, JAX 0.12
    passes `avals_out` as a tuple and, in programs for several platforms, adds it to a list.
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
    """Return the platform of the default device; "" if JAX has no backend yet, and start none."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return ""
    return jax.default_backend() if backends_are_initialized() else ""


def num_automatic_devices(ctx: LoweringRuleContext) -> int:
    """Return the number of devices over which XLA may shard the program that is lowered.

    It is the product of the sizes of the mesh axes that are not manual; 1 if this JAX cannot tell
    XLA how to shard, since XLA then replicates the operation.
    """
    axis_context = getattr(getattr(ctx, "module_context", None), "axis_context", None)
    if _ShardingContext is None:
        return 1
    if hasattr(axis_context, "manual_axes"):
        sizes = axis_context.mesh.shape.items()
        return math.prod(size for axis, size in sizes if axis not in axis_context.manual_axes)
    return getattr(axis_context, "num_devices", 1)


def on_mesh(ctx: LoweringRuleContext, mesh: AbstractMesh) -> LoweringRuleContext:
    """Return a copy of a context, for a program on the devices of a mesh."""
    # JAX reads only the number of devices, so that any will do.
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


def row_major(x: jax.Array) -> jax.Array:
    """Constrain an array to a row-major layout; return it as it is if this JAX cannot."""
    try:
        from jax.experimental.layout import Layout, with_layout_constraint
    except ImportError:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
