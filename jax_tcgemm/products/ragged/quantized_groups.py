"""Grouped products of quantized arrays, as `products.quantized` has dense ones."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.device.rows import take
from jax_tcgemm.primitives.encodings.ragged_contraction import RaggedContraction
from jax_tcgemm.primitives.epilogue_product import bare_product
from jax_tcgemm.primitives.ragged_dot import RaggedOperands
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import FLOAT8
from jax_tcgemm.problem.layers import Layer, rounded_dtype
from jax_tcgemm.problem.operands.quantized import spread, spread_along
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products import epilogue as unquantized
from jax_tcgemm.products import packed
from jax_tcgemm.products.quantized import (
    INT8,
    has_blocks,
    is_any,
    of_wide_numbers,
    scaling,
    scaling_dtype,
    values_to_multiply,
)

# Of K, in a block that has all of it; a multiple of what a kernel's blocks have.
_ALL_TOKENS = 1 << 30


def grouped_scales(ragged: RaggedOperands, gated: bool):
    """Return the scales of a grouped product's accumulators, and its operands as plain arrays.

    None if scales differ along k, or under the conditions of `values_to_multiply`.
    """
    lhs, rhs = ragged.lhs, ragged.rhs
    if has_blocks(lhs, (1,)) or has_blocks(rhs, (1,)):
        return None
    if (values := values_to_multiply(lhs, rhs)) is None:
        return None
    if values[0].dtype != values[1].dtype:
        # No grouped kernel multiplies two different 8-bit float dtypes; bfloat16 represents both.
        values = [x.astype(jnp.bfloat16) for x in values]
    scales = [[] for _ in range(1 + gated)]
    if is_any(lhs):
        scale = spread(lhs.scale, lhs.shape, lhs.block)
        if ragged.gather is not None and scale.shape[0] != 1:
            scale = take(scale, ragged.gather)
        scales = [[scale] for _ in scales]
    if is_any(rhs):
        scale = spread(rhs.scale, rhs.shape, rhs.block)
        for i, own in enumerate(scales):
            each = scale[:, :, min(i, scale.shape[2] - 1)] if gated else scale
            own.append(each[0] if each.shape[0] == 1 else each)
    return scales, ragged._replace(lhs=values[0], rhs=values[1])


def _grouped_blocks(ragged: RaggedOperands, gated: bool):
    """Return operands as plain arrays with block scales along k, and the block shapes.

    None unless the values are 8-bit integers or floats without zero points.
    """
    values = values_to_multiply(ragged.lhs, ragged.rhs)
    if values is None or values[0].dtype not in (*FLOAT8, INT8):
        return None
    (lhs, rhs), groups = values, ragged.rhs.shape[0]
    (lhs_scales, lhs_tile), (rhs_scales, rhs_tile) = map(_scales, (ragged.lhs, ragged.rhs))
    if ragged.gather is not None:
        # Bytes are cheap to move, and kernels that gather rows take no scales.
        if lhs_scales.shape[0] != 1:
            lhs_scales = spread_along(0, lhs_scales, lhs.shape[0], lhs_tile[0])
            lhs_scales = take(lhs_scales, ragged.gather)
            lhs_tile = (1, lhs_tile[1])
        lhs = take(lhs, ragged.gather)
    if rhs_scales.shape[0] != groups:
        rhs_scales = spread_along(0, rhs_scales, groups, rhs_tile[0])
    if gated:
        rhs_scales = jnp.repeat(rhs_scales, 2 // rhs_scales.shape[2], 2)
    rhs_scales = jnp.moveaxis(rhs_scales, 1, -1)
    own = {"lhs": lhs, "rhs": rhs, "lhs_scales": lhs_scales, "rhs_scales": rhs_scales}
    return ragged._replace(**own, gather=None), (lhs_tile, (rhs_tile[-1], rhs_tile[1]))


def _scales(x) -> tuple[jax.Array, tuple[int, ...]]:
    """Scales of an operand in float32, and the block shape of each scale."""
    if not is_any(x):
        return jnp.ones((1,) * x.ndim, jnp.float32), x.shape
    return x.scale.astype(jnp.float32), tuple(max(extent, 1) for extent in x.tile)


def grouped(
    options: CallOptions,
    ragged,
    epilogue,
    epilogue_operands,
    *,
    gated,
    precision,
    **how,
):
    """Grouped product of quantized operands, scaled in its epilogue; None if no kernel can run it.

    Args:
      options: options of the call.
      ragged: checked operands of the product; at least one is quantized.
      epilogue: a function, such as a `Layer`.
      epilogue_operands: the operands of the epilogue.
      gated: whether rhs has two matrices for each group.
      precision: as for `ragged_dot`.
      **how: other arguments of `products.epilogue.with_grouped_epilogue`.
    """
    how |= {"gated": gated, "precision": precision}
    if packed.is_packed(ragged.rhs):
        return _grouped_by_packed(options, ragged, epilogue, epilogue_operands, **how)
    if (found := grouped_scales(ragged, gated)) is None:
        if (of_blocks := _grouped_blocks(ragged, gated)) is None:
            return None
        given, blocks = of_blocks
        return unquantized.with_grouped_epilogue(
            options, given, epilogue, epilogue_operands, blocks=blocks, **how
        )
    scales, of_arrays = found
    if of_arrays.lhs.dtype not in FLOAT8:
        how["precision"] = of_wide_numbers(options.function, precision)
    wide = scaling_dtype(ragged.lhs, ragged.rhs)
    function, own = scaling(epilogue, wide, scales)
    return unquantized.with_grouped_epilogue(
        options, of_arrays, function, (*own, *epilogue_operands), **how
    )


def _grouped_by_packed(options, ragged, epilogue, epilogue_operands, *, gated, precision, **how):
    """Run `grouped` with packed weights."""
    op = options.function
    canonical_precision(op, precision)
    rounded = rounded_dtype(epilogue)
    if rounded is not None:
        return packed.grouped_product(options, ragged, rounded, **how)
    # An epilogue that maps 0 to 0 needs no mask for rows of no group. Every activation but sigmoid
    # does, and sigmoid does if a gate multiplies it by 0.
    is_layer = isinstance(epilogue, Layer) and not epilogue.num_biases
    how["keeps_zeros"] = is_layer and (gated or epilogue.activation != "sigmoid")
    return packed.with_grouped_epilogue(
        options, ragged, epilogue, epilogue_operands, gated=gated, **how
    )


def contraction(
    options: CallOptions, dims, lhs, rhs, sizes, offset, *, dtype, precision
) -> jax.Array | None:
    """Contraction of quantized operands over each group's tokens; None if no kernel can run it.

    Args:
      options: options of the call.
      dims: the dimensions of the call.
      lhs: left operand, checked; lhs or rhs is quantized.
      rhs: right operand, checked.
      sizes: sizes of the groups.
      offset: number of the first group.
      dtype: dtype of the result.
      precision: canonical.
    """
    values = values_to_multiply(lhs, rhs)
    is_of_matrices = lhs.ndim == rhs.ndim == 2 and not dims.lhs_batch and sizes.ndim == 1
    if values is None or not is_of_matrices or values[0].dtype not in (*FLOAT8, INT8):
        return None
    if values[0].dtype != values[1].dtype:
        return None
    tokens = dims.lhs_contract[0], dims.rhs_contract[0]
    arrays, scales, blocks = [], [], []
    for x, own, axis in zip((lhs, rhs), values, tokens, strict=True):
        scale, tile = _scales(x)
        order = (1 - axis, axis)
        arrays.append(lax.transpose(own, order))
        scales.append(lax.transpose(scale, order))
        # A scale for all tokens stays one scale, whatever the number of tokens.
        depth = tile[axis] if scale.shape[axis] > 1 else _ALL_TOKENS
        blocks.append((tile[1 - axis], depth))
    encoding = RaggedContraction(groups=dims.groups, blocks=tuple(blocks), precision=precision)
    return bare_product(encoding, (*arrays, sizes, offset, *scales), dtype, options)
