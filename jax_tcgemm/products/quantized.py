"""Products of quantized arrays: which scales are applied after the product, and which before.

Scales that do not differ along contracted dimensions are applied in the product's epilogue. Block
scales along a contracted dimension are applied as in `scaled_matmul`. Other operands, such as ones
with zero points, are dequantized before an ordinary product.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.encodings.block_scaled import BlockScaled, is_exact_in_bfloat16
from jax_tcgemm.problem.call_options import CallOptions, Provenance
from jax_tcgemm.problem.dtypes import FLOAT8, wide_dtype
from jax_tcgemm.problem.layers import Layer, gate_and_up, rounded_dtype
from jax_tcgemm.problem.operands.packed_weight import PackedWeight
from jax_tcgemm.problem.operands.quantized import (
    QuantizedArray,
    ValueKind,
    dequantized,
    dequantized_dtype,
    is_quantized,
    spread,
    spread_along,
    value_kind,
)
from jax_tcgemm.problem.precision import canonical_precision, of_dequantized
from jax_tcgemm.products import epilogue as unquantized
from jax_tcgemm.products import packed
from jax_tcgemm.products.arguments import as_array, as_floating, canonical_sharding

INT8 = np.dtype(np.int8)


# --- operands -----------------------------------------------------------------------------------


def as_operand(op: str, name: str, x) -> jax.Array | QuantizedArray:
    """Check an operand of a product: an array, `as_array`, or a quantized array.

    Raises:
      TypeError: if x is neither, its values are not real or not of the kind of its qtype, its qtype
        is unknown, or its scales are not floating point.
      ValueError: if the shapes of scales or zero points do not match the values.
    """
    if packed.is_packed(x):
        raise TypeError(
            f"{op}: {name} must be an array, got {name} of type PackedWeight; only the weight "
            "may be packed"
        )
    if not is_quantized(x):
        return as_array(op, name, x)
    qvalue = as_array(op, f"{name}.qvalue", x.qvalue)
    is_real = not jnp.issubdtype(qvalue.dtype, jnp.complexfloating) and qvalue.dtype != np.bool_
    # Integers of another qtype are entries of a codebook, or the bits of floats, not the numbers to
    # multiply. An integer qtype, such as int3, only gives the range of the values.
    is_number = is_real and (
        value_kind(op, name, x.qtype, qvalue.dtype) is ValueKind.INTEGER
        or jnp.issubdtype(qvalue.dtype, jnp.floating)
    )
    if not is_number:
        raise TypeError(
            f"{op}: {name} must have real numbers as its qvalue, got {name}.qvalue.dtype="
            f"{qvalue.dtype} and {name}.qtype={x.qtype}; dequantize it first"
        )
    scale = as_floating(op, f"{name}.scale", x.scale)
    tile = _tile(op, name, qvalue, getattr(x, "block", None))
    _check_blocks(op, f"{name}.scale", scale, qvalue.shape, tile)
    zero_point = x.zero_point
    if zero_point is not None:
        zero_point = as_array(op, f"{name}.zero_point", zero_point)
        _check_blocks(op, f"{name}.zero_point", zero_point, qvalue.shape, tile)
    return QuantizedArray(qvalue, scale, zero_point, x.qtype, tile)


def as_weight(
    op: str, name: str, x, *, of_groups: bool = False
) -> jax.Array | QuantizedArray | PackedWeight:
    """Check a weight: as `as_operand`, or packed, with `of_groups` one weight per group."""
    if packed.is_packed(x):
        return packed.as_packed(op, name, x, of_groups=of_groups)
    return as_operand(op, name, x)


def _tile(op: str, name: str, qvalue, block) -> tuple[int, ...] | None:
    """Block shape of all dimensions; leading dimensions may have been mapped or sliced away."""
    if block is None:
        return None
    if not isinstance(block, tuple) or any(not isinstance(x, int) or x < 1 for x in block):
        raise TypeError(
            f"{op}: {name}.block must be a tuple of positive integers or None, got {name}.block="
            f"{block!r}; see jax_tcgemm.quantize"
        )
    return ((1,) * qvalue.ndim + block)[-qvalue.ndim :] if qvalue.ndim else ()


def _check_blocks(op: str, what: str, scales, shape, tile) -> None:
    """Raise ValueError if the shape of scales does not match the number of blocks."""
    fits = scales.ndim == len(shape)
    for axis, (own, extent) in enumerate(zip(scales.shape, shape, strict=False)):
        if own in (1, extent):
            continue
        if tile is None:
            fits &= own > 0 and extent % own == 0
        else:
            fits &= own == -(-extent // tile[axis])
    if not fits:
        rule = "numbers that divide" if tile is None else f"those of blocks {tile} of"
        raise ValueError(
            f"{op}: {what} must have as many dimensions as the values, and in each 1 or {rule} "
            f"their extents {shape}, got {what}.shape={scales.shape}; reshape it"
        )


def is_any(*operands) -> bool:
    """Whether any of the operands, which may be None, is a quantized array or packed weight."""
    return any(isinstance(x, QuantizedArray | PackedWeight) for x in operands)


def squeezed(x, axes):
    """Remove dimensions of size 1 from an operand."""
    if packed.is_packed(x):
        return lax.squeeze(x.dequantize(), axes) if len(axes) else x
    x = jax.tree.map(lambda array: lax.squeeze(array, axes), x)
    if is_any(x) and x.block is not None:
        axes = {axis % (x.ndim + len(axes)) for axis in axes}
        block = tuple(n for axis, n in enumerate(x.block) if axis not in axes)
        return dataclasses.replace(x, block=block)
    return x


def as_arrays(*operands) -> list[jax.Array]:
    """Dequantize the operands. 8-bit floats, which have no promotion rules, become bfloat16."""
    operands = [x.dequantize() if packed.is_packed(x) else x for x in operands]
    arrays = [dequantized(x) if is_any(x) else x for x in operands]
    return [x.astype(jnp.bfloat16) if x.dtype in FLOAT8 else x for x in arrays]


def result_dtype(op: str, preferred: np.dtype | None, *operands) -> np.dtype:
    """The dtype of a product: the one asked for, or what scales and plain operands promote to."""
    if preferred is not None and not jnp.issubdtype(preferred, jnp.floating):
        raise TypeError(
            f"{op}: preferred_element_type must be None or a real floating-point dtype for "
            f"quantized operands, got preferred_element_type={preferred}; convert the result"
        )
    if packed.is_packed(*operands):
        return packed.result_dtype(op, preferred, *operands)
    dtypes = [dequantized_dtype(x.scale.dtype) if is_any(x) else x.dtype for x in operands]
    dtypes = [dtype for dtype in dtypes if dtype not in FLOAT8]
    dtype = preferred or jnp.result_type(*dtypes)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{op}: operands beside quantized ones must have a real dtype, got a result of {dtype}"
            "; dequantize them"
        )
    return np.dtype(dtype)


def values_of(x) -> jax.Array:
    """The values of a quantized array, or the array itself."""
    return x.qvalue if is_any(x) else x


def values_to_multiply(*operands) -> list[jax.Array] | None:
    """Return the values before scaling, converted to dtypes that products accept together.

    8-bit values beside an operand of a wider dtype are converted to the wider dtype, which is
    exact. None if an operand has zero points, or the wider dtypes differ or are not floating point.
    """
    if any(is_any(x) and x.zero_point is not None for x in operands):
        return None
    values = [values_of(x) for x in operands]
    dtypes = {x.dtype for x in values}
    if dtypes <= {*FLOAT8} or dtypes == {INT8}:
        return values
    wide = {dtype for dtype in dtypes if dtype not in (*FLOAT8, INT8)}
    if not wide:
        wide = {np.dtype(jnp.bfloat16)}
    if len(wide) > 1 or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in wide):
        return None
    return [x.astype(*wide) for x in values]


# --- what follows a product ---------------------------------------------------------------------
# Frozen dataclasses: equal epilogues have equal hashes, so that their trace is reused.


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """An epilogue that multiplies the accumulators by scales first.

    The first `num_scales` operands are scales; `scale_indices` has those of each accumulator.
    The operands of `epilogue` follow.
    """

    epilogue: Callable
    dtype: np.dtype
    num_scales: int
    scale_indices: tuple[tuple[int, ...], ...]

    @property
    def is_checked(self) -> bool:
        """Whether the operands are checked already, as for a `Layer`."""
        return getattr(self.epilogue, "is_checked", False)

    def __call__(self, *arguments):
        accs, rest = arguments[: len(self.scale_indices)], arguments[len(self.scale_indices) :]
        scales, operands = rest[: self.num_scales], rest[self.num_scales :]
        scaled = [
            functools.reduce(
                jnp.multiply,
                (scales[place].astype(self.dtype) for place in own),
                acc.astype(self.dtype),
            )
            for acc, own in zip(accs, self.scale_indices, strict=True)
        ]
        return self.epilogue(*scaled, *operands)


def scaling_dtype(*operands) -> np.dtype:
    """Return the dtype in which accumulators are multiplied by scales."""
    dtypes = [x.dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    return np.dtype(jnp.result_type(np.float32, *(wide_dtype(dtype) for dtype in dtypes)))


def scaling(epilogue, dtype, scales: Sequence[Sequence[jax.Array]]):
    """Return an epilogue that scales first, and its scales, each once, as operands."""
    flat = list({id(x): x for own in scales for x in own}.values())
    numbers = {id(x): number for number, x in enumerate(flat)}
    places = tuple(tuple(numbers[id(x)] for x in own) for own in scales)
    return _Scaled(epilogue, dtype, len(flat), places), flat


# --- products -----------------------------------------------------------------------------------


def product(options: CallOptions, lhs, rhs, *, preferred_element_type=None, **how) -> jax.Array:
    """Rounded product of quantized operands; `how` as for `with_epilogue`."""
    dtype = result_dtype(options.function, preferred_element_type, lhs, rhs)
    return with_epilogue(options, lhs, rhs, Layer(dtype), (), **how)


def with_epilogue(
    options: CallOptions,
    lhs,
    rhs,
    epilogue: Callable,
    operands: Sequence,
    *,
    dimension_numbers,
    rhs_up=None,
    pair: int | None = None,
    permutation=None,
    precision=None,
    out_sharding=None,
    in_place: int | None = None,
):
    """Run `products.epilogue.with_epilogue` with operands that may be quantized.

    For quantized operands, the epilogue gets the scaled product in float32 or float64, and
    `in_place` is ignored.
    """
    op = options.function
    how = {"dimension_numbers": dimension_numbers, "permutation": permutation}
    rights = (rhs,) if rhs_up is None else (rhs, rhs_up)
    gates = {"rhs_up": rhs_up, "pair": pair}
    sharded = {"precision": precision, "out_sharding": out_sharding}
    if not is_any(lhs, *rights):
        return unquantized.with_epilogue(
            options, lhs, rhs, epilogue, operands, in_place=in_place, **how, **gates, **sharded
        )
    precision = sharded["precision"] = canonical_precision(op, precision)
    # If the epilogue only rounds, this is a plain product of the rounded dtype.
    rounded = None if pair is not None or rhs_up is not None else rounded_dtype(epilogue)
    if packed.is_packed(lhs, *rights):
        if rounded is not None:
            return packed.product(options, lhs, rhs, rounded, **how, **sharded)
        own = {"pair": pair, **how, **sharded}
        return packed.with_epilogue(options, lhs, rights, epilogue, operands, **own)
    dtype, values = scaling_dtype(lhs, *rights), values_to_multiply(lhs, *rights)
    axes = [(lhs, dimension_numbers[0][0]), *((x, dimension_numbers[0][1]) for x in rights)]
    if values is not None and not any(has_blocks(*each) for each in axes):
        scales = _scales_of_result(lhs, rights, dimension_numbers, permutation, pair)
        function, own = scaling(epilogue, dtype, scales)
        if values[0].dtype not in FLOAT8:
            sharded["precision"] = of_wide_numbers(op, precision)
        gates["rhs_up"] = None if rhs_up is None else values[2]
        operands = (*own, *operands)
        return unquantized.with_epilogue(
            options, *values[:2], function, operands, **how, **gates, **sharded
        )
    is_scaled = values is not None and values[0].dtype in (*FLOAT8, INT8)
    if is_scaled and out_sharding is None:
        own = {**how, "precision": precision}
        if pair is None and rhs_up is None:
            return _by_blocks(options, lhs, rhs, epilogue, operands, **own)
        if (both := _in_one_array(lhs, rights, pair, **how)) is not None:
            return _by_blocks(options, lhs, both[0], epilogue, operands, **own | both[1])
        wide = Layer(np.dtype(np.float32))
        accs = [_by_blocks(options, lhs, right, wide, (), **own) for right in rights]
        return unquantized.applied(
            op, accs if pair is None else gate_and_up(*accs, pair), epilogue, operands
        )
    arrays = as_arrays(lhs, *rights)
    common = jnp.result_type(*arrays)
    left, *others = (x.astype(common) for x in arrays)
    options = dataclasses.replace(options, provenance=Provenance.DEQUANTIZED)
    how["precision"] = of_wide_numbers(op, precision)
    if rounded is not None:
        ndim = plain.result_ndim(left.ndim, others[0].ndim, dimension_numbers)
        how["out_sharding"] = canonical_sharding(op, out_sharding, ndim)
        how["preferred_element_type"] = rounded
        return plain.dot_general(left, others[0], options=options, **how)
    gates["rhs_up"] = others[1] if len(others) == 2 else None
    how["out_sharding"] = out_sharding
    return unquantized.with_epilogue(options, left, others[0], epilogue, operands, **how, **gates)


def has_blocks(x, contracted) -> bool:
    """Whether the scales of an operand differ along a contracted dimension."""
    return is_any(x) and any(x.scale.shape[axis] != 1 for axis in contracted)


def of_wide_numbers(op: str, precision):
    """Precision for operands that were converted from 8 bits to a wider dtype."""
    precision = canonical_precision(op, precision)
    return of_dequantized(precision)


def _scales_of_result(lhs, rights, numbers, permutation, pair) -> list[list[jax.Array]]:
    """For each accumulator, the scales to multiply it by."""
    ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)) = numbers
    counts = [
        x.ndim - len(contract) - len(batch)
        for x, contract, batch in (
            (lhs, lhs_contract, lhs_batch),
            (rights[0], rhs_contract, rhs_batch),
        )
    ]

    def placed(x, contract, batch, before, after):
        scale = spread(x.scale, x.shape, x.block)
        free = [axis for axis in range(x.ndim) if axis not in (*contract, *batch)]
        scale = lax.transpose(scale, (*contract, *batch, *free))
        extents = scale.shape[len(contract) :]
        own, rest = extents[: len(batch)], extents[len(batch) :]
        scale = scale.reshape(*own, *(1,) * before, *rest, *(1,) * after)
        return scale if permutation is None else lax.transpose(scale, tuple(permutation))

    def halved(scale):
        if scale.shape[pair] == 2:
            return [lax.index_in_dim(scale, i, pair, keepdims=False) for i in range(2)]
        return [lax.squeeze(scale, (pair,))] * 2

    own = [[] for _ in rights]
    if is_any(lhs):
        scale = placed(lhs, lhs_contract, lhs_batch, 0, counts[1])
        own = [[scale] for _ in rights]
    for each, right in zip(own, rights, strict=True):
        if is_any(right):
            each.append(placed(right, rhs_contract, rhs_batch, counts[0], 0))
    if pair is None or len(rights) == 2:
        return own
    return [list(each) for each in zip(*map(halved, own[0]), strict=True)]


def _in_one_array(lhs, rights, pair: int | None, *, dimension_numbers, permutation):
    """Return gate and up as one operand, and the arguments of `_by_blocks` for it, or None.

    Separate arrays of gate and up are stacked in 8 bits, which costs nothing more, since XLA copies
    them to rows of k anyway.
    None if gate and up cannot be one operand.
    """
    ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)) = dimension_numbers
    rhs, *second = rights
    num_rows = lhs.ndim - len(lhs_contract)
    free = [axis for axis in range(rhs.ndim) if axis not in (*rhs_contract, *rhs_batch)]
    is_natural = permutation is None or tuple(permutation) == tuple(range(len(permutation)))
    if not is_natural or num_rows == len(lhs_batch) or len(free) < 2 - len(second):
        return None
    if not second:
        return rhs, {"of_pair": free[pair - num_rows]}
    gate, up = (jax.tree.flatten(jax.tree.map(jax.typeof, x)) for x in rights)
    if gate != up:
        return None
    rhs = jax.tree.map(lambda *both: jnp.stack(both), *rights)
    if is_any(rhs) and rhs.block is not None:
        rhs = dataclasses.replace(rhs, block=(1, *rhs.block))
    behind = (tuple(axis + 1 for axis in own) for own in (rhs_contract, rhs_batch))
    numbers = tuple(zip((lhs_contract, lhs_batch), behind, strict=True))
    return rhs, {"of_pair": 0, "dimension_numbers": numbers}


def _by_blocks(
    options,
    lhs,
    rhs,
    epilogue,
    epilogue_operands,
    *,
    dimension_numbers,
    permutation,
    precision,
    of_pair=None,
) -> jax.Array:
    """Return the product of operands with block scales, which are transposed to (*batch, *rows, k).

    `of_pair`: None, or the dimension of rhs that separates gate and up; see `_in_one_array`.
    """
    ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)) = dimension_numbers
    pair = () if of_pair is None else (of_pair,)
    is_exact = all(
        is_exact_in_bfloat16(values_of(x).dtype, x.scale.dtype if is_any(x) else None)
        for x in (lhs, rhs)
    )
    lhs, lhs_scales, lhs_block, has_lhs_row = _k_major(lhs, lhs_batch, lhs_contract)
    rhs, rhs_scales, rhs_block, has_rhs_row = _k_major(rhs, (*pair, *rhs_batch), rhs_contract)
    if pair:
        rhs_scales = jnp.broadcast_to(rhs_scales, (2, *rhs_scales.shape[1:]))
    num_batch = len(lhs_batch)
    # An operand without free dimensions has a row of size 1, which is squeezed from the result.
    ones = [num_batch] if has_lhs_row else []
    ones += [lhs.ndim - 1] if has_rhs_row else []
    blocks = lhs_block, rhs_block
    encoding = BlockScaled(num_batch, blocks, bool(pair), precision, is_exact=is_exact)
    operands = lhs, rhs, lhs_scales, rhs_scales
    is_natural = permutation is None or tuple(permutation) == tuple(range(len(permutation)))
    if is_natural and not ones:
        return unquantized.with_encoded_epilogue(
            options, encoding, operands, epilogue, epilogue_operands
        )
    wide = Layer(np.dtype(np.float32))
    acc = unquantized.with_encoded_epilogue(options, encoding, operands, wide, ())
    acc = lax.squeeze(acc, ones)
    acc = acc if is_natural else lax.transpose(acc, tuple(permutation))
    return unquantized.applied(options.function, [acc], epilogue, epilogue_operands)


def _k_major(x, batch, contract) -> tuple[jax.Array, jax.Array, tuple[int, int], bool]:
    """Return values and scales (*batch, *rows, k), and the block of the last two dimensions.

    An operand without free dimensions gets one row; the last result is whether it did.
    """
    free = [axis for axis in range(x.ndim) if axis not in (*contract, *batch)]
    order, kept = (*batch, *free, *contract), len(batch) + len(free)

    def fold(array):
        rows = () if free else (1,)
        return array.reshape(*array.shape[:kept], *rows, math.prod(array.shape[kept:]))

    values = lax.transpose(values_of(x), order)
    scale, tile = jnp.ones((1,) * x.ndim), x.shape
    if is_any(x):
        scale, tile = lax.transpose(x.scale, order).astype(jnp.float32), x.tile
    tile = [tile[axis] for axis in order]
    # A kernel takes blocks along the last dimension of rows, and along K, all contracted dimensions
    # merged. `last` is the last contracted dimension with several scales. Its blocks are blocks of
    # K if the contracted dimensions before it have a scale for each element and, if these have
    # several elements, its size is a multiple of its block. Other scales are repeated for each
    # element.
    last = max((axis for axis in range(kept, x.ndim) if scale.shape[axis] > 1), default=kept)
    has_outer_k = math.prod(values.shape[kept:last]) > 1
    for axis, extent in enumerate(values.shape):
        is_of_k, num_scales = axis >= kept, scale.shape[axis]
        needs_each_scale = axis < (last if is_of_k else kept - bool(free))
        needs_each_scale |= has_outer_k and axis == last and extent % tile[axis] != 0
        if needs_each_scale and num_scales != extent and (is_of_k or num_scales > 1):
            scale = spread_along(axis, scale, extent, tile[axis])
            tile[axis] = 1
    rows = tile[kept - 1] if free else 1
    depth = math.prod(tile[last:])
    return fold(values), fold(scale), (max(rows, 1), max(depth, 1)), not free
