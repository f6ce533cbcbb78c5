"""Public `pack_weights` and `stack_packed`."""

import contextlib
import dataclasses
import functools
import math
from operator import index

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.problem.operands.packed_weight import (
    E2M1,
    ELEMENT_DTYPES,
    FLOAT8_NAMES,
    GROUP_SIZES,
    NF4,
    SCALE_DTYPES,
    TILE,
    PackedFormat,
    PackedWeight,
    packed,
    scale_as_float32,
    with_column_scales,
)
from jax_tcgemm.products.arguments import as_array, as_floating

_TABLES = {"nf4": NF4, "float4_e2m1fn": E2M1}


def pack_weights(
    q,
    scale,
    zero_point=None,
    *,
    group_size: int | None,
    dtype,
    g_idx=None,
    column_scale=None,
) -> PackedWeight:
    """Pack weights of 4 or 8 bits and their scales for weight-only quantization (W4A16, W8A16).

        w[k, n] = (q[k, n] - zero_point[k // group_size, n]) * scale[k // group_size, n]

    With a value table, w[k, n] = table[q[k, n]] * scale[k // group_size, n]. With floats of 8 bits,
    w[k, n] = q[k, n] * scale[k // group_size, n]. With column scales, w[k, n] is also multiplied by
    column_scale[n].

    MXFP4 is dtype "float4_e2m1fn" with group_size 32 and scales of float8_e8m0fnu, and MXFP8 the
    same with dtype "float8_e4m3fn" or "float8_e5m2". NVFP4 is dtype "float4_e2m1fn" with group_size
    16, scales of float8_e4m3fn and a column_scale, which is one number for the whole tensor.

    Pack a weight once. `matmul`, `linear`, `gated_linear` and `tensor.einsum` accept the packed
    weight; `ragged_dot` and `gated_ragged_linear` accept packed expert weights. On a GPU, a kernel
    reads the packed weight without a dequantized copy. `pack_weights` runs on any device, also in
    `jax.jit` and `jax.vmap`.

    Args:
      q: integers of any integer dtype, of shape (k, ...), usually (k, n), or (k, 2, n) for
        `gated_linear`. Expert weights have shape (g, k, ...). For dtype "float4_e2m1fn", the codes
        0 to 15, whose bit 3 is the sign, or an array of float4_e2m1fn. For dtypes "float8_e4m3fn"
        and "float8_e5m2", an array of that dtype.
      scale: array of bfloat16, float16, float32, float8_e8m0fnu or float8_e4m3fn, of shape (k /
        group_size, ...). Scales of expert weights have shape (g, k / group_size, ...); the shape
        distinguishes expert weights from a single weight.
      zero_point: None, which means 0, or integers of the shape of scale, from the smallest value of
        dtype to its largest value plus 1. Value tables and floats have no zero points.
      group_size: number of rows that share a scale (16, 32, 64 or 128), or None for one scale per
        column.
      dtype: "int4", "uint4", "int8", "uint8", "float8_e4m3fn" or "float8_e5m2". For a value table,
        "float4_e2m1fn", "nf4" or 16 numbers.
      g_idx: None, or the group number of each row, as in GPTQ's act-order. Each group has
        group_size rows. Expert weights have no g_idx.
      column_scale: None, or floating-point numbers that are stored as float32: one number, or one
        per column, of the shape of q without k. For expert weights, also one per expert, of shape
        (g,).

    Returns:
      A `PackedWeight`, whose `unpack()` returns the original arrays. Its dtype is that of scale, or
      bfloat16 if scale is of 8-bit floats.

    Raises:
      TypeError: if q has another dtype than dtype needs, dtypes are others than the above, or
        arguments are not arrays.
      ValueError: if shapes do not match, group_size is another number or does not divide k, or
        groups differ in size. Also, where values are known, if integers are out of the range of
        dtype, or floats or scales are not finite.

    Numerics:
      q - zero_point is exact in products with bfloat16 and float16, and so are the values of
      float4_e2m1fn, float8_e4m3fn and float8_e5m2.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> q = jnp.arange(64 * 16).reshape(64, 16) % 16 - 8
      >>> w = jax_tcgemm.pack_weights(q, jnp.full((2, 16), 0.5), group_size=32, dtype="int4")
      >>> w.shape, w.dtype, w.values.nbytes
      ((64, 16), dtype('float32'), 512)
      >>> bool((w.unpack().q == q).all()), float(w.dequantize()[0, 0])
      (True, -4.0)
    """
    return pack("pack_weights", q, scale, zero_point, group_size, dtype, g_idx, column_scale)


def pack(
    op: str, q, scale, zero_point, group_size, dtype, g_idx=None, column_scale=None
) -> PackedWeight:
    """`pack_weights`, called `op` in messages."""
    q, scale = as_array(op, "q", q), as_array(op, "scale", scale)
    qtype, table = _qtype(op, dtype)
    if q.dtype == jnp.float4_e2m1fn and table == E2M1:
        q = lax.bitcast_convert_type(q, jnp.uint4).astype(jnp.uint8)
    is_float8 = qtype in FLOAT8_NAMES
    if is_float8 and q.dtype != qtype:
        raise TypeError(
            f"{op}: q must be of {qtype}, got q.dtype={q.dtype}; convert it, or bitcast its bits"
        )
    if not is_float8 and not jnp.issubdtype(q.dtype, jnp.integer):
        raise TypeError(f"{op}: q must be integers, got q.dtype={q.dtype}; round it first")
    if q.ndim < 2 or 0 in q.shape:
        raise ValueError(
            f"{op}: q must have two dimensions at least and an element, got q.shape={q.shape}; it "
            "is (k, n)"
        )
    if str(scale.dtype) not in SCALE_DTYPES:
        raise TypeError(
            f"{op}: scale must be of {', '.join(SCALE_DTYPES)}, got scale.dtype={scale.dtype}; "
            "convert it"
        )
    # Of one weight scales differ from q in the first dimension, unless groups have a single row.
    is_stacked = q.ndim > 2 and scale.shape[:1] == q.shape[:1] and scale.shape != q.shape
    stacked = q.shape[:is_stacked]
    k, *columns = q.shape[is_stacked:]
    size = _group_size(op, group_size, k)
    form = PackedFormat(
        (k, *columns),
        size,
        qtype,
        str(scale.dtype),
        table,
        has_zero_points=zero_point is not None,
        has_column_scales=column_scale is not None,
    )
    shape = (*stacked, form.groups, *columns)
    if scale.shape != shape:
        raise ValueError(
            f"{op}: scale must have one for each group of {size} rows and column, {shape}, got "
            f"scale.shape={scale.shape}; reshape or broadcast it"
        )
    if not _holds(_are_finite, scale):
        raise ValueError(
            f"{op}: scale must be finite, got scale with NaN or infinity; a column of zeros has "
            "any finite one"
        )
    if not is_float8:
        _check_range(op, "q", q, form.coding.least, form.coding.largest, dtype)
    elif not _holds(_are_finite, q):
        raise ValueError(
            f"{op}: q must be finite, got q with NaN or infinity; a weight has neither"
        )
    if zero_point is not None:
        zero_point = _zero_point(op, zero_point, shape, form, dtype)
    if is_stacked and g_idx is not None:
        raise ValueError(
            f"{op}: g_idx must be None for the weights of experts, got g_idx.shape="
            f"{np.shape(g_idx)}; pack each for itself"
        )
    order = None if g_idx is None else _order(op, g_idx, form)
    if column_scale is not None:
        column_scale = _column_scale(op, column_scale, stacked, columns)

    def of_one(q, scale, zero_point, column_scale):
        scale, zero_point = (
            None if x is None else x.reshape(form.groups, form.n) for x in (scale, zero_point)
        )
        if column_scale is not None:
            column_scale = column_scale.reshape(form.n)
        return packed(q.reshape(form.k, form.n), scale, zero_point, order, column_scale, form)

    return (jax.vmap(of_one) if is_stacked else of_one)(q, scale, zero_point, column_scale)


def stack_packed(weights, axis: int = 0) -> PackedWeight:
    """Stack packed weights of one format, like `jnp.stack`.

        out.dequantize() = jnp.stack([w.dequantize() for w in weights], axis)

    Args:
      weights: a sequence of `PackedWeight`s of one shape, group size, dtype and scale dtype. Either
        all have zero points or none has. If one has column scales, those of the others are 1.
      axis: 0 stacks expert weights. The dimension after k stacks a gate and an up weight into one
        weight of a gated layer: 1 for weights of shape (k, n), 2 for expert weights. The number of
        columns must then be a multiple of 16.

    Returns:
      A `PackedWeight` of shape (g, k, ...), for `ragged_dot` and `gated_ragged_linear`, or of shape
      (..., k, g, n), for `gated_linear` and `gated_ragged_linear` if g is 2.

    Raises:
      TypeError: if weights is not a sequence of packed weights.
      ValueError: if weights is empty, formats differ, a weight has g_idx, axis is another
        dimension, or the columns are not a multiple of 16 along an axis after k.

    Numerics:
      The stacked weight has the bytes of the given weights.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> def pack(q, scale):
      ...     return jax_tcgemm.pack_weights(q, scale, group_size=None, dtype="int4")
      >>> q, scale = jnp.arange(2 * 64 * 16).reshape(2, 64, 16) % 16 - 8, jnp.ones((2, 1, 16))
      >>> w = jax_tcgemm.stack_packed([pack(q[g], scale[g]) for g in range(2)])
      >>> w.shape, bool((w.values == pack(q, scale).values).all())
      ((2, 64, 16), True)
    """
    op = "stack_packed"
    is_sequence = isinstance(weights, list | tuple)
    if not is_sequence or any(not isinstance(w, PackedWeight) for w in weights):
        raise TypeError(
            f"{op}: weights must be a list or tuple of PackedWeights, got weights of type "
            f"{type(weights).__name__}; pack each with jax_tcgemm.pack_weights"
        )
    if not weights:
        raise ValueError(f"{op}: weights must have one at least, got weights=[]; leave it out")
    if any(w.column_scales is not None for w in weights):
        weights = [with_column_scales(w) for w in weights]
    first = weights[0]
    for i, w in enumerate(weights):
        if w.order is not None:
            raise ValueError(
                f"{op}: weights must have groups of neighbors, got weights[{i}] packed with "
                "g_idx; dequantize it"
            )
        kinds = [(x.format, x.shape) for x in (first, w)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{op}: weights must have one format, got weights[{i}] of {kinds[1]} beside "
                f"{kinds[0]}; pack them alike"
            )
    after_k = np.ndim(first.values) - 2
    if not isinstance(axis, int) or axis not in (0, after_k):
        raise ValueError(
            f"{op}: axis must be 0 or {after_k}, the dimension after k, got {axis=}; see "
            "jax_tcgemm.stack_packed"
        )
    if axis == 0:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    k, *columns = first.format.shape
    if math.prod(columns) % TILE:
        raise ValueError(
            f"{op}: columns must be a multiple of {TILE} along {axis=}, got weights of "
            f"{math.prod(columns)}; pack them together"
        )
    form = dataclasses.replace(first.format, shape=(k, len(weights), *columns))
    # Tiles of 16 columns, which come last but two.
    concatenated = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, -3), *weights)
    return dataclasses.replace(concatenated, format=form)


def _qtype(op: str, dtype) -> tuple[str, tuple[float, ...] | None]:
    """The name of the coding, and the table that it stands for, if any."""
    if isinstance(dtype, str) and dtype in _TABLES:
        return "table", _TABLES[dtype]
    name = None
    if isinstance(dtype, tuple | list | np.ndarray | jax.Array):
        try:
            values = np.asarray(dtype, np.float32)
        except Exception:  # Of whatever a sequence holds.
            values = np.zeros(0)
        if values.shape == (16,) and np.isfinite(values).all():
            return "table", tuple(values.tolist())
    else:
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            name = jnp.dtype(dtype).name
    if name in _TABLES:
        return "table", _TABLES[name]
    if name not in ELEMENT_DTYPES:
        raise TypeError(
            f"{op}: dtype must be {', '.join((*ELEMENT_DTYPES, *_TABLES))} or 16 finite numbers, "
            f"got {dtype=}; 2 and 3 bits are stored as 4"
        )
    return name, None


def _group_size(op: str, group_size, k: int) -> int:
    if group_size is None:
        return k
    try:
        size = index(group_size)
    except TypeError:
        raise TypeError(
            f"{op}: group_size must be an integer or None, got group_size of type "
            f"{type(group_size).__name__}; None has a scale for each column"
        ) from None
    if size != k and size not in GROUP_SIZES:
        raise ValueError(
            f"{op}: group_size must be {', '.join(map(str, GROUP_SIZES))}, or None for whole "
            f"columns, got {group_size=}; repeat scales of larger groups"
        )
    if k % size != 0:
        raise ValueError(
            f"{op}: group_size must divide the first dimension of q, got {group_size=} for {k} "
            "rows; fill it up with rows of zeros"
        )
    return size


def _zero_point(op: str, zero_point, shape, form: PackedFormat, dtype) -> jax.Array:
    """Zero points of the shape of scales, in range."""
    zero_point = as_array(op, "zero_point", zero_point)
    is_integer = jnp.issubdtype(zero_point.dtype, jnp.integer)
    if not is_integer or zero_point.shape != shape or form.code != "integer":
        raise ValueError(
            f"{op}: zero_point must be None or integers of the shape of scale, and None for tables "
            f"and floats, got zero_point of {zero_point.dtype} and shape {zero_point.shape} for "
            f"{dtype=}; multiply it out of what is no integer"
        )
    coding = form.coding
    _check_range(op, "zero_point", zero_point, coding.least, coding.largest + 1, dtype)
    return zero_point


def _column_scale(op: str, column_scale, stacked, columns) -> jax.Array:
    """The scales of all columns in float32, of shape (*stacked, *columns)."""
    column_scale = as_floating(op, "column_scale", column_scale).astype(jnp.float32)
    shape, given = (*stacked, *columns), column_scale.shape
    if given not in ((), stacked, shape):
        of_experts = f", or for each expert, {stacked}" if stacked else ""
        raise ValueError(
            f"{op}: column_scale must be one number, or have one for each column, {shape}"
            f"{of_experts}, got column_scale.shape={given}; reshape or broadcast it"
        )
    if not _holds(_are_finite, column_scale):
        raise ValueError(
            f"{op}: column_scale must be finite, got column_scale with NaN or infinity; a column "
            "of zeros has any finite one"
        )
    if given != shape:
        column_scale = column_scale.reshape(*given, *[1] * (len(shape) - len(given)))
    return jnp.broadcast_to(column_scale, shape)


def _order(op: str, g_idx, form: PackedFormat) -> jax.Array:
    """The rows by their groups; those of one group stay in order."""
    g_idx = as_array(op, "g_idx", g_idx)
    if not jnp.issubdtype(g_idx.dtype, jnp.integer) or g_idx.shape != (form.k,):
        raise ValueError(
            f"{op}: g_idx must be an integer for each of {form.k} rows, got g_idx of {g_idx.dtype} "
            f"and shape {g_idx.shape}; None has groups of neighbors"
        )
    if not _holds(_are_even, g_idx, form.groups, form.group_size):
        raise ValueError(
            f"{op}: g_idx must name each of {form.groups} groups {form.group_size} times, got "
            "other numbers; groups of several sizes are dequantized"
        )
    return jnp.argsort(g_idx, stable=True).astype(jnp.int32)


def _holds(rule, x, *args) -> bool:
    """Whether a rule holds of an array, as far as its values are known."""
    if isinstance(x, jax.core.Tracer):
        return True
    with jax.ensure_compile_time_eval():
        return bool(rule(x, *args))


@jax.jit
def _are_finite(x) -> jax.Array:
    return jnp.all(jnp.isfinite(scale_as_float32(x)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _are_even(g, groups: int, size: int) -> jax.Array:
    counts = jnp.zeros(groups, jnp.int32).at[g].add(1, mode="drop")
    return jnp.all(counts == size) & jnp.all((g >= 0) & (g < groups))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _are_within(x, lower: int, upper: int) -> jax.Array:
    x = x.astype(_wide(x.dtype))
    return jnp.all((x >= lower) & (x <= upper))


def _wide(dtype) -> np.dtype:
    """Integers of 32 bits and more are compared in their own dtype, narrower ones in int32."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.int32)


def _check_range(op: str, name: str, x, least: int, largest: int, dtype) -> None:
    limits = jnp.iinfo(_wide(x.dtype))
    lower, upper = max(least, limits.min), min(largest, limits.max)
    if not _holds(_are_within, x, lower, upper):
        raise ValueError(
            f"{op}: {name} must be from {least} to {largest} for {dtype=}, got numbers outside of "
            "that; take a wider dtype or clip it"
        )
