"""The primitive `tcgemm_epilogue_packed_dot`: rows by a packed weight, and a function of that.

    acc[*rows, *columns] = sum over k of x[*rows, k] * w[k, *columns]
    results = function(acc, *operands)

operands: x and, beside float8_e4m3fn, row_scales, then the arrays of the weight, as those of
`tcgemm_packed_dot`, and those of the function. `acc` is float32; of a gated product the columns are
(2, n), and the function is of both accumulators. `unfused` is the same in JAX, by
`tcgemm_packed_dot` and XLA: it types the primitive and runs it wherever nothing takes it as one
call.

Parameters, all static: options, format (of the weight), num_factors (the operands before those of
the function), gated, and function, a closed jaxpr without constants, none of whose arguments are
random keys.
"""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core

from jax_tcgemm import selection
from jax_tcgemm.device import packed_epilogue as device_epilogue
from jax_tcgemm.epilogues.parts import parts_of
from jax_tcgemm.epilogues.rounding import of_stored
from jax_tcgemm.primitives import epilogue_dot_general as plain
from jax_tcgemm.primitives import functions, kept_values, packed_dot
from jax_tcgemm.primitives.packed_weight import (
    arrays_of,
    division_of_weight,
    problem_of,
    rows_of_weight,
    weight_of,
)
from jax_tcgemm.primitives.rules import moved, same_varying, transpose_by_parts
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.layers import halves
from jax_tcgemm.problem.packed_weight import PackedFormat, PackedWeight
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system import jax_internals
from jax_tcgemm.system.jax_internals import ad, batching

epilogue_packed_dot_p = core.Primitive("tcgemm_epilogue_packed_dot")
epilogue_packed_dot_p.multiple_results = True

_F32 = np.dtype(np.float32)


def epilogue_packed_dot(
    x,
    w: PackedWeight,
    *operands,
    options: CallOptions,
    function: core.ClosedJaxpr,
    gated: bool = False,
    row_scales=None,
) -> list[jax.Array]:
    """The results of a function of the product of rows and a packed weight.

    Many rows that nothing is asked of are multiplied by the weight as an array, as those of
    `packed_dot` are.

    Args:
      x: as for `packed_dot`.
      w: the weight, of shape (k, *columns), gated (k, 2, n).
      *operands: of the function, random keys among them.
      options: options of the call.
      function: of `accumulators(...)` and the operands; arrays that it has closed over become
        operands, too.
      gated: whether the function is of both halves of the columns.
      row_scales: as for `packed_dot`.
    """
    jax_internals.register_imported()
    how = packed_dot.way_of(x.shape[:-1], row_scales is not None, options)
    if how is packed_dot.Way.BY_ARRAY:
        rhs = rows_of_weight(w, options=options, dtype=x.dtype)
        rhs = rhs[: w.format.n].reshape(*w.format.shape[1:], w.format.k)
        return plain.epilogue_dot_general(
            x,
            rhs,
            *operands,
            options=options.without_config(),
            dimension_numbers=(((x.ndim - 1,), (rhs.ndim - 1,)), ((), ())),
            function=function,
            pair=x.ndim - 1 if gated else None,
        )
    if how is packed_dot.Way.IN_16_BITS:
        x, row_scales = packed_dot.dequantised(x, row_scales), None
    function, constants = functions.hoist(function)
    function, operands = functions.without_keys(function, (*operands, *constants))
    factors = packed_dot.rows_of(x, row_scales) + arrays_of(w)
    params = {"options": options, "format": w.format, "gated": gated}
    return epilogue_packed_dot_p.bind(
        *same_varying(*factors), *operands, num_factors=len(factors), function=function, **params
    )


def accumulators(x, w: PackedWeight, row_scales=None, **params) -> list:
    """The types of what a function takes."""
    factors = packed_dot.rows_of(x, row_scales) + arrays_of(w)
    with selection.unseen():
        return jax.make_jaxpr(
            lambda *factors: _accumulators(factors, _F32, format=w.format, **params)
        )(*factors).out_avals


def _accumulators(factors, dtype, *, options, format, gated, **_) -> list[jax.Array]:
    """The accumulators by `tcgemm_packed_dot`, in some dtype."""
    rows, weight = packed_dot.rows_and_weight(factors)
    w = weight_of(weight, format)
    scales = rows[1] if len(rows) == 2 else None
    out = packed_dot.packed_dot(rows[0], w, options=options, dtype=dtype, row_scales=scales)
    return halves(out, rows[0].ndim - 1) if gated else [out]


def _split(arguments: Sequence, params: dict) -> tuple[Sequence, Sequence]:
    """The factors of the product, and the operands of the function."""
    return arguments[: params["num_factors"]], arguments[params["num_factors"] :]


def unfused(*arguments, function: core.ClosedJaxpr, **params) -> list[jax.Array]:
    """The same by `tcgemm_packed_dot` and what XLA makes of the function.

    The product is stored as the function rounds it, where that is all that it does with it.
    """
    factors, operands = _split(arguments, params)
    dtype, of_stored_products = of_stored(function, 1 + params["gated"])
    accs = _accumulators(factors, dtype, **params)
    return core.jaxpr_as_fun(of_stored_products)(*accs, *operands)


def bare_products(*arguments, function: core.ClosedJaxpr, **params) -> list[jax.Array]:
    """The product of the unfused call."""
    factors, _ = _split(arguments, params)
    dtype, _ = of_stored(function, 1 + params["gated"])
    return _accumulators(factors, dtype, **params)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, function, **params):
    """Rows of all entries together, by a function that is mapped; of mapped weights unfused."""
    if all(dim is None for dim in dims):
        out = epilogue_packed_dot_p.bind(*args, function=function, **params)
        return out, [None] * len(out)
    (factors, operands), (factor_dims, operand_dims) = (_split(x, params) for x in (args, dims))
    rows, weight = packed_dot.rows_and_weight(factors)
    row_dims, weight_dims = factor_dims[: len(rows)], factor_dims[len(rows) :]
    if any(dim is not None for dim in weight_dims) or all(dim is None for dim in row_dims):
        run = functools.partial(unfused, function=function, **params)
        out = jax.vmap(run, tuple(dims), axis_size=axis_data.size)(*args)
        return out, [0] * len(out)
    rows = [moved(x, dim, 0, axis_data.size) for x, dim in zip(rows, row_dims, strict=True)]
    x, scales = rows[0], rows[1] if len(rows) == 2 else None
    w, how = weight_of(weight, params["format"]), {key: params[key] for key in ("options", "gated")}
    types = *accumulators(x, w, scales, **how), *map(jax.typeof, operands)
    in_dims, out_dims = (*[0] * (1 + params["gated"]), *operand_dims), [0] * len(function.out_avals)
    own = functions.mapped(function, types, in_dims, tuple(out_dims), axis_data.size)
    return epilogue_packed_dot(x, w, *operands, function=own, row_scales=scales, **how), out_dims


batching.fancy_primitive_batchers[epilogue_packed_dot_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, *, function, **params):
    """As of `tcgemm_epilogue_dot_general`; the weight is bytes, and has no tangent."""
    (factors, operands), (dfactors, rest) = (_split(x, params) for x in (primals, tangents))
    rows, weight = packed_dot.rows_and_weight(factors)
    moving = dfactors[: len(rows)]
    _, dx = functions.value_and_tangent(packed_dot.dequantised, rows, moving)
    daccs = [None] * (1 + params["gated"])
    if dx is not None:
        own = params | {"options": params["options"].without_config()}
        daccs = _accumulators((*same_varying(dx, *weight),), _F32, **own)

    def run(kept):
        return epilogue_packed_dot_p.bind(*primals, function=kept, **params)

    return kept_values.jvp(function, run, operands, daccs, rest)


def _transpose(cotangents, *operands, **params):
    """Of a call that is linear in some operands: that of the unfused one."""
    return transpose_by_parts(unfused, cotangents, operands, **params)


def _series(primals, series, **params):
    return functions.series(unfused, primals, series, **params)


ad.primitive_jvps[epilogue_packed_dot_p] = _jvp
ad.primitive_transposes[epilogue_packed_dot_p] = _transpose
jax_internals.register_jet(epilogue_packed_dot_p, _series)


# --- typing and lowering --------------------------------------------------------------------------


def product_of(*avals_and_params) -> device_epilogue.Product:
    """What one call of the primitive says, from the types of its operands and its params.

    The operands may be one device's parts of those that the function is of.
    """
    *avals, params = avals_and_params
    factors, operands = _split(avals, params)
    (x, *_), weight = packed_dot.rows_and_weight(factors)
    function = jax_internals.without_hi_primitives(params["function"])
    form: PackedFormat = params["format"]
    shape = (*x.shape[:-1], *form.shape[1 + params["gated"] :])
    if shape != function.in_avals[0].shape:
        accs = [jax.ShapeDtypeStruct(shape, _F32)] * (1 + params["gated"])
        function = functions.of_part(function, len(accs), *accs, *operands)
    own = {"form": "product", "m": math.prod(x.shape[:-1]), "out_dtype": "f32"}
    own["in_dtype"] = DTYPE_NAMES[np.dtype(x.dtype)]
    return device_epilogue.Product(
        params["options"],
        form,
        problem_of(weight[0].shape[-3], len(weight) == 3, form, **own),
        function,
        shape,
        x.ndim - 1,
        tuple(tuple(operand.shape) for operand in operands),
        params["gated"],
    )


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided over devices: along its rows."""
    *avals, params = avals_and_params
    (x, *scales), weight = packed_dot.rows_and_weight(_split(avals, params)[0])
    shared = dict(params)
    parts = parts_of(shared.pop("function"), 1 + params["gated"])
    rows = tuple(f"m{axis}" for axis in range(x.ndim - 1))
    columns = tuple(f"n{axis}" for axis in range(len(params["format"].shape) - 1 - params["gated"]))
    of_weight = division_of_weight(weight)
    others, results, whole = functions.names_of_parts(parts, (*rows, *columns))
    whole |= {"k", *columns, *(name for own in of_weight for name in own)}

    def call(*arguments):
        factors, operands = _split(arguments, params)
        (x, *scales), weight = packed_dot.rows_and_weight(factors)
        how = {key: params[key] for key in ("options", "gated")}
        accs = accumulators(x, weight_of(weight, params["format"]), *scales, **how)
        own = jax.make_jaxpr(parts)(*accs, *map(jax.typeof, operands))
        return tuple(epilogue_packed_dot_p.bind(*arguments, function=own, **shared))

    return partitioning.Division(
        operands=((*rows, "k"), *([rows] * len(scales)), *of_weight, *others),
        results=tuple(results),
        call=call,
        whole=tuple(sorted(whole)),
    )


def obstacle_to_division(
    operands: Sequence, product: device_epilogue.Product, params, device: selection.Device
) -> str:
    """Why a call is run unfused where devices divide it; "" where each has some of the rows."""
    del device
    factors, _ = _split(operands, params)
    (x, *_), weight = packed_dot.rows_and_weight(factors)
    if not partitioning.has_explicit_axes(*factors):
        return "devices may divide the columns of the weight"
    if any(part is not None for own in weight for part in own.sharding.spec.partitions):
        return "devices divide the columns of the weight"
    if x.sharding.spec.partitions[-1] is not None:
        return "devices divide what is contracted"
    parts = parts_of(params["function"], product.num_accumulators)
    if any(product.shape[dim] != 1 for dim in parts.whole if dim < product.num_rows):
        return "devices may divide a dimension that the function takes whole"
    return ""


_rules = epilogue_packed_dot_p, unfused, device_epilogue.make_plan, product_of


def _carry_out(plan: device_epilogue.Plan, *arguments) -> list[jax.Array]:
    num_operands = len(plan.product.operand_shapes)
    factors, operands = arguments[: len(arguments) - num_operands], ()
    if num_operands:
        operands = arguments[-num_operands:]
    rows, weight = packed_dot.rows_and_weight(factors)
    w = weight_of(weight, plan.product.format)
    return device_epilogue.product_with_epilogue(plan, rows, w, operands)


functions.define_types(*_rules)
functions.define_lowering(
    *_rules,
    division_of=division_of,
    obstacle_to_division=obstacle_to_division,
    carry_out=_carry_out,
)
