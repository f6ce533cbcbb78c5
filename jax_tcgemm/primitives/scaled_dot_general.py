"""The primitive `tcgemm_scaled_dot_general`: a product of operands with scales of blocks.

    acc[*batch, *rows, *columns] =
        sum over k of (lhs * lhs_scales)[*batch, *rows, k] * (rhs * rhs_scales)[*batch, *columns, k]
    results = function(acc, *operands)

Scales are repeated to the shape of what they scale, `BlockScales`; `acc` is float32. `unfused` is
the same in JAX, by a plain product of dequantised operands and XLA: it types the primitive and runs
it wherever nothing takes it as one call.

A gated product has two accumulators, which the function takes both: rhs and its scales have a first
dimension, of extent 2, that tells gate and up apart.

Parameters, all static: options, num_batch, lhs_block and rhs_block (extents of a block of an
operand's last two dimensions), gated, precision, and function, a closed jaxpr without constants,
none of whose arguments are random keys.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import dense, epilogue
from jax_tcgemm.epilogues.parts import parts_of
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import functions, kept_values
from jax_tcgemm.primitives.rules import (
    moved,
    same_varying,
    transpose_by_parts,
)
from jax_tcgemm.problem.block_scales import BlockScales
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.layers import halves
from jax_tcgemm.problem.precision import of_block_scales, of_dequantized
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching

scaled_dot_general_p = core.Primitive("tcgemm_scaled_dot_general")
scaled_dot_general_p.multiple_results = True

_F32 = np.dtype(np.float32)
# lhs, rhs and the scales of both, before the operands of the function.
_NUM_FACTORS = 4


def scaled_dot_general(
    lhs,
    rhs,
    lhs_scales,
    rhs_scales,
    *operands,
    options: CallOptions,
    num_batch: int,
    lhs_block: tuple[int, int],
    rhs_block: tuple[int, int],
    function: core.ClosedJaxpr,
    gated: bool = False,
    precision=None,
) -> list[jax.Array]:
    """Binds the primitive; arguments are checked and canonical already.

    `function` is of `accumulators(...)` and the operands, random keys among them; arrays that it
    has closed over become operands, too.
    """
    jax_internals.register_imported()
    function, constants = functions.hoist(function)
    function, operands = functions.without_keys(function, (*operands, *constants))
    return scaled_dot_general_p.bind(
        *same_varying(lhs, rhs, lhs_scales, rhs_scales),
        *operands,
        options=options,
        num_batch=num_batch,
        lhs_block=lhs_block,
        rhs_block=rhs_block,
        gated=gated,
        precision=precision,
        function=function,
    )


def accumulators(*factors, **params) -> list:
    """The types of what a function takes, of products with parameters of the primitive."""

    def made(lhs, *others):
        return _apart(_product(lhs, *others, **params), lhs, **params)

    with selection.unseen():
        return jax.make_jaxpr(made)(*factors).out_avals


def _product(lhs, rhs, lhs_scales, rhs_scales, *, lhs_block, rhs_block, **params) -> jax.Array:
    """The accumulators by a plain product, which XLA runs."""
    lhs, rhs = dequantised(lhs, lhs_scales, lhs_block), dequantised(rhs, rhs_scales, rhs_block)
    return _plain(lhs, rhs, **params)


def _pair(lhs, gated: bool) -> int | None:
    """The dimension of the plain product that tells two accumulators apart."""
    return lhs.ndim - 1 if gated else None


def _apart(product: jax.Array, lhs, *, gated=False, **_) -> list[jax.Array]:
    """The accumulators in a plain product."""
    return halves(product, _pair(lhs, gated)) if gated else [product]


def _plain(
    lhs: jax.Array, rhs: jax.Array, *, options, num_batch, gated=False, precision=None, **_
) -> jax.Array:
    return plain.dot_general(
        lhs,
        rhs,
        options=options.of_dequantized_blocks(),
        dimension_numbers=_numbers(lhs.ndim, rhs.ndim, num_batch, gated),
        precision=of_dequantized(precision),
        preferred_element_type=_F32,
    )


def dequantised(x: jax.Array, scales: jax.Array, block) -> jax.Array:
    """An operand in float32, whose last two dimensions have scales of such blocks."""
    # Where XLA finds conversions to 8 bits and back beside each other it may leave both out.
    x = lax.optimization_barrier(x)
    return x.astype(_F32) * BlockScales(x.shape, scales.shape, block, 0).spread(scales)


def _numbers(lhs_ndim: int, rhs_ndim: int, num_batch: int, gated: bool):
    batch = tuple(range(num_batch))
    return ((lhs_ndim - 1,), (rhs_ndim - 1,)), (batch, tuple(axis + gated for axis in batch))


def unfused(*arguments, function: core.ClosedJaxpr, **params) -> list[jax.Array]:
    """The same by a plain product and what XLA makes of the function."""
    factors, operands = arguments[:_NUM_FACTORS], arguments[_NUM_FACTORS:]
    accs = _apart(_product(*factors, **params), factors[0], **params)
    return core.jaxpr_as_fun(function)(*accs, *operands)


def bare_products(*arguments, function: core.ClosedJaxpr, **params) -> list[jax.Array]:
    """The plain product of the unfused call."""
    del function
    return [_product(*arguments[:_NUM_FACTORS], **params)]


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, function, **params):
    """A new dimension of the batch, of rows or of columns: whichever operands have it.

    Where only operands of the function have it, the product is the same for all, and made once.
    """
    if all(dim is None for dim in dims):
        out = scaled_dot_general_p.bind(*args, function=function, **params)
        return out, [None] * len(out)
    size, num_batch, gated = axis_data.size, params["num_batch"], params["gated"]
    factors, operands = args[:_NUM_FACTORS], args[_NUM_FACTORS:]
    (lhs, rhs, lhs_scales, rhs_scales), operand_dims = factors, dims[_NUM_FACTORS:]
    lhs_dims, rhs_dims = (tuple(dims[i] for i in (side, 2 + side)) for side in range(2))
    has_lhs, has_rhs = (any(d is not None for d in own) for own in (lhs_dims, rhs_dims))
    if not has_lhs and not has_rhs:
        of_accs = jax.make_jaxpr(lambda *accs: accs)(*function.in_avals[: 1 + gated])
        accs = scaled_dot_general_p.bind(*factors, function=of_accs, **params)
        in_axes = *[None] * len(accs), *operand_dims
        out = jax.vmap(core.jaxpr_as_fun(function), in_axes, axis_size=size)(*accs, *operands)
        return out, [0] * len(out)
    if has_lhs != has_rhs and _has_reductions(function):
        # Which are of rows and columns as they are: each entry has a product of its own.
        has_lhs = has_rhs = True
    position = 0 if has_lhs and has_rhs else num_batch
    if has_lhs:
        lhs, lhs_scales = _with_dimension((lhs, lhs_scales), lhs_dims, position, size)
    if has_rhs:
        rhs, rhs_scales = _with_dimension((rhs, rhs_scales), rhs_dims, position + gated, size)
    in_acc = position if has_lhs else lhs.ndim - 1
    params |= {"num_batch": num_batch + (has_lhs and has_rhs)}
    rank = function.in_avals[0].ndim
    out_dims = tuple(in_acc if x.ndim == rank else 0 for x in function.out_avals)
    factors = lhs, rhs, lhs_scales, rhs_scales
    types = *accumulators(*factors, **params), *map(jax.typeof, operands)
    in_dims = *[in_acc] * (1 + gated), *operand_dims
    own = functions.mapped(function, types, in_dims, out_dims, size)
    return scaled_dot_general(*factors, *operands, function=own, **params), out_dims


def _has_reductions(function: core.ClosedJaxpr) -> bool:
    return any(x.shape != function.in_avals[0].shape for x in function.out_avals)


def _with_dimension(arrays, dims, position: int, size: int):
    """An operand and its scales with the new dimension, where scales that lack it have 1."""
    x, scales = arrays
    x = moved(x, dims[0], position, size)
    if dims[1] is None:
        return x, lax.expand_dims(scales, (position,))
    return x, moved(scales, dims[1], position, size)


batching.fancy_primitive_batchers[scaled_dot_general_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, *, function, **params):
    """As of `tcgemm_epilogue_dot_general`, the plain product being one of dequantised operands."""
    (factors, operands), (dfactors, rest) = (
        (x[:_NUM_FACTORS], x[_NUM_FACTORS:]) for x in (primals, tangents)
    )
    daccs = _tangents_of_accumulators(factors, dfactors, **params)

    def run(kept):
        return scaled_dot_general_p.bind(*primals, function=kept, **params)

    return kept_values.jvp(function, run, operands, daccs, rest)


def _tangents_of_accumulators(factors, tangents, *, lhs_block, rhs_block, **params):
    """Each is None where nothing moves it."""
    values, moving = [], []
    for side, block in enumerate((lhs_block, rhs_block)):
        dequantise = functools.partial(dequantised, block=block)
        x, dx = functions.value_and_tangent(dequantise, factors[side::2], tangents[side::2])
        values.append(x)
        moving.append(dx)
    (lhs, rhs), (dlhs, drhs) = values, moving
    addends = [] if dlhs is None else [_plain(dlhs, rhs, **params)]
    addends += [] if drhs is None else [_plain(lhs, drhs, **params)]
    if not addends:
        return [None] * (1 + params["gated"])
    return _apart(functools.reduce(lax.add, addends), lhs, **params)


def _transpose(cotangents, *operands, **params):
    """Of a call that is linear in some operands: that of the unfused one."""
    return transpose_by_parts(unfused, cotangents, operands, **params)


def _series(primals, series, **params):
    return functions.series(unfused, primals, series, **params)


ad.primitive_jvps[scaled_dot_general_p] = _jvp
ad.primitive_transposes[scaled_dot_general_p] = _transpose
jax_internals.register_jet(scaled_dot_general_p, _series)


def _flops(lhs, rhs, *_, num_batch, gated, **__) -> int:
    """Those of the product."""
    numbers = _numbers(lhs.ndim, rhs.ndim, num_batch, gated)
    return plain.flops(lhs, rhs, dimension_numbers=numbers)


jax_internals.register_roofline(scaled_dot_general_p, _flops)


# --- typing and lowering --------------------------------------------------------------------------


def product_of(*avals_and_params) -> epilogue.Product:
    """What one call of the primitive says, from the types of its operands and its params.

    The operands may be one device's parts of those that the function is of.
    """
    *avals, params = avals_and_params
    (lhs, rhs, *scales), operands = avals[:_NUM_FACTORS], avals[_NUM_FACTORS:]
    function, num_batch, gated = (params[key] for key in ("function", "num_batch", "gated"))
    function = jax_internals.without_hi_primitives(function)
    columns = rhs.shape[gated + num_batch : -1]
    acc = jax.ShapeDtypeStruct((*lhs.shape[:-1], *columns), _F32)
    out = jax.ShapeDtypeStruct((*lhs.shape[:-1], *rhs.shape[:gated], *columns), _F32)
    if acc.shape != function.in_avals[0].shape:
        accs = [acc] * (1 + gated)
        function = functions.of_part(function, len(accs), *accs, *operands)
    precision = of_block_scales(params["precision"])
    numbers = _numbers(lhs.ndim, rhs.ndim, num_batch, gated)
    natural = {"dimension_numbers": numbers, "permutation": tuple(range(out.ndim))}
    blocks = params["lhs_block"], params["rhs_block"]
    return epilogue.Product(
        plain.product_of(lhs, rhs, out, params | natural | {"precision": precision}),
        function,
        tuple(tuple(x.shape) for x in operands),
        pair=_pair(lhs, gated),
        scales=tuple(
            BlockScales(tuple(x.shape[first:]), tuple(own.shape[first:]), block, num_batch)
            for x, own, block, first in zip((lhs, rhs), scales, blocks, (0, gated), strict=True)
        ),
    )


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided over devices: along dimensions whose blocks are of one element.

    Every device has others whole, K among them.
    """
    *avals, params = avals_and_params
    shared = dict(params)
    num_batch, gated = params["num_batch"], params["gated"]
    parts = parts_of(shared.pop("function"), 1 + gated)
    lhs, rhs, *scales = avals[:_NUM_FACTORS]
    named, whole = [], {"pair", "k"}
    for side, x, pair in (("m", lhs, ()), ("n", rhs, ("pair",) * gated)):
        rows = range(num_batch, x.ndim - len(pair) - 1)
        batch = (f"b{i}" for i in range(num_batch))
        named.append((*pair, *batch, *(f"{side}{i}" for i in rows), "k"))
    factors = [*named]
    for side, (x, own) in enumerate(zip((lhs, rhs), scales, strict=True)):
        names = []
        for axis, (number, extent) in enumerate(zip(own.shape, x.shape, strict=True)):
            is_each = number == extent and number > 1
            names.append(named[side][axis] if is_each else f"s{side}x{axis}")
            if not is_each:
                whole |= {names[-1]} | ({named[side][axis]} if number > 1 else set())
        factors.append(tuple(names))
    acc_names = (*named[0][:-1], *named[1][gated + num_batch : -1])

    others, results, of_function = functions.names_of_parts(parts, acc_names)

    def call(*arguments):
        accs = accumulators(*arguments[:_NUM_FACTORS], **shared)
        own = jax.make_jaxpr(parts)(*accs, *map(jax.typeof, arguments[_NUM_FACTORS:]))
        return tuple(scaled_dot_general_p.bind(*arguments, function=own, **shared))

    return partitioning.Division(
        operands=(*factors, *others),
        results=tuple(results),
        call=call,
        whole=tuple(sorted(whole | of_function)),
    )


def obstacle_to_division(
    operands: Sequence, product: epilogue.Product, params, device: selection.Device
) -> str:
    """Why a call is run unfused where devices divide it; "" where each makes a part of it."""
    del operands
    if not dense.is_covered(product.product, device.platform):
        return "no implementation covers the dtypes of the product"
    function = params["function"]
    parts = parts_of(function, 1 + params["gated"])
    if any(function.in_avals[0].shape[dim] != 1 for dim in parts.whole):
        return "devices may divide a dimension that the function takes whole"
    return ""


_rules = scaled_dot_general_p, unfused, epilogue.make_plan, product_of
functions.define_types(*_rules)
functions.define_lowering(
    *_rules,
    division_of=division_of,
    obstacle_to_division=obstacle_to_division,
    carry_out=epilogue.product_with_epilogue,
)
