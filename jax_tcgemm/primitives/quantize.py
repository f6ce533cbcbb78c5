"""The primitive `tcgemm_quantize`: an array rounded to 8 bits and, besides, its transpose.

    scales = max(abs(x)) / max(dtype) of each tile,  values = round(x / scales)

operands: x of two dimensions or more, and scales where these are given, one for each index of the
leading dimensions or for all of one. results: values, and scales unless they are given, of x and,
where there are two tiles, of x with its last two dimensions exchanged. Derivatives are those of
what binds it (quantization/quantize.py).

Parameters, all static: options, dtype (of the values), tiles (of each array the extents of what has
one scale) and given (whether scales are).
"""

import functools
import math

import jax
import numpy as np
from jax.extend import core

from jax_tcgemm.device import quantize as device_quantize
from jax_tcgemm.device import request
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import moved, same_varying
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.operands.quantize import QuantizeProblem, form_of
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import batching, strong_type, xla

quantize_p = core.Primitive("tcgemm_quantize")
quantize_p.multiple_results = True


def quantize(x, *given, options: CallOptions, dtype, tiles) -> list[jax.Array]:
    """Values and scales of an array and, of two tiles, of its transpose.

    Args:
      x: array of a real floating-point dtype, of two dimensions or more.
      *given: its scales, where one is for the last two dimensions; they are no results then.
      options: options of the call.
      dtype: of the values.
      tiles: of x, and of its transpose, the extents of what has one scale.

    Returns:
      The arrays.
    """
    params = {"options": options, "dtype": np.dtype(dtype), "tiles": tiles, "given": bool(given)}
    return quantize_p.bind(*same_varying(x, *given), **params)


# --- typing -------------------------------------------------------------------------------------


def _by_xla(*operands, dtype, tiles, **params) -> tuple[jax.Array, ...]:
    del params
    return device_quantize.by_xla(*operands, dtype=dtype, tiles=tiles)


def _abstract_eval(*avals, **params):
    # Also which mesh axes divide the results, and which they vary over.
    closed = jax.make_jaxpr(functools.partial(_by_xla, **params))(*map(strong_type, avals))
    lowering.expect(request.make_plan, product_of, *avals, *closed.out_avals, params)
    return closed.out_avals


quantize_p.def_impl(functools.partial(xla.apply_primitive, quantize_p))
quantize_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, *, tiles, **params):
    """One more leading dimension."""
    if all(dim is None for dim in dims):
        return quantize_p.bind(*args, tiles=tiles, **params), [None] * _num_results(args, tiles)
    args = [moved(x, dim, 0, axis_data.size) for x, dim in zip(args, dims, strict=True)]
    tiles = tuple((1, *tile) for tile in tiles)
    out = quantize_p.bind(*same_varying(*args), tiles=tiles, **params)
    return out, [0] * len(out)


def _num_results(operands, tiles) -> int:
    return len(tiles) * (1 if len(operands) == 2 else 2)


batching.fancy_primitive_batchers[quantize_p] = _batch


# --- lowering -----------------------------------------------------------------------------------


def product_of(x, *others_and_params) -> request.Request:
    """Describe one call to its planner, from the types of operands and results, and params."""
    params = others_and_params[-1]
    problem = _problem(x, params)
    return request.Request("quantize", params["options"], problem)


def _problem(x, params) -> QuantizeProblem | str:
    if 0 in x.shape:
        return "an array without elements is XLA's"
    tiles, transposed = params["tiles"], len(params["tiles"]) == 2
    *leading, rows, columns = x.shape
    shapes = x.shape, (*leading, columns, rows)
    form, *rest = [
        "scaled" if params["given"] else form_of(*both) for both in zip(shapes, tiles, strict=False)
    ]
    if form is None or any(other != form for other in rest):
        return "scales of such parts of an array are XLA's"
    if form == "rows" and transposed:
        return "scales of the rows of an array and of its transpose are XLA's"
    names = DTYPE_NAMES.get(np.dtype(x.dtype)), DTYPE_NAMES[params["dtype"]]
    if names[0] not in ("f16", "bf16", "f32"):
        return f"arrays of {x.dtype} are XLA's"
    batch = math.prod(leading)
    if form in ("rows", "lines") and not transposed:
        batch, rows = 1, batch * rows
    return QuantizeProblem(form, batch, rows, columns, transposed, *names)


def division_of(x, *given_and_params) -> partitioning.Division:
    """How a call may be sharded over devices: along what has scales of its own."""
    *given, params = given_and_params
    leading = tuple(f"entry{axis}" for axis in range(x.ndim - 2))
    names = (*leading, "row", "column")
    operands, results, whole = [names], [], set()
    for scale in given:
        parts = (f"of {n}" if e == 1 else n for n, e in zip(names, scale.shape, strict=True))
        operands.append(tuple(parts))
    for i, tile in enumerate(params["tiles"]):
        own = (*leading, "column", "row") if i else names
        results.append(own)
        if given:
            continue
        results.append(
            tuple(
                name if size == 1 else f"{i} of {name}"
                for name, size in zip(own, tile, strict=True)
            )
        )
        whole.update(name for name, size in zip(own, tile, strict=True) if size != 1)
    call = functools.partial(quantize_p.bind, **params)
    others = {name for own in (*operands, *results) for name in own} - set(names)
    return partitioning.Division(
        operands=tuple(operands),
        results=tuple(results),
        call=lambda *shards: tuple(call(*shards)),
        whole=tuple(sorted(whole | others)),
    )


def obstacle_to_division(x, *given_and_params) -> str:
    """Why a call that is sharded over devices is XLA's; "" where it need not be."""
    division = division_of(x, *given_and_params)
    if {"row", "column"} <= set(division.whole):
        return "devices would need the whole array, of whose blocks XLA divides"
    return ""


def _lower(ctx, *args, device, obstacle, **params):
    if not obstacle and params["options"].is_unconstrained and partitioning.is_divided(ctx):
        obstacle = obstacle_to_division(*ctx.avals_in, params)
    asked = product_of(*ctx.avals_in, *ctx.avals_out, params)
    plan = request.make_plan(asked, device, obstacle)
    # What XLA runs, it also partitions.
    if not plan.runs_by_xla and partitioning.is_divided(ctx):
        return partitioning.lower(ctx, args, division_of(*ctx.avals_in, params))
    how = {"dtype": params["dtype"], "tiles": params["tiles"], "plan": plan}
    on_device = functools.partial(device_quantize.quantized, **how)
    return partitioning.lower_on_device(ctx, on_device, *args)


lowering.register(quantize_p, _lower)
