"""Sharding of calls over devices, derived from names of the dimensions.

A primitive names each dimension of its operands and results in a `Division`. For any mesh this
determines the shards that a device needs, what it computes from them, and the devices over which
products are summed. The implementation depends on where the shardings are known:

    automatic mesh axes   by XLA, which selects them at compile time    custom_partitioning
    explicit mesh axes    from the types of the operands                shard_map
    manual mesh axes      by the caller, who sharded everything         nothing to do here

A program with custom_partitioning cannot be exported, and its key in JAX's persistent compilation
cache differs between processes. So custom_partitioning is used only for automatic mesh axes of
several devices.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend import core
from jax.extend.lowering import LoweringRuleContext
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_tcgemm.sharding.all_reduce import all_reduce, all_reduce_p
from jax_tcgemm.sharding.layout import Layout, Names, canonical_spec, lay_out
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import mlir
from jax_tcgemm.system.routing import routing


def _unchanged(accumulators, *_):
    return accumulators


@contextlib.contextmanager
def _promotion():
    """Allow promotion of dtypes and ranks in our steps, whatever the caller's settings."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@dataclasses.dataclass(frozen=True)
class Division:
    """Rules for sharding a call over devices.

    Dimensions of the same name have the same size and are sharded together. A name in operands and
    in no result is contracted: the call is a sum over that dimension. A result that lacks another
    name of the operands is a sum over that dimension.

    Attributes:
      operands: for each operand, the names of its dimensions.
      results: for each result, the names of its dimensions.
      call: function from operands, or their shards without sharded contracted dimensions, to a
        tuple of results.
      call_at: function from a layout to a replacement of `call`, where `call` depends on the
        position of the shards; None where it does not.
      product: function from shards of the operands to a tuple of addends, which are summed over
        devices; None where it is `call`.
      addends: the names of the addends' dimensions; None where they are the results'.
      finish: epilogue, which must follow the sum over devices: function from the summed
        accumulators, and the operands in `epilogue`, to the results.
      epilogue: positions of the operands of `finish`; the other operands are those of `product`.
      whole: names of dimensions that are never sharded; these are not contracted.
      even: names of dimensions that are sharded only into equal shards. Shards of other dimensions
        may be padded, of contracted ones with zeros.
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    call: Callable
    call_at: Callable[[Layout], Callable] | None = None
    product: Callable | None = None
    addends: tuple[Names, ...] | None = None
    finish: Callable = _unchanged
    epilogue: tuple[int, ...] = ()
    whole: tuple[str, ...] = ()
    even: tuple[str, ...] = ()

    @functools.cached_property
    def contracted(self) -> tuple[str, ...]:
        """Names of dimensions that no result has, in order of appearance."""
        kept = {name for names in self.results for name in names} | set(self.whole)
        return tuple(name for name in self.names if name not in kept)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all dimensions, in order of appearance."""
        return tuple(dict.fromkeys(n for names in self.operands + self.results for n in names))

    def layout(
        self, operand_shapes, result_shapes, operand_specs, result_specs, axis_sizes
    ) -> Layout:
        """Select mesh axes for each dimension, from the shardings of operands and results."""
        names, shapes = self.operands + self.results, [*operand_shapes, *result_shapes]
        extents = {
            name: extent
            for dims, shape in zip(names, shapes, strict=True)
            for name, extent in zip(dims, shape, strict=True)
        }
        return lay_out(self, extents, operand_specs, result_specs, axis_sizes)

    def operand_specs(self, layout: Layout) -> tuple[PartitionSpec, ...]:
        """Return the partition spec of each operand in a layout."""
        return tuple(
            layout.spec(names, summed=i in self.epilogue) for i, names in enumerate(self.operands)
        )

    def result_specs(self, layout: Layout) -> tuple[PartitionSpec, ...]:
        """Return the partition spec of each result in a layout."""
        return tuple(layout.spec(names, summed=True) for names in self.results)

    def sums_rows(self, contracted: Iterable[str]) -> bool:
        """Return whether none of these contracted dimensions is the last one of an operand.

        Such a product is the gradient of a weight, a sum over tokens. XLA combines the sums over
        devices of several gradients, and nothing but the end of a step waits for them.
        """
        return not {names[-1] for names in self.operands if names}.intersection(contracted)

    @_promotion()
    def on_device(self, layout: Layout, *shards: jax.Array) -> tuple[jax.Array, ...]:
        """Compute the results of one device's shards: product, reduction over devices, epilogue."""
        shards = [
            layout.mask(x, names, self.contracted)
            for x, names in zip(shards, self.operands, strict=True)
        ]
        call = self.call_at(layout) if self.call_at else self.call
        if not layout.reduced:
            results = call(*shards)
        else:
            factors = [x for i, x in enumerate(shards) if i not in self.epilogue]
            addends = (self.product or call)(*factors)
            psum = lax.psum
            if not self.sums_rows(name for name in self.contracted if layout.divided.get(name)):
                psum = functools.partial(all_reduce, axis_sizes=layout.axis_sizes)
            accumulators = tuple(
                layout.reduce(x, names, psum)
                for x, names in zip(addends, self.addends or self.results, strict=True)
            )
            results = self.finish(accumulators, *(shards[i] for i in self.epilogue))
        return tuple(
            layout.sum_over(x, set(layout.extents) - set(names) - set(self.contracted))
            for x, names in zip(results, self.results, strict=True)
        )


# --- who knows the shardings --------------------------------------------------------------------


def _mesh(avals) -> AbstractMesh | None:
    """Return the mesh in the types of operands; None where none of them has one."""
    return next((aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty), None)


def _axes(mesh: AbstractMesh | None, axis_type: AxisType) -> tuple[str, ...]:
    """Return the mesh axes of a type that have more than one device."""
    if mesh is None:
        return ()
    return tuple(
        name
        for name, its_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if its_type == axis_type and mesh.shape[name] > 1
    )


def is_divided(ctx: LoweringRuleContext) -> bool:
    """Return whether the call that is being lowered must be sharded over devices."""
    return has_explicit_axes(*ctx.avals_in) or jax_internals.num_automatic_devices(ctx) > 1


def has_explicit_axes(*avals) -> bool:
    """Return whether types have explicit mesh axes of several devices."""
    return bool(_axes(_mesh(avals), AxisType.Explicit))


def obstacle_of(*avals) -> str:
    """Return why XLA must partition a call of operands and results of such types, or ""."""
    mesh = _mesh(avals)
    # In a partly manual shard_map, XLA counts the devices of one manual group, in an order that
    # differs from call to call. A custom_partitioning with shardings of the whole mesh aborts the
    # process; one with shardings of the group confuses two automatic axes in its sums.
    if _axes(mesh, AxisType.Auto) and _axes(mesh, AxisType.Manual):
        return "it is inside a partly manual shard_map, and XLA must partition the product"
    if _axes(mesh, AxisType.Auto) and _axes(mesh, AxisType.Explicit):
        return "its mesh has automatic and explicit axes, and XLA must partition the product"
    return ""


def obstacle_to_automatic(ctx: LoweringRuleContext) -> str:
    """Return why the call that is being lowered cannot use custom_partitioning, or ""."""
    if has_explicit_axes(*ctx.avals_in) or not is_divided(ctx):
        return ""
    if jax_internals.is_exported(ctx):
        return "it is exported for several devices with automatic mesh axes"
    if not jax_internals.uses_shardy():
        return "the Shardy partitioner is off"
    if any(0 in aval.shape for aval in ctx.avals_in):
        return "it is empty"
    num_devices = jax_internals.num_automatic_devices(ctx)
    if _mesh(ctx.avals_in) is None and num_devices & (num_devices - 1):
        return f"how its mesh arranges {num_devices} devices is not known"
    return ""


def explicit_layout(division: Division, operands: Sequence, results: Sequence) -> Layout | None:
    """Return the layout for the types of operands and results; None without explicit mesh axes."""
    mesh = _mesh(operands)
    if not _axes(mesh, AxisType.Explicit):
        return None
    both = operands, results
    shapes = [[aval.shape for aval in avals] for avals in both]
    specs = [[canonical_spec(x.sharding.spec, x.ndim) for x in avals] for avals in both]
    layout = division.layout(*shapes, *specs, dict(mesh.shape))
    unreduced, *others = {x.sharding.spec.unreduced for x in results}
    if others or division.epilogue or not unreduced <= {*layout.reduced}:
        return layout
    return dataclasses.replace(layout, unreduced=unreduced)


def shards(division: Division, operands: Sequence, results: Sequence) -> list:
    """Return the types of one device's operands and results.

    With explicit mesh axes these are shards. Shards over automatic axes are unknown before XLA
    compiles, so the types of the whole arrays are returned.
    """
    layout = explicit_layout(division, operands, results)
    if layout is None:
        return [*operands, *results]
    return [
        jax.ShapeDtypeStruct(tuple(map(layout.shard_extent, names)), aval.dtype)
        for names, aval in zip(
            division.operands + division.results, [*operands, *results], strict=True
        )
    ]


def waits_for_sum(division: Division, operands: Sequence, results: Sequence) -> bool:
    """Return whether explicit mesh axes require `finish` after a sum over devices."""
    layout = explicit_layout(division, operands, results)
    return layout is not None and bool(layout.reduced) and division.product is not None


# --- lowering -----------------------------------------------------------------------------------


class _Known:
    """Function with a key; functions with equal keys compute the same."""

    def __init__(self, function: Callable, key: Hashable):
        self.function, self._key = function, key

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other) -> bool:
        return isinstance(other, _Known) and self._key == other._key


@functools.lru_cache(maxsize=1024)
def _traced(known: _Known, types, context):
    del context
    return jax.make_jaxpr(known.function)(*types)


def lower_on_device(ctx: LoweringRuleContext, function: Callable, *operands, key=None):
    """Lower the function of one device, from arrays to a tuple of arrays.

    `key` is hashable; functions with equal keys compute the same, so that for operands of the same
    types only one of them is traced. With None, the function is traced for each call.

    XLA may partition a program in another thread, without the caller's settings. The lowering thus
    sets them: no `patch`, 64-bit types, and promotion of dtypes. With symbolic dimensions, for
    which XLA cannot partition, sizes have the caller's integer type.

    If the first two operands are one array, products inside the function get one array, too.
    """
    if len(operands) > 1 and operands[0] == operands[1]:
        ctx, operands = ctx.replace(avals_in=ctx.avals_in[1:]), operands[1:]
        function, key = of_one_array(function), key and ("one array", key)

    def run(*operands):
        results = function(*operands)
        # One device has nothing to sum, but the types may say that it is not summed.
        return tuple(
            resharded(x, aval.sharding) if aval.sharding.spec.unreduced else x
            for x, aval in zip(results, ctx.avals_out, strict=True)
        )

    x64 = not jax_internals.has_symbolic_dimensions(ctx) or jax.config.jax_enable_x64
    with routing(None), jax.enable_x64(x64), _promotion():
        if key is None or jax_internals.has_symbolic_dimensions(ctx):
            return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
        known = _Known(run, (key, tuple(ctx.avals_out)))
        traced = _traced(known, tuple(ctx.avals_in), jax_internals.trace_context())
        return jax_internals.lower_program(ctx, traced, *operands)


def of_one_array(function: Callable) -> Callable:
    """Return the function of operands of which the first two are one array, given once."""
    return lambda x, *others: function(x, x, *others)


def lower(ctx: LoweringRuleContext, operands, division: Division):
    """Lower a call that `is_divided` and has no obstacle."""
    layout = explicit_layout(division, ctx.avals_in, ctx.avals_out)
    if layout is not None:
        return _lower_explicit(ctx, operands, division, layout)
    return _lower_automatic(ctx, operands, division)


def _lower_explicit(ctx, operands, division, layout):
    run = _over_explicit_axes(division, layout, _mesh(ctx.avals_in), ctx.avals_out)
    with jax.sharding.use_abstract_mesh(_mesh(ctx.avals_in)):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _over_explicit_axes(division, layout, mesh, results) -> Callable:
    """Return the function of whole arrays that all devices of explicit axes compute together."""
    wanted = [aval.sharding for aval in results]

    def run(*operands):
        in_specs, out_specs = division.operand_specs(layout), division.result_specs(layout)
        if layout.unreduced:
            out_specs = tuple(
                jax_internals.with_partitions(sharding.spec, spec.partitions)
                for sharding, spec in zip(wanted, out_specs, strict=True)
            )
        on_devices = jax.shard_map(
            functools.partial(division.on_device, layout),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=_explicit_axes(mesh),
            check_vma=False,
        )
        operands = map(resharded, operands, (NamedSharding(mesh, spec) for spec in in_specs))
        return tuple(map(resharded, on_devices(*operands), wanted))

    return run


def sums_of(division: Division, operands: Sequence, results: Sequence) -> list[core.JaxprEqn]:
    """Return the all-reduces of a call over explicit mesh axes, from the types of its arrays."""
    layout = explicit_layout(division, operands, results)
    if layout is None or not layout.reduced:
        return []
    mesh = _mesh(operands)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(_over_explicit_axes(division, layout, mesh, results))(*operands)
    inside = (jax_internals.as_jaxpr(eqn.params.get("jaxpr")) for eqn in traced.eqns)
    return [eqn for jaxpr in inside if jaxpr for eqn in jaxpr.eqns if eqn.primitive is all_reduce_p]


def _explicit_axes(mesh: AbstractMesh) -> set[str]:
    """Return the explicit axes of a mesh, including those of one device."""
    return {
        name
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis_type == AxisType.Explicit
    }


def of_whole_arrays(function: Callable, *avals) -> Callable:
    """Return a function that every device of an explicit mesh applies to the whole arrays.

    Args:
      function: function from arrays without explicit axes to a tuple of arrays.
      *avals: types of the results.
    """
    mesh = _mesh(avals)
    if mesh is None or not (explicit := _explicit_axes(mesh)):
        return function

    def run(*operands):
        whole = NamedSharding(mesh, PartitionSpec())
        on_devices = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=explicit,
            check_vma=False,
        )
        with jax.sharding.use_abstract_mesh(mesh):
            results = on_devices(*(resharded(x, whole) for x in operands))
            return tuple(map(resharded, results, (aval.sharding for aval in avals)))

    return run


def resharded(x, sharding: NamedSharding | None):
    """Reshard `x` over explicit mesh axes; None does not change it."""
    if sharding is None:
        return x
    given, wanted = (
        (canonical_spec(spec, x.ndim), spec.unreduced, spec.reduced)
        for spec in (jax.typeof(x).sharding.spec, sharding.spec)
    )
    return x if given == wanted else jax.sharding.reshard(x, sharding)


def _lower_automatic(ctx, operands, division):
    shapes = [[aval.shape for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    call = custom_partitioning(lambda *operands: division.call(*operands))
    x64 = jax.config.jax_enable_x64

    def partition(mesh, operands, results):
        specs = [
            [canonical_spec(x.sharding.spec, len(x.shape)) for x in arrays]
            for arrays in (operands, results)
        ]
        layout = division.layout(*shapes, *specs, dict(mesh.shape))

        def on_device(*shards):
            # The thread may be XLA's, or have another mesh as its current mesh.
            with jax.enable_x64(x64), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return division.on_device(layout, *shards)

        wanted = division.operand_specs(layout), division.result_specs(layout)
        operand_shardings, result_shardings = (
            tuple(NamedSharding(mesh, spec) for spec in specs) for specs in wanted
        )
        return mesh, on_device, result_shardings, operand_shardings

    rule = SdyShardingRule(
        tuple(ArrayMapping(*names) for names in division.operands),
        tuple(ArrayMapping(*names) for names in division.results),
        reduction_factors=division.contracted,
        need_replication_factors=tuple(n for n in division.names if n in division.whole),
    )
    call.def_partition(partition, sharding_rule=rule)
    mesh = _fine_mesh(_mesh(ctx.avals_in), jax_internals.num_automatic_devices(ctx))
    return mlir.lower_fun(call, multiple_results=True)(jax_internals.on_mesh(ctx, mesh), *operands)


def _fine_mesh(mesh: AbstractMesh | None, num_devices: int) -> AbstractMesh:
    """Return the mesh with every axis split into axes of prime size, which have names.

    XLA may shard a dimension over one of these, for example a dimension that is reshaped in two.
    """
    sizes = [num_devices] if mesh is None else mesh.axis_sizes
    primes = [prime for size in sizes for prime in _prime_factors(size)]
    return AbstractMesh(tuple(primes), tuple(f"axis{i}" for i in range(len(primes))))


def _prime_factors(number: int) -> list[int]:
    factors = []
    prime = 2
    while number > 1:
        if number % prime:
            prime += 1
        else:
            factors.append(prime)
            number //= prime
    return factors
