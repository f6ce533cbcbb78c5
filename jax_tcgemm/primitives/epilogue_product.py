"""The primitive `tcgemm_epilogue_product`: a product and an epilogue function of it.

    accs = encoding.accumulators(operands)
    results = rows.masked(function(*accs, *rows.given(epilogue_operands)))

There is one accumulator, or two of a gated product. `unfused` computes the results in JAX, by
products without an epilogue: it types the primitive, and runs wherever no implementation takes the
call. The `Encoding` decides what depends on how operands are stored: as plain arrays, with block
scales, or as a packed weight. Of a grouped product, which masks the results in rows that belong to
no group, epilogue_operands may be held by group.

Parameters, all static:
  options: options of the call.
  encoding: how the product's operands are stored.
  function: the epilogue, a closed jaxpr without constants and without arguments that are random
    keys.
  in_place: None, or the index of the epilogue operand whose memory the first result takes. XLA
    copies that operand first if it is used again.
  xla_dtype: None, or the dtype in which partial products are added over devices, and in which XLA
    computes the epilogue on a GPU where no kernel runs the call.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.concatenation import split_concatenated_results
from jax_tcgemm.epilogues.reductions import split_off_reductions
from jax_tcgemm.epilogues.rounding import narrowed, of_stored
from jax_tcgemm.epilogues.shard_function import shard_function
from jax_tcgemm.primitives import functions, kept_values
from jax_tcgemm.primitives.encodings import Encoding, Names, Product
from jax_tcgemm.primitives.rules import moved, of_derivative, same_varying, transpose_by_tracing
from jax_tcgemm.primitives.transposes import ProductLayout, Reading
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.layers import Layer, PullBack
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching

epilogue_product_p = core.Primitive("tcgemm_epilogue_product")
epilogue_product_p.multiple_results = True


def epilogue_product(
    encoding: Encoding,
    operands: Sequence[jax.Array],
    epilogue_operands: Sequence[jax.Array],
    options: CallOptions,
    function: core.ClosedJaxpr,
    *,
    in_place: int | None = None,
    xla_dtype: np.dtype | None = None,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already.

    `function` is of `encoding.argument_types(...)`, random keys among them; arrays that it
    has closed over become epilogue operands, too.
    """
    jax_internals.register_imported()
    while (found := encoding.instead(operands, options)) is not None:
        encoding, operands, options = found
    function, constants = functions.hoist(function)
    function, epilogue_operands = functions.without_keys(function, (*epilogue_operands, *constants))
    arguments = (*same_varying(*operands), *epilogue_operands)
    params = {"options": options, "encoding": encoding, "function": function}
    params |= {"in_place": in_place, "xla_dtype": xla_dtype}
    if encoding.runs_unfused(operands, options):
        return _from_accumulators(type(encoding).accumulators, arguments, params)
    return epilogue_product_p.bind(*arguments, **params)


def bare_product(
    encoding: Encoding, operands: Sequence[jax.Array], dtype, options: CallOptions
) -> jax.Array:
    """Return the accumulator of an encoding that has one, rounded to a dtype."""
    (acc,) = encoding.types(operands, options)
    function = _rounding(acc, np.dtype(dtype), jax_internals.trace_context())
    return epilogue_product(encoding, operands, (), options, function)[0]


@functools.lru_cache(maxsize=1024)
def _rounding(acc, dtype: np.dtype, context) -> core.ClosedJaxpr:
    del context
    return jax.make_jaxpr(lambda acc: [acc.astype(dtype)])(acc)


def with_layer(
    encoding: Encoding,
    operands: Sequence[jax.Array],
    epilogue_operands: Sequence[jax.Array],
    options: CallOptions,
    layer: Layer | PullBack,
    *,
    in_place: int | None = None,
) -> list[jax.Array]:
    """`epilogue_product` with the epilogue of a layer."""
    types = encoding.argument_types(operands, epilogue_operands, options)
    function = functions.traced(layer, tuple(types))
    how = {"in_place": in_place, "xla_dtype": layer.xla_dtype(*epilogue_operands)}
    return epilogue_product(encoding, operands, epilogue_operands, options, function, **how)


def _split(arguments: Sequence, encoding: Encoding) -> tuple[Sequence, Sequence]:
    """Split arguments into the operands of the product and those of the epilogue."""
    return arguments[: encoding.num_operands], arguments[encoding.num_operands :]


# --- the unfused call -----------------------------------------------------------------------------


def unfused(*arguments, **params) -> list[jax.Array]:
    """Return the results by products without an epilogue, and XLA's code for the epilogue.

    If the epilogue begins by rounding the accumulators, the products are rounded, so that XLA
    stores them in the narrower dtype. If the epilogue reduces results, XLA computes the reductions;
    the other results come from another call of this primitive, which may be fused.
    """
    return _unfused(arguments, params | {"xla_dtype": None})


def unfused_on_gpu(*arguments, **params) -> list[jax.Array]:
    """`unfused` with the epilogue computed in `xla_dtype`."""
    return _unfused(arguments, params)


def _unfused(arguments, params) -> list[jax.Array]:
    if (split := _split_off_reductions(**params)) is not None:
        return core.jaxpr_as_fun(split[1])(*bare_products(*arguments, **params))
    return _from_accumulators(_accumulators, arguments, params)


def _from_accumulators(accumulators: Callable, arguments, params) -> list[jax.Array]:
    """Return the results, with XLA's code for the epilogue.

    `accumulators(encoding, operands, dtype, options)` computes the accumulators as arrays.
    """
    encoding = params["encoding"]
    operands, _ = _split(arguments, encoding)
    dtype, function = _stored(**params)
    accs = accumulators(encoding, operands, dtype, params["options"])
    return _applied(function, accs, arguments, params)


def _applied(function: core.ClosedJaxpr, accs, arguments, params) -> list[jax.Array]:
    """The results, from accumulators that are arrays."""
    encoding, options = params["encoding"], params["options"]
    operands, epilogue_operands = _split(arguments, encoding)
    rows = encoding.rows(operands, options)
    return rows.masked(core.jaxpr_as_fun(function)(*accs, *rows.given(epilogue_operands)))


def _stored(*, encoding, function, xla_dtype, **_) -> tuple[np.dtype, core.ClosedJaxpr]:
    """Return the dtype in which XLA stores accumulators, and the epilogue that takes that dtype."""
    if xla_dtype is not None:
        return xla_dtype, narrowed(function, encoding.num_accumulators, xla_dtype)
    if encoding.stores_narrow:
        return of_stored(function, encoding.num_accumulators)
    return encoding.accumulator, function


def _split_off_reductions(*, encoding, function, **_):
    """`split_off_reductions` of an epilogue whose results the call does not mask, else None."""
    return None if encoding.masks_results else split_off_reductions(function)


def bare_products(*arguments, **params) -> list[jax.Array]:
    """Return the inputs of XLA's part of an unfused call.

    These are the accumulators or, if reductions were split off, the results without them.
    """
    if (split := _split_off_reductions(**params)) is not None:
        return epilogue_product_p.bind(*arguments, **params | {"function": split[0]})
    encoding = params["encoding"]
    operands, _ = _split(arguments, encoding)
    return _accumulators(encoding, operands, _stored(**params)[0], params["options"])


def _accumulators(encoding: Encoding, operands, dtype, options: CallOptions) -> list[jax.Array]:
    """The accumulators in a dtype, by products without an epilogue."""
    if not (calls := encoding.product_calls(operands)):
        return encoding.accumulators(operands, dtype, options)
    return encoding.split_products(
        [bare_product(*call, dtype, options) for call in calls], operands
    )


def _accumulators_by_primitive(encoding: Encoding, operands, dtype, options) -> list[jax.Array]:
    """Return `_accumulators`, by a call of this primitive if the encoding has bare kernels."""
    if encoding.is_bare:
        return [bare_product(encoding, operands, dtype, options)]
    return _accumulators(encoding, operands, dtype, options)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, **params):
    """Add the new dimension to the product, and map the epilogue over it.

    If only operands of the epilogue are mapped, the product is computed once.
    """
    if all(dim is None for dim in dims):
        out = epilogue_product_p.bind(*args, **params)
        return out, [None] * len(out)
    encoding, options, function = (params[key] for key in ("encoding", "options", "function"))
    operands, epilogue_operands = _split(args, encoding)
    operand_dims, epilogue_dims = _split(dims, encoding)
    number, size = encoding.num_accumulators, axis_data.size
    if all(dim is None for dim in operand_dims):
        accs = _accumulators_by_primitive(encoding, operands, encoding.accumulator, options)

        def of_operands(*epilogue_operands):
            return _applied(function, accs, (*operands, *epilogue_operands), params)

        out = jax.vmap(of_operands, tuple(epilogue_dims), axis_size=size)(*epilogue_operands)
        return out, [0] * len(out)
    reduces = _reduces(function, number)
    mesh_axis = axis_data.explicit_mesh_axis
    found = encoding.batched(operands, operand_dims, size, reduces=reduces, mesh_axis=mesh_axis)
    if found is None and encoding.is_bare:
        return [_mapped_product(operands, operand_dims, size, mesh_axis, params)], [0]
    if found is None:
        out = jax.vmap(lambda *xs: unfused(*xs, **params), tuple(dims), axis_size=size)(*args)
        return out, [0] * len(out)
    encoding, operands, acc_dim = found
    out_dims = tuple(_new_dimension(x, function.in_avals[0], acc_dim) for x in function.out_avals)
    in_place = params["in_place"]
    others = encoding.batched_epilogue_operands(epilogue_operands, epilogue_dims)
    epilogue_operands, epilogue_dims = map(list, others)
    if in_place is not None and epilogue_dims[in_place] is None:
        in_place = None
    elif in_place is not None:  # The operand must have its dimensions in the result's order.
        x, dim = epilogue_operands[in_place], epilogue_dims[in_place]
        epilogue_operands[in_place] = jnp.moveaxis(x, dim, out_dims[0])
        epilogue_dims[in_place] = out_dims[0]
    types = tuple(encoding.argument_types(operands, epilogue_operands, options))
    in_dims = *[acc_dim] * number, *epilogue_dims
    function = functions.mapped(function, types, in_dims, out_dims, size)
    how = {"in_place": in_place, "xla_dtype": params["xla_dtype"]}
    out = epilogue_product(encoding, operands, epilogue_operands, options, function, **how)
    return out, out_dims


def _mapped_product(operands, dims, size: int, mesh_axis, params) -> jax.Array:
    """A bare product of mapped operands: one of another encoding, or one for each entry."""
    encoding, options = params["encoding"], params["options"]
    (result,) = params["function"].out_avals

    def product(encoding, operands):
        return bare_product(encoding, operands, result.dtype, options)

    out = encoding.batched_product(operands, dims, size, mesh_axis, product)
    if out is not None:
        return out
    mapped = [
        moved(x, dim, 0, size) for x, dim in zip(operands, dims, strict=True) if dim is not None
    ]

    def of_entry(entry):
        rest = iter(entry)
        own = [x if dim is None else next(rest) for x, dim in zip(operands, dims, strict=True)]
        return product(encoding, own)

    return lax.map(of_entry, mapped)


def _new_dimension(result, acc, acc_dim: int) -> int:
    """Return the new dimension of a result, which is `acc_dim` of the accumulator."""
    if result.ndim == acc.ndim:
        return acc_dim
    if result.ndim < acc.ndim:
        return 0
    # Two arrays of the accumulator's shape, stacked before or after the new dimension.
    pair = next(
        i for i in range(result.ndim) if (*result.shape[:i], *result.shape[i + 1 :]) == acc.shape
    )
    return acc_dim + (pair < acc_dim)


@functools.lru_cache(maxsize=1024)
def _reduces(function: core.ClosedJaxpr, num_accumulators: int) -> bool:
    try:
        source, _ = emit(split_concatenated_results(function)[0], num_accumulators)
    except InexpressibleError:
        return False
    return any(result.reduction is not None for result in source.results)


batching.fancy_primitive_batchers[epilogue_product_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    """Differentiate the epilogue, given the encoding's tangents of the accumulators.

    The call returns residuals as further results where the epilogue's derivative needs them.
    Derivatives inherit the implementation, but not the config.
    """
    encoding = params["encoding"]
    operands, epilogue_operands = _split(primals, encoding)
    operand_tangents, epilogue_tangents = _split(tangents, encoding)
    options = params["options"]
    daccs = encoding.tangents(operands, operand_tangents, options, _accumulators_by_primitive)

    def run(kept):
        return epilogue_product_p.bind(*primals, **params | {"function": kept})

    rows = encoding.rows(operands, options)
    how = {"expand": rows.given, "mask": rows.masked}
    return kept_values.jvp(
        params["function"], run, epilogue_operands, daccs, epilogue_tangents, **how
    )


def _transpose(cotangents, *operands, **params):
    """Transpose the unfused call, which is linear in some operands."""
    return transpose_by_tracing(unfused, cotangents, operands, **of_derivative(params))


def _series(primals, series, **params):
    return functions.series(unfused, primals, series, **of_derivative(params))


ad.primitive_jvps[epilogue_product_p] = _jvp
ad.primitive_transposes[epilogue_product_p] = _transpose
jax_internals.register_jet(epilogue_product_p, _series)


# --- other interpreters of JAX ------------------------------------------------------------------


def _flops(*arguments, encoding, **_) -> int:
    """Count the operations of the product."""
    return encoding.flops(_split(arguments, encoding)[0])


jax_internals.register_roofline(epilogue_product_p, _flops)


# --- typing and lowering --------------------------------------------------------------------------


def product_of(*avals_and_params) -> Product:
    """Describe one call to its planner, from the types of its operands and its params.

    The operands may be one device's shards of the arrays that the epilogue was traced with.
    """
    *avals, params = avals_and_params
    encoding: Encoding = params["encoding"]
    operands, epilogue_operands = _split(avals, encoding)
    function = jax_internals.without_hi_primitives(params["function"])
    acc = jax.ShapeDtypeStruct(encoding.shape(operands), encoding.accumulator)
    if acc.shape != function.in_avals[0].shape:
        accs = [acc] * encoding.num_accumulators
        given = encoding.types_given(operands, epilogue_operands)
        function = functions.of_shard(function, len(accs), *accs, *given)
    shapes = tuple(tuple(x.shape) for x in epilogue_operands)
    how = {"options": params["options"], "in_place": params["in_place"]}
    return encoding.product_of(operands, shapes, function, **how)


def division_of(*avals_and_params) -> partitioning.Division:
    """Describe how devices may divide a call: as the encoding and the epilogue allow.

    Where a contracted dimension is divided, the epilogue waits for the sum.
    """
    *avals, params = avals_and_params
    encoding, options = params["encoding"].unsharded(), params["options"]
    operands, epilogue_operands = _split(avals, encoding)
    on_shard = shard_function(params["function"], encoding.num_accumulators)
    names = encoding.names(operands)
    others, results = functions.names_of_shards(on_shard, names.accumulator)
    others = encoding.names_of_epilogue_operands(operands, epilogue_operands, others)

    def bind(encoding, operands, epilogue_operands):
        types = encoding.argument_types(operands, epilogue_operands, options)
        of_shards = jax.make_jaxpr(on_shard)(*types)
        how = params | {"encoding": encoding, "function": of_shards}
        return tuple(epilogue_product_p.bind(*operands, *epilogue_operands, **how))

    def call(*arguments):
        return bind(encoding, *_split(arguments, encoding))

    def call_at(layout):
        def call(*shards):
            operands, epilogue_operands = _split(shards, encoding)
            found = bind(*encoding.of_shards(layout, operands), epilogue_operands)
            return tuple(map(_addend, found)) if layout.reduced else found

        return call

    # Partial products are added over devices in the dtype of a layer's result; gate and up are
    # stacked, so that they are added together.
    sum_dtype, acc_dtype = params["xla_dtype"] or encoding.accumulator, encoding.accumulator

    def multiply(*operands):
        products = encoding.products(operands, sum_dtype, options)
        return (products[0] if len(products) == 1 else jnp.stack(products),)

    def finish(sums, *epilogue_operands):
        products = sums if encoding.num_products == 1 else [*sums[0]]
        accs = encoding.split_products([x.astype(acc_dtype) for x in products], operands)
        return tuple(on_shard(*accs, *epilogue_operands))

    def converted(sums):
        types = params["function"].out_avals
        return tuple(x.astype(own.dtype) for x, own in zip(sums, types, strict=True))

    by_sums = {"finish": converted}
    if names.product is not None:
        both = ("both",) if encoding.num_products > 1 else ()
        of_function_alone = tuple(range(encoding.num_operands, len(avals)))
        by_sums = {"product": multiply, "finish": finish, "addends": ((*both, *names.product),)}
        by_sums |= {"epilogue": of_function_alone}
    return partitioning.Division(
        operands=(*names.operands, *others),
        results=tuple(results),
        call=call,
        call_at=call_at,
        whole=_whole(names, on_shard, (*others, *results)),
        even=names.even,
        **by_sums,
    )


def _whole(names: Names, on_shard, of_function: Sequence) -> tuple[str, ...]:
    """The dimensions that are not divided, given the names of the epilogue's arrays."""
    known = {name for own in (names.accumulator, *names.operands) for name in own}
    own = {name for each in of_function for name in each} - known
    return tuple(sorted(names.whole | own | {names.accumulator[dim] for dim in on_shard.whole}))


def _addend(x: jax.Array) -> jax.Array:
    """Return a result in a dtype that devices can add; all devices but one have zeros."""
    return x.astype(np.uint8) if x.dtype == np.bool_ else x


def obstacle_to_division(
    operands: Sequence, product: Product, params, device: selection.Device
) -> str:
    """Why a call is run unfused where devices divide it; "" where each makes a part of it.

    An epilogue that is of a whole dimension, such as a sum over it, would have every device compute
    all of it where the product alone is divided along it.
    """
    encoding, options = params["encoding"], params["options"]
    on_shard = shard_function(params["function"], encoding.num_accumulators)
    whole = [dim for dim in on_shard.whole if product.shape[dim] != 1]
    operands, _ = _split(operands, encoding)
    return encoding.obstacle_to_division(operands, whole, product, device, options)


def _layout_of(params) -> ProductLayout | None:
    return params["encoding"].layout


def _with_layout(params, layout: ProductLayout) -> dict:
    return params | {"encoding": params["encoding"].with_layout(layout)}


READING = Reading(_layout_of, _with_layout)

_rules = epilogue_product_p, unfused, product_of
functions.define_types(*_rules)
functions.define_lowering(
    *_rules,
    division_of=division_of,
    obstacle_to_division=obstacle_to_division,
    reading=READING,
    unfused_on_gpu=unfused_on_gpu,
)
