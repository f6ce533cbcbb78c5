"""The primitive `tcgemm_encoded_dot_general`: a product of encoded factors, and a function of it.

    accs = encoding.accumulators(factors)
    results = function(*accs, *operands)

There is one float32 accumulator, or two of a gated product. `unfused` computes the results in JAX,
by products of plain arrays or of packed weights: it types the primitive, and runs wherever no
implementation takes the call. The `Encoding` decides what depends on how factors are stored.

Parameters, all static: options, encoding and function, a closed jaxpr without constants, none of
whose arguments are random keys.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import epilogue, packed_epilogue
from jax_tcgemm.epilogues.parts import parts_of
from jax_tcgemm.epilogues.rounding import of_stored
from jax_tcgemm.primitives import functions, kept_values
from jax_tcgemm.primitives.encodings import ACCUMULATOR, Encoding, Product
from jax_tcgemm.primitives.rules import of_derivative, same_varying, transpose_by_parts
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching

encoded_dot_general_p = core.Primitive("tcgemm_encoded_dot_general")
encoded_dot_general_p.multiple_results = True


def encoded_dot_general(
    encoding: Encoding,
    factors: Sequence[jax.Array],
    operands: Sequence[jax.Array],
    options: CallOptions,
    function: core.ClosedJaxpr,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already.

    `function` is of `accumulators(...)` and the operands, random keys among them; arrays that it
    has closed over become operands, too.
    """
    jax_internals.register_imported()
    found = encoding.instead(factors, operands, options, function, encoded_dot_general)
    if found is not None:
        return found
    function, constants = functions.hoist(function)
    function, operands = functions.without_keys(function, (*operands, *constants))
    params = {"options": options, "encoding": encoding, "function": function}
    return encoded_dot_general_p.bind(*same_varying(*factors), *operands, **params)


def accumulators(encoding: Encoding, factors: Sequence, options: CallOptions) -> list:
    """The types of what a function takes."""

    def made(*factors):
        return encoding.accumulators(factors, ACCUMULATOR, options)

    with selection.unseen():
        return jax.make_jaxpr(made)(*factors).out_avals


def _split(arguments: Sequence, encoding: Encoding) -> tuple[Sequence, Sequence]:
    """The factors of the product, and the operands of the function."""
    return arguments[: encoding.num_factors], arguments[encoding.num_factors :]


def _stored(encoding: Encoding, function: core.ClosedJaxpr) -> tuple[np.dtype, core.ClosedJaxpr]:
    """The dtype that accumulators are stored in for XLA, and the function of such ones."""
    if encoding.stores_narrow:
        return of_stored(function, encoding.num_accumulators)
    return ACCUMULATOR, function


def unfused(*arguments, encoding, options, function) -> list[jax.Array]:
    """Return the results by products without an epilogue, and XLA's code for the function."""
    factors, operands = _split(arguments, encoding)
    dtype, of_products = _stored(encoding, function)
    accs = encoding.accumulators(factors, dtype, options)
    return core.jaxpr_as_fun(of_products)(*accs, *operands)


def bare_products(*arguments, encoding, options, function) -> list[jax.Array]:
    """Return the accumulators of the unfused call."""
    factors, _ = _split(arguments, encoding)
    return encoding.accumulators(factors, _stored(encoding, function)[0], options)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, encoding, options, function):
    """Add the new dimension to the product, and map the function over it.

    If only operands of the function are mapped, the product is computed once.
    """
    params = {"encoding": encoding, "options": options, "function": function}
    if all(dim is None for dim in dims):
        out = encoded_dot_general_p.bind(*args, **params)
        return out, [None] * len(out)
    size = axis_data.size
    (factors, operands), (factor_dims, operand_dims) = (_split(x, encoding) for x in (args, dims))
    acc, *_ = types = function.in_avals[: encoding.num_accumulators]
    if all(dim is None for dim in factor_dims):
        of_accs = jax.make_jaxpr(lambda *accs: accs)(*types)
        accs = encoded_dot_general(encoding, factors, (), options, of_accs)
        in_axes = *[None] * len(accs), *operand_dims
        out = jax.vmap(core.jaxpr_as_fun(function), in_axes, axis_size=size)(*accs, *operands)
        return out, [0] * len(out)
    reduces = any(x.shape != acc.shape for x in function.out_avals)
    found = encoding.batched(factors, factor_dims, size, reduces)
    if found is None:
        out = jax.vmap(lambda *xs: unfused(*xs, **params), tuple(dims), axis_size=size)(*args)
        return out, [0] * len(out)
    encoding, factors, in_acc = found
    out_dims = tuple(in_acc if x.ndim == acc.ndim else 0 for x in function.out_avals)
    types = *accumulators(encoding, factors, options), *map(jax.typeof, operands)
    in_dims = *[in_acc] * encoding.num_accumulators, *operand_dims
    function = functions.mapped(function, types, in_dims, out_dims, size)
    return encoded_dot_general(encoding, factors, operands, options, function), out_dims


batching.fancy_primitive_batchers[encoded_dot_general_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, *, encoding, options, function):
    """Differentiate the function, given the encoding's tangents of the accumulators."""
    (factors, operands), (moving, rest) = (_split(x, encoding) for x in (primals, tangents))
    daccs = encoding.tangents(factors, moving, options)

    def run(kept):
        params = {"encoding": encoding, "options": options, "function": kept}
        return encoded_dot_general_p.bind(*primals, **params)

    daccs = [None] * encoding.num_accumulators if daccs is None else daccs
    return kept_values.jvp(function, run, operands, daccs, rest)


def _transpose(cotangents, *operands, **params):
    """Transpose the unfused call, which is linear in some operands."""
    return transpose_by_parts(unfused, cotangents, operands, **of_derivative(params))


def _series(primals, series, **params):
    return functions.series(unfused, primals, series, **of_derivative(params))


ad.primitive_jvps[encoded_dot_general_p] = _jvp
ad.primitive_transposes[encoded_dot_general_p] = _transpose
jax_internals.register_jet(encoded_dot_general_p, _series)


def _flops(*arguments, encoding, **_) -> int:
    """Count the operations of the product."""
    return encoding.flops(_split(arguments, encoding)[0])


jax_internals.register_roofline(encoded_dot_general_p, _flops)


# --- typing and lowering --------------------------------------------------------------------------


def product_of(*avals_and_params) -> Product:
    """Describe one call to its planner, from the types of its operands and its params.

    The operands may be one device's shards of the arrays that the function was traced with.
    """
    *avals, params = avals_and_params
    encoding: Encoding = params["encoding"]
    factors, operands = _split(avals, encoding)
    function = jax_internals.without_hi_primitives(params["function"])
    acc = jax.ShapeDtypeStruct(encoding.shape(factors), ACCUMULATOR)
    if acc.shape != function.in_avals[0].shape:
        accs = [acc] * encoding.num_accumulators
        function = functions.of_part(function, len(accs), *accs, *operands)
    shapes = tuple(tuple(x.shape) for x in operands)
    return encoding.product_of(factors, shapes, function, params["options"])


def make_plan(product: Product, device: selection.Device, obstacle: str = ""):
    """Plan a product by its own planner, device/epilogue.py or device/packed_epilogue.py."""
    is_packed = isinstance(product, packed_epilogue.Product)
    return (packed_epilogue if is_packed else epilogue).make_plan(product, device, obstacle)


def _carry_out(plan, *arguments) -> list[jax.Array]:
    is_packed = isinstance(plan, packed_epilogue.Plan)
    return (packed_epilogue if is_packed else epilogue).product_with_epilogue(plan, *arguments)


def division_of(*avals_and_params) -> partitioning.Division:
    """Describe how devices may divide a call: as the encoding and the function allow."""
    *avals, params = avals_and_params
    encoding, options = params["encoding"], params["options"]
    factors, _ = _split(avals, encoding)
    parts = parts_of(params["function"], encoding.num_accumulators)
    names = encoding.names(factors)
    others, results, of_function = functions.names_of_parts(parts, names.accumulator)

    def call(*arguments):
        factors, operands = _split(arguments, encoding)
        accs = accumulators(encoding, factors, options)
        own = jax.make_jaxpr(parts)(*accs, *map(jax.typeof, operands))
        return tuple(encoded_dot_general_p.bind(*arguments, **params | {"function": own}))

    return partitioning.Division(
        operands=(*names.factors, *others),
        results=tuple(results),
        call=call,
        whole=tuple(sorted(names.whole | of_function)),
    )


def obstacle_to_division(
    operands: Sequence, product: Product, params, device: selection.Device
) -> str:
    """Why a call is run unfused where devices divide it; "" where each makes a part of it."""
    encoding = params["encoding"]
    parts = parts_of(params["function"], encoding.num_accumulators)
    return encoding.obstacle_to_division(_split(operands, encoding)[0], parts, product, device)


_rules = encoded_dot_general_p, unfused, make_plan, product_of
functions.define_types(*_rules)
functions.define_lowering(
    *_rules,
    division_of=division_of,
    obstacle_to_division=obstacle_to_division,
    carry_out=_carry_out,
)
