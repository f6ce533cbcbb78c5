"""The primitive `tcgemm_packed_weight`: a packed weight as an array, transposed.

    out[*stacked, tile, i, k] = w[*stacked, k, 16 * tile + i]

The operands are the arrays of a packed weight: values, scales and, if there are such, zero_points
and column_scales (problem/operands/packed_weight.py). It has no derivatives, since these are bytes.
Tiles of stacked weights lie one after the other, as those of one weight do, so that they are one
problem.

Parameters, all static: options, format (of the weight) and dtype (of the result).
"""

import functools
import math

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_tcgemm.device import request
from jax_tcgemm.device.fusion import packed as device_packed
from jax_tcgemm.primitives import lowering
from jax_tcgemm.primitives.rules import moved, same_varying
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES, SCALE_DTYPE_NAMES
from jax_tcgemm.problem.operands.packed import PackedProblem
from jax_tcgemm.problem.operands.packed_weight import TILE, PackedFormat, PackedWeight
from jax_tcgemm.sharding import partitioning
from jax_tcgemm.system.jax_internals import ad, batching, like, xla, zero_tangent

packed_weight_p = core.Primitive("tcgemm_packed_weight")


def rows_of_weight(w: PackedWeight, *, options: CallOptions, dtype) -> jax.Array:
    """The weight as an array (*stacked, n, k), with the columns that fill up the last tile."""
    params = {"options": options.of_step(), "format": w.format, "dtype": np.dtype(dtype)}
    out = packed_weight_p.bind(*same_varying(*arrays_of(w)), **params)
    return out.reshape(*out.shape[:-3], out.shape[-3] * TILE, w.format.k)


def arrays_of(w: PackedWeight) -> tuple[jax.Array, ...]:
    """Return the arrays of a weight in the order of the primitives' operands."""
    return tuple(getattr(w, name) for name in w.format.shapes)


def weight_of(arrays, form: PackedFormat) -> PackedWeight:
    """The weight of which a primitive was given these."""
    absent = {"zero_points": None, "column_scales": None}
    named = absent | dict(zip(form.shapes, arrays, strict=True))
    return PackedWeight(order=None, format=form, **named)


def problem_of(tiles: int, packed: PackedFormat, **own) -> PackedProblem:
    """Return a problem with a weight of a format; `own` are the fields that the format lacks."""
    return PackedProblem(
        n=tiles * TILE,
        k=packed.k,
        group_size=packed.group_size,
        bits=packed.coding.bits,
        code=packed.code,
        zero=0 if packed.has_zero_points or packed.code != "integer" else packed.coding.offset,
        zero_points=packed.has_zero_points,
        scale=SCALE_DTYPE_NAMES[np.dtype(packed.scale_dtype)],
        column_scales=packed.has_column_scales,
        **own,
    )


def division_of_weight(arrays) -> tuple[tuple[str, ...], ...]:
    """The names of the dimensions of a weight's arrays: devices divide tiles of columns.

    They divide stacked weights, too, whose first dimension is "g".
    """
    stacked = tuple("g" * (axis + 1) for axis in range(arrays[0].ndim - 3))
    return tuple((*stacked, "tile", f"outer{i}", f"inner{i}") for i in range(len(arrays)))


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(values, *others, **params):
    del others
    shape = (*values.shape[:-2], TILE, params["format"].k)
    spec = PartitionSpec(*values.sharding.spec.partitions[:-2], None, None)
    return like(values, shape, params["dtype"], NamedSharding(values.sharding.mesh, spec))


packed_weight_p.def_impl(functools.partial(xla.apply_primitive, packed_weight_p))
packed_weight_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, **params):
    """Mapped weights are stacked ones."""
    if all(dim is None for dim in dims):
        return packed_weight_p.bind(*args, **params), None
    stacked = [moved(x, dim, 0, axis_data.size) for x, dim in zip(args, dims, strict=True)]
    return packed_weight_p.bind(*stacked, **params), 0


batching.fancy_primitive_batchers[packed_weight_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    del tangents
    out = packed_weight_p.bind(*primals, **params)
    return out, zero_tangent(out)


ad.primitive_jvps[packed_weight_p] = _jvp


# --- lowering -----------------------------------------------------------------------------------


def product_of(values, *others_and_params) -> request.Request:
    """Describe one call to its planner, from the types of operands and result, and params."""
    *_, out, params = others_and_params
    dtype = np.dtype(out.dtype)
    if dtype not in (np.dtype("float16"), np.dtype("bfloat16")):
        return request.Request("packed", params["options"], f"weights of {dtype} are XLA's")
    own = {"form": "weight", "m": 0}
    own |= dict.fromkeys(("in_dtype", "out_dtype"), DTYPE_NAMES[dtype])
    tiles = math.prod(values.shape[:-2])
    return request.Request("packed", params["options"], problem_of(tiles, params["format"], **own))


def division_of(*arrays_and_params) -> partitioning.Division:
    """How a call may be sharded over devices: along stacked weights and tiles of columns."""
    *arrays, params = arrays_and_params
    names = division_of_weight(arrays)
    return partitioning.Division(
        operands=names,
        results=((*names[0][:-2], "column", "k"),),
        call=lambda *arrays: (packed_weight_p.bind(*arrays, **params),),
        whole=tuple(name for own in names for name in own[-2:]),
    )


def _lower(ctx, *args, device, obstacle, **params):
    plan = request.make_plan(product_of(*ctx.avals_in, *ctx.avals_out, params), device, obstacle)
    # What XLA runs, it also partitions, but for explicit axes.
    is_ours = not plan.runs_by_xla
    is_explicit = partitioning.has_explicit_axes(*ctx.avals_in)
    if is_explicit or (is_ours and partitioning.is_divided(ctx)):
        return partitioning.lower(ctx, args, division_of(*ctx.avals_in, params))

    def on_device(*arrays):
        w = weight_of(arrays, params["format"])
        return (device_packed.weight(w, params["dtype"], plan),)

    return partitioning.lower_on_device(ctx, on_device, *args)


lowering.register(packed_weight_p, _lower)
