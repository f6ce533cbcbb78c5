"""The primitive `tcgemm_packed_dot`: rows times a packed weight.

    out[..., tile, i] = sum over k of x[..., k] * w[k, 16 * tile + i]

or, grouped, for the rows of each group by a weight of its own, and 0 in rows of none,

    out[r, tile, i] = sum over k of x[r, k] * w[g, k, 16 * tile + i]

operands: x (..., k), grouped (m, k), of float16, bfloat16 or float8_e4m3fn, of the last also
row_scales (...) in float32, by which the sums of rows are multiplied, the arrays of a packed
weight, values, scales and, where there are such, zero_points and column_scales
(problem/packed_weight.py), and, grouped, group_sizes (s,) and group_offset (1,), as those of
`tcgemm_ragged_dot`. Columns are in tiles, which is how devices divide them. It is linear in x; the
weight is bytes, and has no derivatives.

Parameters, all static: options, format (of the weight), grouped and dtype (of the result).
"""

import enum
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jax_tcgemm.device import packed as device_packed
from jax_tcgemm.device import request
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import functions, lowering
from jax_tcgemm.primitives import ragged_dot as ragged
from jax_tcgemm.primitives.packed_weight import (
    arrays_of,
    division_of_weight,
    problem_of,
    rows_of_weight,
    weight_of,
)
from jax_tcgemm.primitives.rules import as_cotangent, moved, same_varying, series_by_parts
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.packed_weight import TILE, PackedFormat, PackedWeight
from jax_tcgemm.sharding import partitioning, ragged_division, shardings
from jax_tcgemm.sharding.layout import Layout
from jax_tcgemm.system.jax_internals import ad, batching, like, register_jet, xla, zero_tangent

# Of more rows, the weight is written as an array once, and multiplied by the kernels of plain
# products, which overlap their epilogues. Groups have so many rows on average.
MOST_ROWS = 2048
# So few in 8 bits are multiplied in 16: reading the weight takes the time.
FEW_ROWS = 32
E4M3 = np.dtype(jnp.float8_e4m3fn)

packed_dot_p = core.Primitive("tcgemm_packed_dot")


def packed_dot(
    x,
    w: PackedWeight,
    *,
    options: CallOptions,
    dtype,
    row_scales=None,
) -> jax.Array:
    """The product of rows and a packed weight.

    Args:
      x: of shape (..., k), of float16, bfloat16 or float8_e4m3fn, its columns in the order of the
        packed rows.
      w: one weight; beside float8_e4m3fn one of integers of 4 bits.
      options: options of the call.
      row_scales: beside float8_e4m3fn, float32 of shape (...), else None.
      dtype: of the result.

    Returns:
      An array of shape (..., *w.shape[1:]).
    """
    operands = *rows_of(x, row_scales), *arrays_of(w)
    return _by_columns(w.format, *operands, options=options, dtype=dtype, grouped=False)


def packed_ragged_dot(
    x,
    w: PackedWeight,
    group_sizes,
    group_offset,
    *,
    options: CallOptions,
    dtype,
    row_scales=None,
) -> jax.Array:
    """The product of rows and the packed weights of their groups.

    Args:
      x: of shape (m, k), of float16, bfloat16 or float8_e4m3fn.
      w: stacked weights, of shape (g, k, ...).
      group_sizes: int32 of shape (s,).
      group_offset: int32 of shape (1,).
      options: options of the call.
      row_scales: as in `packed_dot`, of shape (m,).
      dtype: of the result.

    Returns:
      An array of shape (m, *w.shape[2:]).
    """
    operands = *rows_of(x, row_scales), *arrays_of(w), group_sizes, group_offset
    return _by_columns(w.format, *operands, options=options, dtype=dtype, grouped=True)


def _by_columns(form: PackedFormat, x, *others, dtype, **params) -> jax.Array:
    """The product as an array (*rows, *columns) of the columns that the weight has."""
    out = _product(x, *others, format=form, dtype=np.dtype(dtype), **params)
    out = out.reshape(*x.shape[:-1], out.shape[-2] * TILE)
    if out.shape[-1] != form.n:
        out = lax.slice_in_dim(out, 0, form.n, axis=-1)
    return out.reshape(*x.shape[:-1], *form.shape[1:])


def rows_of(x, row_scales) -> tuple:
    """The operands before those of the weight."""
    return (x,) if row_scales is None else (x, row_scales)


def rows_and_weight(factors: Sequence) -> tuple[Sequence, Sequence]:
    """The operands of a product without groups, or their types: x and its scales, and others."""
    x = getattr(factors[0], "aval", factors[0])
    number = 2 if x.dtype == E4M3 else 1
    return factors[:number], factors[number:]


class Way(enum.Enum):
    """How a product with a packed weight runs.

    By the primitive, by it and rows of 8 bits in 16, or by the weight as an array.
    """

    PACKED = enum.auto()
    IN_16_BITS = enum.auto()
    BY_ARRAY = enum.auto()


def way_of(
    shape: Sequence[int], has_row_scales: bool, options: CallOptions, groups: int = 1
) -> Way:
    """How rows of a shape are multiplied: otherwise than by the primitive if nothing is asked."""
    rows = math.prod(shape)
    if not (options.is_unconstrained and isinstance(rows, int)):
        return Way.PACKED
    if has_row_scales and rows <= FEW_ROWS * groups:
        return Way.IN_16_BITS
    return Way.BY_ARRAY if not has_row_scales and rows > MOST_ROWS * groups else Way.PACKED


class Operands(NamedTuple):
    """Those of a call; but x and weight, what it has not is empty."""

    x: jax.Array
    row_scales: Sequence
    weight: Sequence
    groups: Sequence


def split(operands, grouped: bool) -> Operands:
    """The operands of a call, arrays or their types."""
    x, *others = operands
    first, last = int(getattr(x, "aval", x).dtype == E4M3), len(others) - 2 * grouped
    return Operands(x, others[:first], others[first:last], others[last:])


def _product(*operands, **params):
    """By the primitive, or, of many rows that nothing is asked of, a plain product."""
    x, row_scales, weight, groups = split(operands, params["grouped"])
    groups_of_rows = groups[0].shape[0] if groups else 1
    way = way_of(x.shape[:-1], bool(row_scales), params["options"], groups_of_rows)
    if way is Way.IN_16_BITS:
        return _in_16_bits(*operands, **params)
    if way is Way.BY_ARRAY:
        w = weight_of(weight, params["format"])
        w = rows_of_weight(w, options=params["options"], dtype=x.dtype)
        return _by_array(x, w, groups, **params)
    return packed_dot_p.bind(*same_varying(*operands), **params)


def _in_16_bits(x, row_scales, *others, **params):
    """The product of what rows of 8-bit floats stand for."""
    return _product(dequantized(x, row_scales), *others, **params)


def dequantized(x, row_scales=None):
    """What rows stand for, those of 8 bits in bfloat16."""
    if row_scales is None:
        return x
    return (x.astype(jnp.float32) * row_scales[..., None]).astype(jnp.bfloat16)


def _by_array(x, w, groups, *, options, dtype, **params):
    """The product with a weight as an array, transposed."""
    del params
    how = {"options": options.without_config(), "preferred_element_type": dtype}
    if groups:
        out = ragged.ragged_dot(x, w, *groups, rhs_transposed=True, groups=w.shape[0], **how)
    else:
        numbers = (((x.ndim - 1,), (1,)), ((), ()))
        out = plain.dot_general(x, w, dimension_numbers=numbers, **how)
    return out.reshape(*x.shape[:-1], w.shape[-2] // TILE, TILE)


# --- typing -------------------------------------------------------------------------------------


def _abstract_eval(*operands, **params):
    x, _, (values, *_), _ = split(operands, params["grouped"])
    shape = (*x.shape[:-1], values.shape[-3], TILE)
    spec = (*x.sharding.spec.partitions[:-1], values.sharding.spec.partitions[-3], None)
    mesh = x.sharding.mesh if values.sharding.mesh.empty else values.sharding.mesh
    out = like(x, shape, params["dtype"], NamedSharding(mesh, PartitionSpec(*spec)))
    lowering.expect(request.make_plan, product_of, *operands, out, params)
    return out


packed_dot_p.def_impl(functools.partial(xla.apply_primitive, packed_dot_p))
packed_dot_p.def_abstract_eval(_abstract_eval)


# --- batching -----------------------------------------------------------------------------------


def _batch(axis_data, args, dims, **params):
    """Rows of all entries together; of mapped weights, too, which are groups; others one by one."""
    if all(dim is None for dim in dims):
        return packed_dot_p.bind(*args, **params), None
    first = 1 + len(split(args, params["grouped"]).row_scales)
    rows, others, other_dims = args[:first], args[first:], dims[first:]

    def mapped_rows():
        """x, and its scales, with the mapped dimension in front."""
        pairs = zip(rows, dims[:first], strict=True)
        return [moved(array, dim, 0, axis_data.size) for array, dim in pairs]

    if not params["grouped"] and all(dim is None for dim in other_dims):
        return _product(*mapped_rows(), *others, **params), 0
    if not params["grouped"] and None not in other_dims and axis_data.explicit_mesh_axis is None:
        weight = map(jnp.moveaxis, others, other_dims, [0] * len(others))
        return _batch_of_weights(mapped_rows(), weight, params), 0
    in_front = [
        x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)
    ]
    mapped = [x for x, dim in zip(in_front, dims, strict=True) if dim is not None]

    def of_entry(own):
        rest = iter(own)
        operands = [x if dim is None else next(rest) for x, dim in zip(in_front, dims, strict=True)]
        return _product(*operands, **params)

    return lax.map(of_entry, mapped), 0


def _batch_of_weights(rows, weight, params):
    """Each weight by rows of its own, x and its scales: those of its group."""
    x, *row_scales = rows
    number, *shape, k = x.shape
    sizes = jnp.full(number, math.prod(shape), np.int32)
    groups = sizes, jnp.zeros(1, np.int32)
    rows = x.reshape(-1, k), *(scales.reshape(-1) for scales in row_scales)
    out = _product(*rows, *weight, *groups, **params | {"grouped": True})
    return out.reshape(number, *shape, *out.shape[1:])


batching.fancy_primitive_batchers[packed_dot_p] = _batch


# --- differentiation ----------------------------------------------------------------------------


def _jvp(primals, tangents, **params):
    """Of rows in 8 bits, by the product of what they stand for in 16."""
    out = packed_dot_p.bind(*primals, **params)
    first = 1 + len(split(primals, params["grouped"]).row_scales)
    _, moving = functions.value_and_tangent(dequantized, primals[:first], tangents[:first])
    if moving is None:
        return out, zero_tangent(out)
    return out, packed_dot_p.bind(*same_varying(moving, *primals[first:]), **params)


def _transpose(ct, *operands, options, format, grouped, **params):
    """The cotangent of x is a product with the weight, dequantized."""
    del params
    x, _, weight, groups = split(operands, grouped)
    nothing = [None] * (len(operands) - 1)
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval), *nothing]
    w = rows_of_weight(weight_of(weight, format), options=options, dtype=x.aval.dtype)
    ct = ct.reshape(*ct.shape[:-2], w.shape[-2]).astype(x.aval.dtype)
    how = {
        "options": options.of_step(),
        "preferred_element_type": x.aval.dtype,
        "out_sharding": shardings.of_cotangent(x.aval),
    }
    if grouped:
        x_bar = ragged.ragged_dot(ct, w, *groups, groups=w.shape[0], **how)
    else:
        numbers = (((ct.ndim - 1,), (0,)), ((), ()))
        x_bar = plain.dot_general(ct, w, dimension_numbers=numbers, **how)
    return [as_cotangent(x_bar, x.aval), *nothing]


def _series(primals, series, **params):
    if split(primals, params["grouped"]).row_scales:
        return series_by_parts(_in_16_bits, primals, series, **params)
    terms = [primals[0], *series[0]]
    out, *rest = [packed_dot_p.bind(term, *primals[1:], **params) for term in terms]
    return out, rest


ad.primitive_jvps[packed_dot_p] = _jvp
ad.primitive_transposes[packed_dot_p] = _transpose
register_jet(packed_dot_p, _series)


# --- lowering -----------------------------------------------------------------------------------


def product_of(*avals_and_params) -> request.Request:
    """What one call of the primitive says, from the types of its operands and result."""
    *operands, out, params = avals_and_params
    x, _, weight, groups = split(operands, params["grouped"])
    own = {"form": "product", "m": math.prod(x.shape[:-1])}
    own |= {"in_dtype": DTYPE_NAMES[np.dtype(x.dtype)]}
    own |= {"out_dtype": DTYPE_NAMES[np.dtype(out.dtype)]}
    if groups:
        # Of a device that has some of the groups, fewer than there are sizes.
        experts, num_sizes = weight[0].shape[0], groups[0].shape[0]
        own |= {"form": "grouped", "experts": experts, "num_sizes": num_sizes}
    problem = problem_of(weight[0].shape[-3], params["format"], **own)
    return request.Request("packed", params["options"], problem)


def division_of(*avals_and_params) -> partitioning.Division:
    """How a call may be divided over devices: along rows, tiles of columns, and groups."""
    *operands, params = avals_and_params
    x, row_scales, weight, groups = split(operands, params["grouped"])
    rows = tuple(f"m{axis}" for axis in range(x.ndim - 1))
    names = division_of_weight(weight)
    whole = ("k", *(name for own in names for name in own[-2:]))

    def call(*operands):
        return (packed_dot_p.bind(*operands, **params),)

    def call_at(layout: Layout):
        return lambda *operands: call(
            *operands[: -len(groups)],
            *ragged_division.groups_here(layout, rows[0], *operands[-len(groups) :]),
        )

    return partitioning.Division(
        operands=(
            (*rows, "k"),
            *([rows] * len(row_scales)),
            *names,
            *((("sizes",), ("one",)) if groups else ()),
        ),
        results=((*rows, "tile", "column"),),
        call=call,
        call_at=call_at if groups else None,
        whole=(*whole, "sizes", "one") if groups else whole,
        even=("g",) if groups else (),
    )


def _lower(ctx, *args, device, obstacle, **params):
    asked = product_of(*ctx.avals_in, *ctx.avals_out, params)
    plan = request.make_plan(asked, device, obstacle)
    # What XLA runs, it also partitions, but for explicit axes.
    is_ours = not plan.runs_by_xla
    is_explicit = partitioning.has_explicit_axes(*ctx.avals_in)
    if is_explicit or (is_ours and partitioning.is_divided(ctx)):
        return partitioning.lower(ctx, args, division_of(*ctx.avals_in, params))

    def on_device(*operands):
        x, row_scales, weight, groups = split(operands, params["grouped"])
        w = weight_of(weight, params["format"])
        if row_scales and not is_ours:
            return (_in_16_bits(*operands, **params),)
        rows = (x, *row_scales)
        if not groups:
            return (device_packed.product(rows, w, params["dtype"], plan),)
        if is_ours:
            return (device_packed.grouped_product(rows, w, *groups, params["dtype"], plan),)
        rows = device_packed.weight(w, x.dtype, plan)
        rows = rows.reshape(len(rows), -1, params["format"].k)
        return (_by_array(x, rows, groups, **params),)

    return partitioning.lower_on_device(ctx, on_device, *args)


lowering.register(packed_dot_p, _lower)
