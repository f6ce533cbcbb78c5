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
such dimension), and function, a closed jaxpr without constants, none of whose arguments are random
keys.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, epilogue
from jax_tcgemm.epilogues import InexpressibleError, emit
from jax_tcgemm.epilogues.joins import results_apart
from jax_tcgemm.epilogues.parts import parts_of
from jax_tcgemm.epilogues.reductions import reductions_apart
from jax_tcgemm.epilogues.rounding import of_stored
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import functions, kept_values
from jax_tcgemm.primitives.rules import (
    is_moving,
    moved,
    of_derivative,
    same_varying,
    series_by_parts,
    transpose_by_parts,
)
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.fusion import halves
from jax_tcgemm.sharding import partitioning, shardings
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching

epilogue_dot_general_p = core.Primitive("tcgemm_epilogue_dot_general")
epilogue_dot_general_p.multiple_results = True


def accumulators(lhs, *rights, pair: int | None = None, **params) -> list:
    """The types of what a function takes, of products with parameters of `tcgemm_dot_general`."""
    params |= {"preferred_element_type": functions.accumulator_dtype(lhs.dtype, rights[0].dtype)}
    # What was asked for by name is found out when the primitive is lowered.
    params |= {"options": params["options"].selecting()}
    with selection.unseen():
        made = jax.make_jaxpr(lambda *x: _apart(_products(*x, **params), pair))(lhs, *rights)
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
        preferred_element_type=functions.accumulator_dtype(lhs.dtype, rhs.dtype),
        out_sharding=out_sharding,
        function=function,
        num_rhs=len(rights),
        pair=pair,
    )


def unfused(*arguments, function: core.ClosedJaxpr, num_rhs, pair, **params) -> list[jax.Array]:
    """The same by plain products and what XLA makes of the function.

    Products are rounded by themselves where the function does that first, so that they are stored
    so. Of a function that reduces some of its other results only that is XLA's; for the rest there
    is a call of its own.
    """
    if (apart := reductions_apart(function)) is not None:
        results = bare_products(*arguments, function=function, num_rhs=num_rhs, pair=pair, **params)
        return core.jaxpr_as_fun(apart[1])(*results)
    factors, operands = _split(arguments, num_rhs)
    dtype, of_rounded = of_stored(function, _num_accumulators(num_rhs, pair))
    products = _products(*factors, **params | {"preferred_element_type": dtype})
    return core.jaxpr_as_fun(of_rounded)(*_apart(products, pair), *operands)


def bare_products(*arguments, function, num_rhs, pair, **params) -> list[jax.Array]:
    """The plain products of the unfused call, or its call without reductions."""
    if (apart := reductions_apart(function)) is not None:
        own = {"function": apart[0], "num_rhs": num_rhs, "pair": pair}
        return epilogue_dot_general_p.bind(*arguments, **own, **params)
    dtype, _ = of_stored(function, _num_accumulators(num_rhs, pair))
    params |= {"preferred_element_type": dtype}
    return _products(*_split(arguments, num_rhs)[0], **params)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, function, num_rhs, pair, **params):
    """As of a plain product; the function of its result is mapped over the new dimension.

    Where that is one of its other operands only, the product is the same for all, and made once.
    """
    if all(dim is None for dim in dims):
        params |= {"function": function, "num_rhs": num_rhs, "pair": pair}
        out = epilogue_dot_general_p.bind(*args, **params)
        return out, [None] * len(out)
    (lhs, *rights), operands = _split(args, num_rhs)
    factor_dims, operand_dims = _split(dims, num_rhs)
    size, mesh_axis = axis_data.size, axis_data.explicit_mesh_axis
    num_accumulators = _num_accumulators(num_rhs, pair)
    if all(dim is None for dim in factor_dims):
        accs = _apart(_products(lhs, *rights, **params), pair)
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
        params.pop("dimension_numbers"),
        params.pop("permutation"),
    )
    if position and _reduces(function, num_accumulators):
        # In front it is where JAX has it in between, too, and a result is a reduction of that.
        order, position = (order[position], *order[:position], *order[position + 1 :]), 0
    in_acc = position
    if pair is not None:
        pair += position <= pair
        in_acc -= pair < position
    out_sharding = params.pop("out_sharding")
    del params["preferred_element_type"]
    params |= {
        "dimension_numbers": numbers,
        "permutation": order,
        "out_sharding": shardings.with_dimension(out_sharding, position, len(order), mesh_axis),
    }
    rank = function.in_avals[0].ndim
    out_dims = tuple(in_acc if x.ndim == rank else 0 for x in function.out_avals)
    types = *accumulators(lhs, *rights, pair=pair, **params), *map(jax.typeof, operands)
    in_dims = *[in_acc] * num_accumulators, *operand_dims
    params["function"] = functions.mapped(function, types, in_dims, out_dims, size)
    rhs, rhs_up = (*rights, None)[:2]
    return epilogue_dot_general(lhs, rhs, *operands, rhs_up=rhs_up, pair=pair, **params), out_dims


@functools.lru_cache(maxsize=1024)
def _reduces(function: core.ClosedJaxpr, num_accumulators: int) -> bool:
    try:
        source, _ = emit(results_apart(function)[0], num_accumulators)
    except InexpressibleError:
        return False
    return any(result.reduction is not None for result in source.results)


batching.fancy_primitive_batchers[epilogue_dot_general_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, *, function, options, num_rhs, pair, **params):
    """The tangents of the function, for which more results are kept where needed.

    The accumulators' own tangents are made of plain products in the dtype of the operands, so that
    reverse mode is made of such products, too. Derivatives inherit the implementation, but not the
    config.
    """
    (factors, operands), (dfactors, rest) = (_split(x, num_rhs) for x in (primals, tangents))
    of_accs = params | {"options": options.without_config()}
    daccs = _tangents_of_accumulators(factors, dfactors, pair, **of_accs)

    def run(kept):
        own = {"function": kept, "num_rhs": num_rhs, "pair": pair}
        return epilogue_dot_general_p.bind(*primals, options=options, **own, **params)

    return kept_values.jvp(function, run, operands, daccs, rest)


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
    return series_by_parts(unfused, primals, series, **of_derivative(params))


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
    function, num_rhs, pair = (params[key] for key in ("function", "num_rhs", "pair"))
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
    return epilogue.Product(product, function, operand_shapes, num_rhs, pair)


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
    shared = params | {"out_sharding": None}
    function, num_rhs, pair = (shared.pop(key) for key in ("function", "num_rhs", "pair"))
    num_accumulators = _num_accumulators(num_rhs, pair)
    product, parts = plain.division_of(*avals[:2], shared), parts_of(function, num_accumulators)
    (lhs_names, rhs_names), (names,) = product.operands, product.results
    acc_names = _without_pair(names, pair)

    operands, results, whole = functions.names_of_parts(parts, acc_names)
    whole |= {*names} - {*acc_names}

    def call(*arguments):
        factors, operands = _split(arguments, num_rhs)
        accs = accumulators(*factors, pair=pair, **shared)
        own = {"function": jax.make_jaxpr(parts)(*accs, *map(jax.typeof, operands))}
        own |= {"num_rhs": num_rhs, "pair": pair}
        return tuple(epilogue_dot_general_p.bind(*arguments, **own, **shared))

    return partitioning.Division(
        operands=(lhs_names, *[rhs_names] * num_rhs, *operands),
        results=tuple(results),
        call=call,
        product=lambda *factors: tuple(_products(*factors, **shared)),
        addends=(names,) * num_rhs,
        finish=lambda sums, *operands: tuple(parts(*_apart(sums, pair), *operands)),
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
    shared = dict(params)
    function, num_rhs, pair = (shared.pop(key) for key in ("function", "num_rhs", "pair"))
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
)
