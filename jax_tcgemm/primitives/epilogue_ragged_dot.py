"""The primitive `tcgemm_epilogue_ragged_dot`: a grouped product and an elementwise function of it.

    acc[*b, i, n] = sum over k of lhs[*b, i, k] * rhs[*b, g, k, n]   for the rows i of group g
    results = function(acc, *operands), and 0 in the rows of no group

Operands of the products are those of `tcgemm_ragged_dot` of form rows: lhs, rhs, group_sizes,
group_offset and, where gathered, gather. A gated product has rhs (*b, g, k, 2, n) and two
accumulators. `acc` has the dtype that the product accumulates in.

With `blocks` the scales of blocks of lhs and rhs follow, lhs_scales as (*b, blocks of m, blocks of
k) and rhs_scales as (*b, g, blocks of n, blocks of k), of a gated product (*b, g, 2, blocks of n,
blocks of k); `acc` is then that of lhs and rhs times their scales, in float32.

The function's operands follow: those that `by_group` marks are held as (*b, g, 1, n) or
(*b, g, 1, 1), each batch dimension of size 1 where it is broadcast; the function is given for each
row that of its group, as (*b, m, n) or (*b, m, 1), 0 for rows of no group. The others it is given
as they are. Each result has the shape of `acc`.

`unfused` is the same in JAX, by plain products and XLA: it types the primitive and runs it wherever
nothing takes it as one call.

Parameters, all static: options, groups (of rhs), gated, gathered, blocks (None, or the
extents along m and k and along n and k of a block of lhs and of rhs), by_group, function (a closed
jaxpr without constants, none of whose arguments are random keys), precision (canonical),
out_sharding (that of acc; None follows lhs and rhs).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, grouped_epilogue
from jax_tcgemm.epilogues.parts import parts_of
from jax_tcgemm.epilogues.rounding import of_stored
from jax_tcgemm.primitives import functions, kept_values
from jax_tcgemm.primitives import ragged_dot as plain
from jax_tcgemm.primitives.encodings.block_scaled import dequantised
from jax_tcgemm.primitives.rows_of_groups import RowsOfGroups, types_given
from jax_tcgemm.primitives.rules import (
    is_moving,
    of_derivative,
    same_varying,
    transpose_by_parts,
)
from jax_tcgemm.problem.block_scales import BlockScales
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import accumulator_dtype
from jax_tcgemm.problem.precision import of_dequantized
from jax_tcgemm.problem.quantized import spread_along
from jax_tcgemm.sharding import partitioning, ragged_division, shardings
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching

epilogue_ragged_dot_p = core.Primitive("tcgemm_epilogue_ragged_dot")
epilogue_ragged_dot_p.multiple_results = True


class Factors(NamedTuple):
    """What the products are of."""

    lhs: object
    rhs: object
    group_sizes: object
    group_offset: object
    gather: object = None
    lhs_scales: object = None
    rhs_scales: object = None

    @property
    def of_product(self) -> tuple:
        """Those of `tcgemm_ragged_dot`, which knows no scales."""
        return tuple(x for x in self[:5] if x is not None)

    @property
    def given(self) -> list:
        """Those that there are, in the order of a call."""
        return [x for x in self if x is not None]


def _split(arguments: Sequence, params) -> tuple[Factors, Sequence]:
    """The factors of the products, and the operands of the function."""
    names = [*Factors._fields[:4], *["gather"] * params["gathered"]]
    names += ["lhs_scales", "rhs_scales"] if params["blocks"] else []
    factors = Factors(**dict(zip(names, arguments, strict=False)))
    return factors, arguments[len(names) :]


def _num_accumulators(gated: bool) -> int:
    return 2 if gated else 1


def arguments_of(factors: Factors, operands, **params) -> list:
    """The types of what a function takes, of random keys and arrays; params but the function."""
    # What was asked for by name is found out when the primitive is lowered.
    params |= {"options": params["options"].selecting()}

    def arguments(factors, *operands):
        varying = iter(same_varying(*factors.given))  # As the primitive has them.
        factors = Factors(*(x if x is None else next(varying) for x in factors))
        accs = _products(factors, **params)
        return accs, _rows(factors, accs[0].shape, params).given(operands)

    with selection.unseen():
        return jax.make_jaxpr(arguments)(factors, *operands).out_avals


def _products(
    factors: Factors, *, gated, by_group=None, gathered=None, blocks=None, **params
) -> list:
    """The accumulators; params of the primitive but the function."""
    del by_group, gathered
    params = {"preferred_element_type": _accumulator_dtype(factors)} | params
    if blocks is not None:
        if gated:
            return _scaled_halves(factors, blocks, **params)
        factors, own = _dequantised(factors, blocks), _of_dequantised(params)
        return _products(factors, gated=False, **params | own)
    if not gated:
        return [plain.ragged_dot(*factors[:5], **params)]
    rhs = factors.rhs
    if jax.typeof(rhs).sharding.spec.partitions[-1]:
        # Columns that are divided by explicit axes cannot be put side by side.
        rights = (rhs[..., 0, :], rhs[..., 1, :])
        both = [factors._replace(rhs=one) for one in rights]
        return [plain.ragged_dot(*x[:5], **params) for x in both]
    rhs = lax.collapse(rhs, rhs.ndim - 2)
    product = plain.ragged_dot(factors.lhs, rhs, *factors[2:5], **params)
    return jnp.split(product, 2, axis=-1)


def _accumulator_dtype(factors: Factors) -> np.dtype:
    if factors.lhs_scales is not None:
        return np.dtype(np.float32)
    return accumulator_dtype(factors.lhs.dtype, factors.rhs.dtype)


# --- scales of blocks ---------------------------------------------------------------------------


def _scaled_halves(factors: Factors, blocks, *, preferred_element_type, **params) -> list:
    """Both accumulators of a gated product by one that is not."""
    rhs, scales, (of_lhs, (columns, depth)) = factors.rhs, factors.rhs_scales, blocks
    n = rhs.shape[-1]

    def product(rhs, scales, columns):
        own = factors._replace(rhs=rhs, rhs_scales=scales)
        how = {"gated": False, "by_group": (), "blocks": (of_lhs, (columns, depth)), **params}
        (acc,) = arguments_of(own, (), gathered=factors.gather is not None, **how)
        rounded = jax.make_jaxpr(lambda acc: [acc.astype(preferred_element_type)])(acc)
        return epilogue_ragged_dot(own, (), function=rounded, **how)[0]

    if jax.typeof(rhs).sharding.spec.partitions[-1]:
        # Columns that are divided by explicit axes cannot be put side by side.
        return [product(rhs[..., i, :], scales[..., i, :, :], columns) for i in range(2)]
    if n % columns != 0:
        # A short block of one matrix has the other one's columns behind it.
        scales, columns = spread_along(scales.ndim - 2, scales, n, columns), 1
    rhs = lax.collapse(rhs, rhs.ndim - 2)
    scales = lax.collapse(scales, scales.ndim - 3, scales.ndim - 1)
    return jnp.split(product(rhs, scales, columns), 2, axis=-1)


def _block_scales(factors: Factors, blocks) -> tuple[BlockScales, BlockScales]:
    """Which scale is for which element of lhs, and of rhs as (*batch, groups[, 2], n, k)."""
    *batch, groups, k = factors.rhs.shape[: factors.lhs.ndim]
    *halves, n = factors.rhs.shape[factors.lhs.ndim :]
    matrices = *batch, groups, *halves
    return (
        BlockScales(
            tuple(factors.lhs.shape), tuple(factors.lhs_scales.shape), blocks[0], len(batch)
        ),
        BlockScales((*matrices, n, k), tuple(factors.rhs_scales.shape), blocks[1], len(matrices)),
    )


def _dequantised(factors: Factors, blocks) -> Factors:
    """The same in float32, without scales."""
    found = {name: f(*of(factors)) for name, f, of in _dequantisers(factors, blocks)}
    return factors._replace(**found, lhs_scales=None, rhs_scales=None)


def _dequantisers(factors: Factors, blocks):
    """Of lhs and of rhs its name, what dequantises it, and what finds it and its scales."""
    of_rhs = functools.partial(_dequantised_rhs, k=factors.lhs.ndim - 1)
    for name, f, block in zip(("lhs", "rhs"), (dequantised, of_rhs), blocks, strict=True):
        yield name, functools.partial(f, block=block), operator.attrgetter(name, f"{name}_scales")


def _dequantised_rhs(rhs, scales, block, k):
    """Of a gated product, too, where what tells its matrices apart comes after k."""
    return jnp.moveaxis(dequantised(jnp.moveaxis(rhs, k, -1), scales, block), -1, k)


def _dequantised_with_tangents(factors: Factors, dfactors: Factors, blocks):
    """The same in float32, and their tangents, of which those that nothing moves are None."""
    wide, moving = {"lhs_scales": None, "rhs_scales": None}, {}
    for name, f, of in _dequantisers(factors, blocks):
        wide[name], moving[name] = functions.value_and_tangent(f, of(factors), of(dfactors))
    return factors._replace(**wide), dfactors._replace(**moving)


def _of_dequantised(params) -> dict:
    """What of the parameters changes for a product of dequantised operands."""
    return {
        "options": params["options"].of_dequantized_blocks(),
        "precision": of_dequantized(params["precision"]),
    }


# --- the function of the accumulators -------------------------------------------------------------


def _rows(factors: Factors, shape, params) -> RowsOfGroups:
    """The rows of accumulators of that shape."""
    groups = factors.group_sizes, factors.group_offset, params["groups"]
    return RowsOfGroups.of(*groups, shape, params["by_group"], params["options"])


def of_accumulators(function: core.ClosedJaxpr, factors: Factors, **params) -> Callable:
    """What becomes of the accumulators and the operands: the results."""

    def results(*arguments):
        number = _num_accumulators(params["gated"])
        accs, operands = arguments[:number], arguments[number:]
        rows = _rows(factors, accs[0].shape, params)
        return rows.masked(core.jaxpr_as_fun(function)(*accs, *rows.given(operands)))

    return results


def unfused(*arguments, function: core.ClosedJaxpr, **params) -> list[jax.Array]:
    """The same by plain products and what XLA makes of the function."""
    factors, operands = _split(arguments, params)
    dtype, of_rounded = of_stored(function, _num_accumulators(params["gated"]))
    products = _products(factors, **params, preferred_element_type=dtype)
    return of_accumulators(of_rounded, factors, **params)(*products, *operands)


def bare_products(*arguments, function, **params) -> list[jax.Array]:
    """The plain products of the unfused call."""
    dtype, _ = of_stored(function, _num_accumulators(params["gated"]))
    factors, _ = _split(arguments, params)
    return _products(factors, **params, preferred_element_type=dtype)


def epilogue_ragged_dot(
    factors: Factors,
    operands,
    *,
    options: CallOptions,
    groups,
    gated,
    by_group,
    function: core.ClosedJaxpr,
    blocks=None,
    precision=None,
    out_sharding=None,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already.

    `function` is of `arguments_of(...)`, random keys among them; arrays that it has closed over
    become operands, too.
    """
    jax_internals.register_imported()
    function, constants = functions.hoist(function)
    function, operands = functions.without_keys(function, (*operands, *constants))
    return epilogue_ragged_dot_p.bind(
        *same_varying(*factors.given),
        *operands,
        options=options,
        groups=groups,
        gated=gated,
        gathered=factors.gather is not None,
        blocks=blocks,
        by_group=(*by_group, *(False for _ in constants)),
        function=function,
        precision=precision,
        out_sharding=out_sharding,
    )


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, function, **params):
    """As of a plain product; the function of its result is mapped over the new dimension.

    Where that is one of the function's other operands only, the product is made once.
    """
    if all(dim is None for dim in dims):
        out = epilogue_ragged_dot_p.bind(*args, function=function, **params)
        return out, [None] * len(out)
    by_group, size = params["by_group"], axis_data.size
    factors, operands = _split(args, params)
    factor_dims, operand_dims = _split(dims, params)
    num_accumulators = _num_accumulators(params["gated"])
    if all(dim is None for dim in factor_dims):
        accs = _products(factors, **params)
        f = of_accumulators(function, factors, **params)
        in_axes = *[None] * num_accumulators, *operand_dims
        out = jax.vmap(f, in_axes, axis_size=size)(*accs, *operands)
        return out, [0] * len(out)

    def leading(x, dim):
        """With the mapped dimension first, of size 1 where there is none."""
        return lax.expand_dims(x, (0,)) if dim is None else jnp.moveaxis(x, dim, 0)

    factors = Factors(
        *(x if x is None else leading(x, dim) for x, dim in zip(factors, factor_dims, strict=True))
    )
    if params["blocks"]:
        # Scales have the batch dimensions of what they scale.
        for side in ("lhs", "rhs"):
            pair = {name: getattr(factors, name) for name in (side, f"{side}_scales")}
            own = max(x.shape[0] for x in pair.values())
            pair = {name: jnp.broadcast_to(x, (own, *x.shape[1:])) for name, x in pair.items()}
            factors = factors._replace(**pair)
    triples = zip(operands, operand_dims, by_group, strict=True)
    operands = [
        leading(x, dim) if is_by_group or dim is not None else x for x, dim, is_by_group in triples
    ]
    ndim = factors.group_sizes.ndim + 1
    params["out_sharding"] = shardings.with_dimension(
        params["out_sharding"], 0, ndim, axis_data.explicit_mesh_axis
    )
    types = tuple(arguments_of(factors, operands, **params))
    in_dims = (
        *[0] * num_accumulators,
        *(
            0 if is_by_group or dim is not None else None
            for dim, is_by_group in zip(operand_dims, by_group, strict=True)
        ),
    )
    out_dims = (0,) * len(function.out_avals)
    function = functions.mapped(function, types, in_dims, out_dims, size)
    out = epilogue_ragged_dot_p.bind(*factors.given, *operands, function=function, **params)
    return out, out_dims


batching.fancy_primitive_batchers[epilogue_ragged_dot_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, *, function, **params):
    """As of `tcgemm_epilogue_dot_general`, the plain products being grouped ones."""
    (factors, operands), (dfactors, rest) = (_split(x, params) for x in (primals, tangents))
    daccs = _tangents_of_accumulators(factors, dfactors, params)

    def run(kept):
        return epilogue_ragged_dot_p.bind(*primals, function=kept, **params)

    rows = _rows(factors, function.in_avals[0].shape, params)
    own = rows.given, rows.masked
    return kept_values.jvp(function, run, operands, daccs, rest, expand=own[0], mask=own[1])


def _tangents_of_accumulators(factors: Factors, dfactors: Factors, params) -> list:
    """Those that nothing moves are None."""
    wide = _accumulator_dtype(factors)
    if params["blocks"]:
        factors, dfactors = _dequantised_with_tangents(factors, dfactors, params["blocks"])
        params = params | _of_dequantised(params) | {"blocks": None}
    dtype = np.dtype(jnp.promote_types(factors.lhs.dtype, factors.rhs.dtype))
    dtype = dtype if dtype.itemsize > 1 else wide
    how = of_derivative(params) | {"preferred_element_type": dtype}
    addends = [
        _products(factors._replace(**{name: tangent}), **how)
        for name, tangent in (("lhs", dfactors.lhs), ("rhs", dfactors.rhs))
        if tangent is not None and is_moving(tangent)
    ]
    if not addends:
        return [None] * _num_accumulators(params["gated"])
    sums = zip(*addends, strict=True)
    return [functools.reduce(lax.add, [x.astype(wide) for x in own]) for own in sums]


def _transpose(cotangents, *operands, **params):
    """Of a call that is linear in some operands: that of the unfused one."""
    return transpose_by_parts(unfused, cotangents, operands, **of_derivative(params))


ad.primitive_jvps[epilogue_ragged_dot_p] = _jvp
ad.primitive_transposes[epilogue_ragged_dot_p] = _transpose


def _series(primals, series, **params):
    return functions.series(unfused, primals, series, **of_derivative(params))


jax_internals.register_jet(epilogue_ragged_dot_p, _series)


# --- other interpreters of JAX ------------------------------------------------------------------


def _of_product(params) -> dict:
    """The parameters of `tcgemm_ragged_dot` of the bare product."""
    own = ("function", "by_group", "blocks", "gated")
    rest = {k: v for k, v in params.items() if k not in own}
    return rest | {"form": "rows", "rhs_transposed": False}


def _flops(*args, **params) -> int:
    """Those of the products of all rows, as if each were of a group."""
    factors, _ = _split(args, params)
    number = _num_accumulators(params["gated"])
    return plain.flops(*factors.of_product, **_of_product(params)) * number


jax_internals.register_roofline(epilogue_ragged_dot_p, _flops)


# --- typing and lowering --------------------------------------------------------------------------


def product_of(*avals_and_params) -> grouped_epilogue.Product:
    """What one call of the primitive says, from the types of its operands and its params.

    The operands may be one device's parts of those that the function is of.
    """
    *avals, params = avals_and_params
    factors, operands = _split(avals, params)
    function, by_group = params["function"], params["by_group"]
    function = jax_internals.without_hi_primitives(function)
    dtype = function.in_avals[0].dtype
    result = jax.ShapeDtypeStruct((), dtype)
    product = plain.product_of(*factors.of_product, result, _of_product(params))
    product = dataclasses.replace(product, gated=params["gated"])
    shape = (*product.batch_shape, product.m, product.n)
    if shape != function.in_avals[0].shape:
        accs = [jax.ShapeDtypeStruct(shape, dtype)] * _num_accumulators(params["gated"])
        given = types_given(operands, by_group, shape)
        function = functions.of_part(function, len(accs), *accs, *given)
    shapes = tuple(tuple(x.shape) for x in operands)
    scales = _block_scales(factors, params["blocks"]) if params["blocks"] else ()
    return grouped_epilogue.Product(product, function, shapes, by_group, scales)


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided over devices: as the plain product, and as the function allows it.

    An operand is divided like the results; the groups of an operand by group are whole, or divided
    as those of rhs.
    """
    *avals, params = avals_and_params
    factors, operands = _split(avals, params)
    shared = {k: v for k, v in params.items() if k not in ("function", "out_sharding")}
    parts = parts_of(params["function"], _num_accumulators(params["gated"]))
    named = {name: x for name, x in factors._asdict().items() if x is not None}

    def bind(factors, *operands, groups):
        how = shared | {"groups": groups}
        types = arguments_of(Factors(**factors), operands, **how)
        function = jax.make_jaxpr(parts)(*types)
        given = *factors.values(), *operands
        return tuple(
            epilogue_ragged_dot_p.bind(*given, function=function, out_sharding=None, **how)
        )

    product = ragged_division.division_of(None, named, _of_product(params))
    by_group = params["by_group"]
    return ragged_division.with_function(product, bind, named, operands, by_group, parts, params)


def obstacle_to_division(operands, product: grouped_epilogue.Product, params, device) -> str:
    """Why a call is divided as a product and a function of that; "" where it is one."""
    if not dense.is_covered(product.product, device.platform):
        return "no implementation covers the dtypes of the product"
    acc = params["function"].in_avals[0]
    whole = parts_of(params["function"], _num_accumulators(params["gated"])).whole
    if any(acc.shape[dim] != 1 for dim in whole):
        return "devices may divide a dimension that the function takes whole"
    return ""


_rules = epilogue_ragged_dot_p, unfused, product_of
functions.define_types(*_rules)
functions.define_lowering(
    *_rules,
    division_of=division_of,
    obstacle_to_division=obstacle_to_division,
)
