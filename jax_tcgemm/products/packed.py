"""Products with packed weights: by the weight-only kernels, or with dequantized weights."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device.rows import take
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.encodings.packed import E4M3, Packed, in_columns, operands_of
from jax_tcgemm.primitives.epilogue_product import bare_product
from jax_tcgemm.primitives.ragged_dot import RaggedOperands, take_rows
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.layers import gate_and_up
from jax_tcgemm.problem.operands.packed_weight import VERSION, PackedWeight
from jax_tcgemm.problem.operands.quantized import QuantizedArray, dequantized, spread
from jax_tcgemm.products import epilogue as epilogues
from jax_tcgemm.products.arguments import canonical_sharding

_KERNEL_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_DTYPES = (*_KERNEL_DTYPES, np.dtype(np.float32), np.dtype(np.float64))


def is_packed(*operands) -> bool:
    """Whether any of the operands, which may be None, is a packed weight."""
    return any(isinstance(x, PackedWeight) for x in operands)


def kind_of(*operands, otherwise: str = "gemm") -> str:
    """Kind of problem of a product: "packed" with a packed weight, else `otherwise`."""
    return "packed" if is_packed(*operands) else otherwise


def as_packed(op: str, name: str, w: PackedWeight, *, of_groups: bool = False) -> PackedWeight:
    """Check that the arrays of a packed weight, or of one per group, match its format.

    Raises:
      ValueError: for another version, arrays of other shapes or dtypes, or weights stacked along
        other dimensions than that of groups.
    """
    form = w.format
    if form.version != VERSION:
        raise ValueError(
            f"{op}: {name} must be packed by version {VERSION} of the format, got {name}.format."
            f"version={form.version}; pack it again with jax_tcgemm.pack_weights"
        )
    stacked = np.shape(w.values)[:-3]
    if len(stacked) > of_groups:
        number = "one for each group" if of_groups else "one weight"
        raise ValueError(
            f"{op}: {name} must be {number}, got {name}.shape={w.shape} with weights stacked "
            "along the first dimensions; use jax.vmap, jax.lax.scan or jax.tree.map"
        )
    if of_groups and not stacked:
        raise ValueError(
            f"{op}: {name} must have a weight for each group, got {name}.shape={form.shape} of "
            "one; pack them together, or use jax_tcgemm.stack_packed"
        )
    expected = form.shapes
    for field in ("zero_points", "column_scales"):
        if field not in expected and getattr(w, field) is not None:
            raise ValueError(
                f"{op}: {name}.{field} must be None where {name}.format.has_{field} is False, got "
                "an array; pack it again with jax_tcgemm.pack_weights"
            )
    for field, own in expected.items():
        shape, x = (*stacked, *own), getattr(w, field)
        if np.shape(x) != shape or getattr(x, "dtype", None) != np.uint8:
            raise ValueError(
                f"{op}: {name}.{field} must be uint8 of shape {shape}, got "
                f"{getattr(x, 'dtype', type(x).__name__)} of shape {np.shape(x)}; pack it again "
                "with jax_tcgemm.pack_weights"
            )
    return w


def result_dtype(op: str, preferred: np.dtype | None, *operands) -> np.dtype:
    """Dtype of a product: the preferred one, or the dtype of the other operands.

    Raises:
      TypeError: unless another operand is an array of a real floating-point dtype of 16 bits or
        more, or a quantized array with scales of such a dtype.
    """
    dtypes = [np.dtype(x.dtype) for x in operands if isinstance(x, jax.Array | QuantizedArray)]
    if not dtypes or any(dtype not in _DTYPES for dtype in dtypes):
        raise TypeError(
            f"{op}: what is multiplied by a packed weight must be an array of "
            f"{', '.join(map(str, _DTYPES))}, got {', '.join(map(str, dtypes)) or 'another one'}; "
            "convert or dequantize it"
        )
    return np.dtype(preferred or jnp.result_type(*dtypes))


def _rows_of(x, axis: int | None, w: PackedWeight):
    """Return the operand that multiplies a packed weight, and None or its row scales in float32.

    A float8_e4m3fn array with per-row scales stays in 8 bits beside int4 weights, which a kernel
    multiplies directly. Any other quantized array is dequantized to bfloat16.

    Args:
      x: an array or a quantized array.
      axis: the contracted dimension of x; None if no kernel can run the product.
      w: the weight.
    """
    if not isinstance(x, QuantizedArray):
        return x, None
    is_float8 = x.qvalue.dtype == E4M3 and x.zero_point is None
    is_int4 = w.format.coding.bits == 4 and w.format.code == "integer"
    if axis is None or not (is_float8 and is_int4 and x.scale.shape[axis] == 1):
        return dequantized(x).astype(jnp.bfloat16), None
    scales = lax.squeeze(spread(x.scale, x.shape, x.block), (axis,))
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return x.qvalue, jnp.broadcast_to(scales, shape).astype(jnp.float32)


def product(
    options: CallOptions,
    lhs,
    rhs,
    dtype,
    *,
    dimension_numbers,
    permutation=None,
    precision=None,
    out_sharding=None,
) -> jax.Array:
    """Product of a packed weight and an array or quantized array, in either order."""
    result_dtype(options.function, dtype, lhs, rhs)
    if is_packed(lhs) and not is_packed(rhs):
        if permutation is None:
            permutation = range(plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers))
        permutation = _of_exchanged(permutation, lhs.ndim, rhs.ndim, dimension_numbers)
        dimension_numbers = tuple(pair[::-1] for pair in dimension_numbers)
        lhs, rhs = rhs, lhs
    ndim = plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers)
    sharding = canonical_sharding(options.function, out_sharding, ndim)
    rows = None
    if is_packed(rhs) and sharding is None:
        rows = _rows_for_kernel(lhs, rhs, dimension_numbers)
    if rows is not None:
        out = _bare_product(options, rows, rhs, dtype)
        return out if permutation is None else lax.transpose(out, tuple(permutation))
    _check_unasked(options)
    lhs, _ = _rows_of(lhs, None, rhs)
    wide = next(x.dtype for x in (lhs, rhs) if not is_packed(x))
    left, right = (x.dequantize(wide) if is_packed(x) else x for x in (lhs, rhs))
    return plain.dot_general(
        left,
        right,
        options=options.without_config(),
        dimension_numbers=dimension_numbers,
        permutation=permutation,
        precision=precision,
        preferred_element_type=dtype,
        out_sharding=sharding,
    )


def _bare_product(options: CallOptions, rows, w: PackedWeight, dtype, groups=()) -> jax.Array:
    """Multiply rows, a pair of x and its scales or None, by a weight or those of groups."""
    operands = operands_of(rows[0], w, rows[1], groups)
    encoding = Packed.bare(w.format, operands, grouped=bool(groups))
    return in_columns(bare_product(encoding, operands, dtype, options), w.format)


def _rows_for_kernel(lhs, w: PackedWeight, dimension_numbers):
    """Return the rows that a kernel multiplies by a packed weight, and their scales or None.

    None if no kernel can run the product.
    """
    (lhs_contract, rhs_contract), batch = dimension_numbers
    if rhs_contract != (0,) or any(batch):
        return None
    x, row_scales = _rows_of(lhs, lhs_contract[0], w)
    if row_scales is None and x.dtype not in _KERNEL_DTYPES:
        return None
    x = jnp.moveaxis(x, lhs_contract[0], -1)
    if w.order is not None:
        x = jnp.take(x, w.order, axis=-1, unique_indices=True, mode="clip")
    return x, row_scales


def with_epilogue(
    options: CallOptions,
    lhs,
    rights: Sequence,
    epilogue: Callable,
    epilogue_operands: Sequence,
    *,
    dimension_numbers,
    pair: int | None = None,
    permutation=None,
    precision=None,
    out_sharding=None,
):
    """Run products of an array or quantized array with packed weights, with an epilogue.

    The epilogue runs in the kernel if there is one weight, and the result has the dimension order
    of the product and no `out_sharding`.
    """
    rows, rhs = None, rights[0]
    is_in_order = permutation is None or tuple(permutation) == tuple(range(len(permutation)))
    if len(rights) == 1 and is_packed(rhs) and not is_packed(lhs):
        result_dtype(options.function, None, lhs, rhs)
        is_pair = pair is None or (pair == lhs.ndim - 1 and rhs.ndim == 3)
        if out_sharding is None and is_in_order and is_pair:
            rows = _rows_for_kernel(lhs, rhs, dimension_numbers)
    if rows is None:
        how = {"dimension_numbers": dimension_numbers, "permutation": permutation}
        how |= {"precision": precision, "out_sharding": out_sharding}
        accs = [product(options, lhs, right, np.dtype(np.float32), **how) for right in rights]
        accs = accs if pair is None else gate_and_up(*accs, pair)
        return epilogues.applied(options.function, accs, epilogue, epilogue_operands)
    x, row_scales = rows
    operands = operands_of(x, rhs, row_scales)
    encoding = Packed(rhs.format, len(operands), pair is not None)
    return epilogues.with_encoded_epilogue(options, encoding, operands, epilogue, epilogue_operands)


def grouped_product(
    options: CallOptions, ragged: RaggedOperands, dtype, *, out_sharding=None
) -> jax.Array | None:
    """Grouped product with packed weights; None if the weights must be dequantized first."""
    rows = _rows_of_groups(options, ragged, out_sharding)
    if rows is None:
        return None
    groups = ragged.group_sizes, ragged.group_offset
    return _bare_product(options, rows, ragged.rhs, dtype, groups)


def with_grouped_epilogue(
    options: CallOptions,
    ragged: RaggedOperands,
    epilogue: Callable,
    epilogue_operands: Sequence,
    *,
    gated: bool,
    keeps_zeros: bool,
    out_sharding=None,
):
    """Run a grouped product with packed weights and an epilogue.

    None if the weights must be dequantized first. The epilogue runs in the kernel, unless there are
    so many rows that the weights are dequantized to arrays.

    Args:
      options: options of the call.
      ragged: checked; rhs is packed.
      epilogue: a function, such as a `Layer`.
      epilogue_operands: the operands of the epilogue.
      gated: whether each weight is (k, 2, n).
      keeps_zeros: whether the epilogue maps accumulators that are 0 to 0.
      out_sharding: as for `ragged_dot`.
    """
    rows = _rows_of_groups(options, ragged, out_sharding)
    if rows is None:
        return None
    w, groups = ragged.rhs, (ragged.group_sizes, ragged.group_offset)
    given = operands_of(rows[0], w, rows[1], groups)
    how = {"grouped": True, "keeps_zeros": keeps_zeros}
    encoding = Packed(w.format, len(given), gated, **how)
    return epilogues.with_encoded_epilogue_of_groups(
        options, encoding, given, epilogue, epilogue_operands, groups=w.values.shape[0]
    )


def _rows_of_groups(options: CallOptions, ragged: RaggedOperands, out_sharding):
    """Return the rows that a kernel multiplies by weights of groups, and their scales or None.

    None if no kernel can run the product.
    """
    w, gather = ragged.rhs, ragged.gather
    sharding = canonical_sharding(options.function, out_sharding, 2)
    by_kernel = w.order is None and sharding is None
    x, row_scales = _rows_of(ragged.lhs, 1 if by_kernel else None, w)
    if not by_kernel or (row_scales is None and x.dtype not in _KERNEL_DTYPES):
        _check_unasked(options)
        return None
    if gather is not None and row_scales is None:
        x = take_rows(options.selecting(), x, gather)
    elif gather is not None:
        # Bytes are cheap to move.
        x, row_scales = (take(own, gather) for own in (x, row_scales))
    return x, row_scales


def _check_unasked(options: CallOptions) -> None:
    """Raise ValueError if an implementation is named, which cannot run the product."""
    implementation = options.implementation
    if implementation not in (None, "xla"):
        raise ValueError(
            f"{options.function}: implementation must be able to run the product, got "
            f"{implementation=}: it multiplies float16 and bfloat16 by a weight along its first "
            "dimension, and its result is not to be resharded; None dequantizes the weight"
        )


def _of_exchanged(permutation, lhs_ndim: int, rhs_ndim: int, dimension_numbers) -> tuple[int, ...]:
    """Permutation of a product's result after its operands are exchanged."""
    (lhs_contract, rhs_contract), (batch, _) = dimension_numbers
    own = lhs_ndim - len(lhs_contract) - len(batch)
    others = rhs_ndim - len(rhs_contract) - len(batch)

    def exchanged(axis):
        if axis < len(batch):
            return axis
        return axis + others if axis < len(batch) + own else axis - own

    return tuple(map(exchanged, permutation))
