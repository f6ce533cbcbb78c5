"""The primitive `tcgemm_epilogue_dot_general`: a product and an elementwise function of it.

    acc = transpose(dot_general(lhs, rhs, dimension_numbers), permutation)
    results = function(acc, *operands)

`acc` has the dtype that the product accumulates in (`accumulator_dtype`); the results are what the
function makes of it. `unfused` is the same in JAX, by a plain product and XLA: it types the
primitive and runs it wherever nothing takes it as one call.

A gated product has two accumulators, which the function takes both: of two right operands, or of
one with a dimension of extent 2 that tells them apart, which is `pair` of the product.

Parameters, all static: those of `tcgemm_dot_general`, whose preferred_element_type is the
accumulator's here and whose out_sharding is that of the product, num_rhs, pair (None: there is no
such dimension), function, a closed jaxpr without constants, none of whose arguments are random
keys, in_place (None, or the number of the function's operand whose memory the first result takes;
XLA copies that operand first where it is needed afterwards) and xla_dtype (the dtype of products
that devices sum, and on a GPU of what XLA computes of the function where no kernel runs the call;
None: as the function says).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, epilogue
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.joins import results_apart
from jax_tcgemm.epilogues.parts import parts_of
from jax_tcgemm.epilogues.reductions import reductions_apart
from jax_tcgemm.epilogues.rounding import narrowed, of_stored
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import functions, kept_values
from jax_tcgemm.primitives.rules import (
    is_moving,
    moved,
    of_derivative,
    same_varying,
    transpose_by_parts,
)
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import accumulator_dtype
from jax_tcgemm.problem.layers import Layer, PullBack, halves
from jax_tcgemm.sharding import partitioning, shardings
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching

epilogue_dot_general_p = core.Primitive("tcgemm_epilogue_dot_general")
epilogue_dot_general_p.multiple_results = True


def accumulators(lhs, *rights, pair: int | None = None, **params) -> list:
    """The types of what a function takes, of products with parameters of `tcgemm_dot_general`."""
    # What was asked for by name is found out when the primitive is lowered.
    params |= {"options": params["options"].selecting()}
    types = tuple(getattr(x, "aval", x) for x in (lhs, *rights))
    return _accumulators(types, pair, tuple(params.items()), jax_internals.trace_context())


@functools.lru_cache(maxsize=1024)
def _accumulators(types, pair: int | None, params, context) -> list:
    del context
    how = dict(params)
    how |= {"preferred_element_type": accumulator_dtype(types[0].dtype, types[1].dtype)}
    with selection.unseen():
        made = jax.make_jaxpr(lambda *x: _apart(_products(*x, **how), pair))(*types)
    return made.out_avals


def _products(lhs, *rights, **params) -> list[jax.Array]:
    return [plain.dot_general(lhs, rhs, **params) for rhs in rights]


def _apart(products: Sequence[jax.Array], pair: int | None) -> Sequence[jax.Array]:
    """The accumulators in products."""
    return products if pair is None else halves(*products, pair)


def _split(arguments: Sequence, num_rhs: int) -> tuple[Sequence, Sequence]:
    """The factors of the products, and the operands of the function."""
    return arguments[: 1 + num_rhs], arguments[1 + num_rhs :]


def _num_accumulators(num_rhs: int, pair: int | None) -> int:
    return num_rhs if pair is None else 2


def epilogue_dot_general(
    lhs,
    rhs,
    *operands,
    options: CallOptions,
    dimension_numbers,
    function: core.ClosedJaxpr,
    rhs_up=None,
    pair: int | None = None,
    permutation=None,
    precision=None,
    out_sharding=None,
    in_place: int | None = None,
    xla_dtype: np.dtype | None = None,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already.

    `function` is of `accumulators(...)` and the operands, random keys among them; arrays that it
    has closed over become operands, too. `rhs_up`: None, or a second right operand.
    """
    jax_internals.register_imported()
    rights = (rhs,) if rhs_up is None else (rhs, rhs_up)
    if permutation is None:
        permutation = tuple(range(plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)))
    function, constants = functions.hoist(function)
    function, operands = functions.without_keys(function, (*operands, *constants))
    return epilogue_dot_general_p.bind(
        *same_varying(lhs, *rights),
        *operands,
        options=options,
        dimension_numbers=dimension_numbers,
        permutation=tuple(permutation),
        precision=precision,
        preferred_element_type=accumulator_dtype(lhs.dtype, rhs.dtype),
        out_sharding=out_sharding,
        function=function,
        num_rhs=len(rights),
        pair=pair,
        in_place=in_place,
        xla_dtype=xla_dtype,
    )


def with_layer(
    lhs, rhs, *operands, layer: Layer | PullBack, rhs_up=None, pair=None, in_place=None, **params
) -> list[jax.Array]:
    """`epilogue_dot_general` with the epilogue of a layer."""
    rights = (rhs,) if rhs_up is None else (rhs, rhs_up)
    accs = accumulators(lhs, *rights, pair=pair, **params)
    own = {
        "function": functions.traced(layer, (*accs, *map(jax.typeof, operands))),
        **{"rhs_up": rhs_up, "pair": pair, "in_place": in_place},
        "xla_dtype": layer.xla_dtype(*operands),
    }
    return epilogue_dot_general(lhs, rhs, *operands, **own, **params)


# Parameters that a plain product does not have.
_OF_EPILOGUE = ("function", "num_rhs", "pair", "in_place", "xla_dtype")


def _separated(params) -> tuple[dict, dict]:
    """The parameters of the epilogue, and those of the plain products."""
    own = {key: params[key] for key in _OF_EPILOGUE}
    return own, {key: value for key, value in params.items() if key not in own}


def unfused(*arguments, **params) -> list[jax.Array]:
    """The same by plain products and what XLA makes of the function.

    Products are rounded by themselves where the function does that first, so that they are stored
    so. Of a function that reduces some of its other results only that is XLA's; for the rest there
    is a call of its own.
    """
    return _unfused(arguments, params, None)


def unfused_on_gpu(*arguments, **params) -> list[jax.Array]:
    """`unfused` with the function computed in `xla_dtype`."""
    return _unfused(arguments, params, params["xla_dtype"])


def _unfused(arguments, params, xla_dtype: np.dtype | None) -> list[jax.Array]:
    own, shared = _separated(params)
    if (apart := reductions_apart(own["function"])) is not None:
        return core.jaxpr_as_fun(apart[1])(*bare_products(*arguments, **params))
    factors, operands = _split(arguments, own["num_rhs"])
    dtype, of_products = _stored(own, xla_dtype)
    products = _products(*factors, **shared | {"preferred_element_type": dtype})
    return core.jaxpr_as_fun(of_products)(*_apart(products, own["pair"]), *operands)


def _stored(own: dict, xla_dtype: np.dtype | None) -> tuple[np.dtype, core.ClosedJaxpr]:
    """The dtype that XLA's products are stored in, and the function of such products."""
    number = _num_accumulators(own["num_rhs"], own["pair"])
    if xla_dtype is None:
        return of_stored(own["function"], number)
    return xla_dtype, narrowed(own["function"], number, xla_dtype)


def bare_products(*arguments, **params) -> list[jax.Array]:
    """The plain products of `unfused_on_gpu`, or its call without reductions."""
    own, shared = _separated(params)
    if (apart := reductions_apart(own["function"])) is not None:
        return epilogue_dot_general_p.bind(*arguments, **params | {"function": apart[0]})
    dtype, _ = _stored(own, own["xla_dtype"])
    factors, _ = _split(arguments, own["num_rhs"])
    return _products(*factors, **shared | {"preferred_element_type": dtype})


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, **params):
    """As of a plain product; the function of its result is mapped over the new dimension.

    Where that is one of its other operands only, the product is the same for all, and made once.
    """
    if all(dim is None for dim in dims):
        out = epilogue_dot_general_p.bind(*args, **params)
        return out, [None] * len(out)
    own, shared = _separated(params)
    function, num_rhs, pair = own["function"], own["num_rhs"], own["pair"]
    (lhs, *rights), operands = _split(args, num_rhs)
    factor_dims, operand_dims = _split(dims, num_rhs)
    size, mesh_axis = axis_data.size, axis_data.explicit_mesh_axis
    num_accumulators = _num_accumulators(num_rhs, pair)
    if all(dim is None for dim in factor_dims):
        accs = _apart(_products(lhs, *rights, **shared), pair)
        in_axes = *[None] * num_accumulators, *operand_dims
        out = jax.vmap(core.jaxpr_as_fun(function), in_axes, axis_size=size)(*accs, *operands)
        return out, [0] * len(out)
    lhs_dim, *right_dims = factor_dims
    rhs_dim = next((dim for dim in right_dims if dim is not None), None)
    if rhs_dim is not None:
        pairs = zip(rights, right_dims, strict=True)
        rights = [moved(x, dim, rhs_dim, size) for x, dim in pairs]
    numbers, order, position = plain.batched_numbers(
        (lhs.ndim, rights[0].ndim),
        (lhs_dim, rhs_dim),
        shared.pop("dimension_numbers"),
        shared.pop("permutation"),
    )
    if position and _reduces(function, num_accumulators):
        # In front it is where JAX has it in between, too, and a result is a reduction of that.
        order, position = (order[position], *order[:position], *order[position + 1 :]), 0
    in_acc = position
    if pair is not None:
        pair += position <= pair
        in_acc -= pair < position
    out_sharding = shared.pop("out_sharding")
    del shared["preferred_element_type"]
    shared |= {
        "dimension_numbers": numbers,
        "permutation": order,
        "out_sharding": shardings.with_dimension(out_sharding, position, len(order), mesh_axis),
    }
    out_dims = tuple(_new_dimension(x, function.in_avals[0], in_acc) for x in function.out_avals)
    in_place, operands, operand_dims = own["in_place"], [*operands], [*operand_dims]
    if in_place is not None and operand_dims[in_place] is None:
        in_place = None
    elif in_place is not None:  # It lies as the result does.
        operands[in_place] = jnp.moveaxis(operands[in_place], operand_dims[in_place], out_dims[0])
        operand_dims[in_place] = out_dims[0]
    types = *accumulators(lhs, *rights, pair=pair, **shared), *map(jax.typeof, operands)
    in_dims = *[in_acc] * num_accumulators, *operand_dims
    own = {
        "function": functions.mapped(function, types, in_dims, out_dims, size),
        "rhs_up": rights[1] if num_rhs == 2 else None,
        "pair": pair,
        "in_place": in_place,
        "xla_dtype": own["xla_dtype"],
    }
    return epilogue_dot_general(lhs, rights[0], *operands, **own, **shared), out_dims


def _new_dimension(result, acc, in_acc: int) -> int:
    """Where a result has the new dimension that is `in_acc` of the accumulator."""
    if result.ndim == acc.ndim:
        return in_acc
    if result.ndim < acc.ndim:
        return 0
    # Two arrays of the accumulator's shape, stacked before or after the new dimension.
    pair = next(
        i for i in range(result.ndim) if (*result.shape[:i], *result.shape[i + 1 :]) == acc.shape
    )
    return in_acc + (pair < in_acc)


@functools.lru_cache(maxsize=1024)
def _reduces(function: core.ClosedJaxpr, num_accumulators: int) -> bool:
    try:
        source, _ = emit(results_apart(function)[0], num_accumulators)
    except InexpressibleError:
        return False
    return any(result.reduction is not None for result in source.results)


batching.fancy_primitive_batchers[epilogue_dot_general_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    """The tangents of the function, for which more results are kept where needed.

    The accumulators' own tangents are made of plain products in the dtype of the operands, so that
    reverse mode is made of such products, too. Derivatives inherit the implementation, but not the
    config.
    """
    own, shared = _separated(params)
    (factors, operands), (dfactors, rest) = (_split(x, own["num_rhs"]) for x in (primals, tangents))
    daccs = _tangents_of_accumulators(factors, dfactors, own["pair"], **of_derivative(shared))

    def run(kept):
        return epilogue_dot_general_p.bind(*primals, **params | {"function": kept})

    return kept_values.jvp(own["function"], run, operands, daccs, rest)


def _tangents_of_accumulators(primals, tangents, pair, *, preferred_element_type, **params):
    """Those that nothing moves are None."""
    (lhs, *rights), (dlhs, *drights) = primals, tangents
    dtype = preferred_element_type
    if max(lhs.dtype.itemsize, rights[0].dtype.itemsize) >= 2:
        dtype = jnp.promote_types(lhs.dtype, rights[0].dtype)
    found = []
    for rhs, drhs in zip(rights, drights, strict=True):
        addends = [
            plain.dot_general(*both, preferred_element_type=dtype, **params)
            for both in [(dlhs, rhs)] * is_moving(dlhs) + [(lhs, drhs)] * is_moving(drhs)
        ]
        wide = [lax.convert_element_type(x, preferred_element_type) for x in addends]
        found.append(functools.reduce(lax.add, wide) if wide else None)
    if pair is not None and found[0] is None:
        return [None, None]
    return _apart(found, pair)


def _transpose(cotangents, *operands, **params):
    """Of a call that is linear in some operands: that of the unfused one."""
    return transpose_by_parts(unfused, cotangents, operands, **of_derivative(params))


ad.primitive_jvps[epilogue_dot_general_p] = _jvp
ad.primitive_transposes[epilogue_dot_general_p] = _transpose


def _series(primals, series, **params):
    return functions.series(unfused, primals, series, **of_derivative(params))


jax_internals.register_jet(epilogue_dot_general_p, _series)


# --- other interpreters of JAX ------------------------------------------------------------------


def _flops(lhs, rhs, *_, num_rhs, **params) -> int:
    """Those of the products."""
    return plain.flops(lhs, rhs, **params) * num_rhs


jax_internals.register_roofline(epilogue_dot_general_p, _flops)


# --- typing and lowering --------------------------------------------------------------------------


def product_of(*avals_and_params) -> epilogue.Product:
    """What one call of the primitive says, from the types of its operands and its params.

    The operands may be one device's parts of those that the function is of.
    """
    *avals, params = avals_and_params
    function, num_rhs, pair, in_place, _ = (params[key] for key in _OF_EPILOGUE)
    function = jax_internals.without_hi_primitives(function)
    (lhs, rhs, *_), operands = _split(avals, num_rhs)
    dtype = function.in_avals[0].dtype
    out = jax.ShapeDtypeStruct(_product_shape(lhs, rhs, params), dtype)
    acc = jax.ShapeDtypeStruct(_without_pair(out.shape, pair), dtype)
    if acc.shape != function.in_avals[0].shape:
        accs = [acc] * _num_accumulators(num_rhs, pair)
        function = functions.of_part(function, len(accs), *accs, *operands)
    product = plain.product_of(lhs, rhs, out, params)
    operand_shapes = tuple(tuple(x.shape) for x in operands)
    return epilogue.Product(product, function, operand_shapes, num_rhs, pair, in_place)


def _without_pair(dims: tuple, pair: int | None) -> tuple:
    """What is said of each dimension of the product, for those of an accumulator."""
    return dims if pair is None else (*dims[:pair], *dims[pair + 1 :])


def _product_shape(lhs, rhs, params) -> tuple[int, ...]:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    shape = [lhs.shape[axis] for axis in lhs_batch]
    for x, known in ((lhs, (*lhs_contract, *lhs_batch)), (rhs, (*rhs_contract, *rhs_batch))):
        shape += [extent for axis, extent in enumerate(x.shape) if axis not in known]
    return tuple(shape[axis] for axis in params["permutation"])


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided over devices: as the plain product, and as the function allows it.

    Where a contracted dimension is divided, the function waits for the sum.
    """
    *avals, params = avals_and_params
    params = params | {"out_sharding": None}
    own, shared = _separated(params)
    function, num_rhs, pair = own["function"], own["num_rhs"], own["pair"]
    num_accumulators = _num_accumulators(num_rhs, pair)
    product, parts = plain.division_of(*avals[:2], shared), parts_of(function, num_accumulators)
    (lhs_names, rhs_names), (names,) = product.operands, product.results
    acc_names = _without_pair(names, pair)

    operands, results, whole = functions.names_of_parts(parts, acc_names)
    whole |= {*names} - {*acc_names}

    def call(*arguments):
        factors, operands = _split(arguments, num_rhs)
        accs = accumulators(*factors, pair=pair, **shared)
        function = jax.make_jaxpr(parts)(*accs, *map(jax.typeof, operands))
        return tuple(epilogue_dot_general_p.bind(*arguments, **params | {"function": function}))

    # Products are summed over devices in the dtype of a layer's result, two of them at once.
    wide = shared["preferred_element_type"]
    summed = shared | {"preferred_element_type": own["xla_dtype"] or wide}

    def multiply(*factors):
        products = _products(*factors, **summed)
        return (products[0] if num_rhs == 1 else jnp.stack(products),)

    def finish(sums, *operands):
        products = sums if num_rhs == 1 else [*sums[0]]
        return tuple(parts(*_apart([x.astype(wide) for x in products], pair), *operands))

    return partitioning.Division(
        operands=(lhs_names, *[rhs_names] * num_rhs, *operands),
        results=tuple(results),
        call=call,
        product=multiply,
        addends=(names,) if num_rhs == 1 else (("both", *names),),
        finish=finish,
        epilogue=tuple(range(1 + num_rhs, len(avals))),
        whole=tuple(sorted(whole)),
    )


def obstacle_to_division(operands, product: epilogue.Product, params, device) -> str:
    """Why a call is divided over devices as a product and a function of that; "" where it is one.

    A function that is of a whole dimension, such as a sum over it, would have every device compute
    all of it where the product alone is divided along it.
    """
    if not dense.is_covered(product.product, device.platform):
        return "no implementation covers the dtypes of the product"
    own, shared = _separated(params)
    function, num_rhs, pair = own["function"], own["num_rhs"], own["pair"]
    parts = parts_of(function, _num_accumulators(num_rhs, pair))
    whole = [dim for dim in parts.whole if function.in_avals[0].shape[dim] != 1]
    if not whole:
        return ""
    factors = operands[:2]
    if partitioning.has_explicit_axes(*factors):
        division = plain.division_of(*factors, shared)
        layout = partitioning.explicit_layout(division, factors, accumulators(*factors, **shared))
        acc_names = _without_pair(division.results[0], pair)
        names = {acc_names[dim] for dim in whole}
        if not names & (layout.divided.keys() | layout.scattered.keys()):
            return ""
    return "devices may divide a dimension that the function takes whole"


def num_rhs(params) -> int:
    """The number of right operands of a call."""
    return params["num_rhs"]


_rules = epilogue_dot_general_p, unfused, epilogue.make_plan, product_of
functions.define_types(*_rules)
functions.define_lowering(
    *_rules,
    division_of=division_of,
    obstacle_to_division=obstacle_to_division,
    carry_out=epilogue.product_with_epilogue,
    num_rhs=num_rhs,
    unfused_on_gpu=unfused_on_gpu,
)
