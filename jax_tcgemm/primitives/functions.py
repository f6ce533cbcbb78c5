"""Functions as epilogues: what the primitives that have them as a parameter share.

A function is a closed jaxpr of accumulators and operands, without constants.
"""

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device.fusion import fused
from jax_tcgemm.epilogues.calls import closes_over_arrays, written_out
from jax_tcgemm.epilogues.shard_function import shard_function
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import is_moving, jvp_of_moving, series_by_tracing
from jax_tcgemm.primitives.transposes import Reading
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.exact import Exactly
from jax_tcgemm.system.jax_internals import xla, zero_tangent


def define_types(primitive: core.Primitive, unfused: Callable, product_of: Callable) -> None:
    """Gives a primitive its implementation and its typing, which is that of its unfused call.

    Args:
      primitive: the primitive, of several results.
      unfused: of its operands and parameters, the same by plain products.
      product_of: as of `lowering.expect`, to a `FusibleProduct`.
    """

    @functools.lru_cache(maxsize=1024)
    def types_of(avals, params, context):
        del context
        jaxpr = jax.make_jaxpr(functools.partial(unfused, **dict(params)))(*avals)
        return jaxpr.out_avals, jaxpr.effects

    def abstract_eval(*avals, **params):
        # What was asked for by name is found out when the primitive is lowered.
        unnamed = params | {"options": params["options"].selecting()}
        with lowering.named(params["options"].function), selection.unseen():
            types = types_of(avals, tuple(unnamed.items()), jax_internals.trace_context())
        lowering.expect(fused.make_plan, product_of, *avals, params)
        return types

    def to_lojax(*operands, function, **params):
        """The call of what JAX is to compile, where the function has "hi" primitives."""
        function = jax_internals.without_hi_primitives(function)
        if jax_internals.has_hi_primitives(function):
            return unfused(*operands, function=function, **params)
        return primitive.bind(*operands, function=function, **params)

    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(abstract_eval)
    primitive.to_lojax = to_lojax


def define_lowering(
    primitive: core.Primitive,
    unfused: Callable,
    product_of: Callable,
    *,
    division_of: Callable,
    obstacle_to_division: Callable,
    reading: Reading | None = None,
    unfused_on_gpu: Callable | None = None,
) -> None:
    """Gives such a primitive its lowering: sharded over devices, as one call, or unfused.

    Args:
      primitive: the primitive.
      unfused: as of `define_types`.
      product_of: as there.
      division_of: of the types of operands and the parameters, how devices divide a call.
      obstacle_to_division: of the types, the product, the parameters and the device, why they do
        not divide it as one.
      reading: as of `lowering.register`.
      unfused_on_gpu: what takes the place of `unfused` on a GPU; None where that runs there, too.
    """

    def lower(ctx, *operands, device, obstacle, **params):
        product = product_of(*ctx.avals_in, params)
        if not obstacle and partitioning.is_divided(ctx):
            obstacle = obstacle_to_division(ctx.avals_in, product, params, device)
            if not obstacle:
                return partitioning.lower(ctx, operands, division_of(*ctx.avals_in, params))
        plan = fused.make_plan(product.of_values(operands), device, obstacle)
        key = lowering.key_of(primitive, params, plan)
        run = unfused_on_gpu if unfused_on_gpu and device.platform == "cuda" else unfused
        on_device = plan.run if plan.is_fused else functools.partial(run, **params)
        return partitioning.lower_on_device(ctx, on_device, *operands, key=key)

    lowering.register(primitive, lower, reading)


def names_of_shards(on_shard, acc_names: Sequence[str]):
    """How a function's arrays are divided along the accumulator's dimensions.

    Args:
      on_shard: `shard_function` of the function.
      acc_names: the names of the accumulator's dimensions.

    Returns:
      The names of the dimensions of each operand and of each result.
    """

    def names_of(kind, array, dims):
        return tuple(
            f"{kind}{array}x{axis}" if dim is None else acc_names[dim]
            for axis, dim in enumerate(dims)
        )

    operands = [names_of("e", i, dims) for i, dims in enumerate(on_shard.operands)]
    results = [names_of("r", i, dims) for i, dims in enumerate(on_shard.results)]
    return operands, results


def series(unfused: Callable, primals, terms, *, function: core.ClosedJaxpr, **params):
    """The Taylor series of a call, by that of its unfused call."""
    # The jet of JAX 0.10 fails inside custom_jvp, whose derivative it does not use.
    return series_by_tracing(unfused, primals, terms, function=written_out(function), **params)


def traced(epilogue: Callable, types: tuple) -> core.ClosedJaxpr:
    """Return the jaxpr of a hashable function of arrays; of equal ones the same one."""
    return _traced(Exactly(epilogue), types, jax_internals.trace_context())


@functools.lru_cache(maxsize=1024)
def _traced(epilogue: Exactly, types: tuple, context) -> core.ClosedJaxpr:
    del context
    return jax.make_jaxpr(lambda *xs: jax.tree.leaves(epilogue.value(*xs)))(*types)


def hoist(function: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, Sequence[jax.Array]]:
    """A function without constants, which are its last arguments then; and these."""
    # The same function each time: what is compiled is found by it.
    return _hoisted(function) if function.consts else _hoisted_of_known(function)


def _hoisted(function: core.ClosedJaxpr):
    if any(map(closes_over_arrays, function.jaxpr.eqns)):
        function = written_out(function, closes_over_arrays)
    constants, num_arguments = function.consts, len(function.in_avals)
    if not constants:
        return function, ()

    def of_constants(*arguments):
        own, given = arguments[:num_arguments], arguments[num_arguments:]
        return core.jaxpr_as_fun(core.ClosedJaxpr(function.jaxpr, given))(*own)

    types = map(jax.typeof, constants)
    return jax.make_jaxpr(of_constants)(*function.in_avals, *types), constants


_hoisted_of_known = functools.lru_cache(maxsize=1024)(_hoisted)


def without_keys(function: core.ClosedJaxpr, operands):
    """A function of the numbers in random keys, and these; kernels know no keys."""
    if not any(_is_key(x) for x in operands):
        return function, operands
    generators = tuple(jax.random.key_impl(x) if _is_key(x) else None for x in operands)
    operands = [jax.random.key_data(x) if _is_key(x) else x for x in operands]
    return _of_key_data(function, generators, tuple(map(jax.typeof, operands))), operands


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=1024)
def _of_key_data(function: core.ClosedJaxpr, generators: tuple[Hashable, ...], types):
    num_accumulators = len(function.in_avals) - len(types)

    def of_data(*arguments):
        pairs = zip(arguments[num_accumulators:], generators, strict=True)
        operands = (x if how is None else jax.random.wrap_key_data(x, impl=how) for x, how in pairs)
        return core.jaxpr_as_fun(function)(*arguments[:num_accumulators], *operands)

    return jax.make_jaxpr(of_data)(*function.in_avals[:num_accumulators], *types)


@functools.lru_cache(maxsize=1024)
def mapped(function: core.ClosedJaxpr, types, in_dims, out_dims, size: int) -> core.ClosedJaxpr:
    """A function mapped over `in_dims` of its arguments, of these types then.

    Its results have the new dimension at `out_dims`.
    """
    f = jax.vmap(core.jaxpr_as_fun(function), in_dims, list(out_dims), axis_size=size)
    return jax.make_jaxpr(f)(*types)


@functools.lru_cache(maxsize=1024)
def of_shard(function: core.ClosedJaxpr, num_accumulators: int, *types) -> core.ClosedJaxpr:
    """Return a function of shards of its arguments, of these types."""
    return jax.make_jaxpr(shard_function(function, num_accumulators))(*types)


def value_and_tangent(f: Callable, primals: Sequence, tangents: Sequence):
    """A function of arrays, and its tangent; None where nothing moves it."""
    if not any(map(is_moving, tangents)):
        return f(*primals), None
    pairs = zip(primals, tangents, strict=True)
    return jvp_of_moving(f, primals, [t if is_moving(t) else zero_tangent(x) for x, t in pairs])
