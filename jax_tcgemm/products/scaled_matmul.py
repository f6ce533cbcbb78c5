"""Public `scaled_matmul`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.primitives.encodings.block_scaled import BlockScaled, is_exact_in_bfloat16
from jax_tcgemm.problem.dtypes import FLOAT8
from jax_tcgemm.problem.layers import Layer
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import (
    ShapeError,
    as_array,
    call_options,
    canonical_element_type,
)
from jax_tcgemm.products.epilogue import with_encoded_epilogue, with_epilogue

_SMALL_FLOATS = (*FLOAT8, np.dtype(jnp.float4_e2m1fn))


def scaled_matmul(
    lhs,
    rhs,
    lhs_scales,
    rhs_scales,
    *,
    lhs_block: tuple[int, int] | None = None,
    rhs_block: tuple[int, int] | None = None,
    preferred_element_type=jnp.float32,
    precision=None,
    implementation: str | None = None,
    config: str | None = None,
):
    """Product of quantized matrices and their scales, like `jax.nn.scaled_matmul`.

        out[..., m, n] = sum over k of (lhs * lhs_scales)[..., m, k] * (rhs * rhs_scales)[..., n, k]

    Scales are repeated to the shape of the operand.

    With per-tensor or per-row scales, the quantized operands are multiplied, and the accumulator is
    multiplied by both scales before rounding. The scaling is an epilogue of the kernel where one
    kernel supports both. With block scales along k, the kernel applies the scales block by block,
    if the operands are 8-bit floats and the size of each block along k is a multiple of 128.
    DeepSeek's scheme of blocks (1, 128) and (128, 128) is an example:

        out = sum over k blocks of lhs_scale * rhs_scale * (lhs * rhs of the k block)

    With scales that are 8-bit floats, as in MXFP8, MXFP4 (float8_e8m0fnu scales of 32 elements) and
    NVFP4 (float8_e4m3fn scales of 16 elements), the product of an element and its scale is exact in
    bfloat16. For blocks that no kernel supports, the operands are dequantized to bfloat16, and the
    fastest implementation of `matmul` multiplies them.

    For other blocks, and on devices without such a kernel, the operands are multiplied by their
    scales in float32 first, and a product of XLA follows; `jax_tcgemm.explain` reports this.

    Args:
      lhs: array of shape (..., m, k) of a real dtype, usually float8_e4m3fn, float8_e5m2 or
        float4_e2m1fn.
      rhs: array of shape (n, k), or (..., n, k) with the batch dimensions of lhs. lhs and rhs have
        one dtype, or each has one of the three dtypes above. `quantize` makes both operands.
      lhs_scales: floating-point array of shape (), (..., 1, 1), (..., m, 1) or (..., m', k'), where
        m' and k' are the numbers of blocks along m and k. DeepSeek's scheme has shape (m, k / 128).
      rhs_scales: floating-point array of shape (), (..., 1, 1), (..., n, 1) or (..., n', k').
      lhs_block: sizes of a block along m and k. None divides m and k evenly. With given sizes, the
        last block of a dimension may be shorter.
      rhs_block: sizes of a block along n and k, or None.
      preferred_element_type: real floating-point dtype of the result.
      precision: precision of the product; see `matmul`. For 8-bit floats,
        `lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32` is the default, and ANY_F8_ANY_F8_F32_FAST_ACCUM
        is faster; see Numerics of `matmul`.
      implementation: name of the implementation that must run the product; the call fails if the
        implementation cannot. None selects an implementation. Derivatives of a product without
        block scales along k inherit the implementation.
      config: name of a config of that implementation. None selects a config.

    Returns:
      The product, of shape (..., m, n) and dtype preferred_element_type.

    Raises:
      TypeError: if operands are not real numeric arrays, their dtypes differ and are not both
        floats of 8 or 4 bits, or scales or result are not real floating point.
      ValueError: if the shapes of operands or scales do not match, or an implementation or config
        is unknown. Also, at lowering, if the named implementation cannot run the product.

    Numerics:
      - 8-bit floats are multiplied exactly and accumulated in float32, as in `matmul`. The
        accumulator is multiplied by lhs_scales and then by rhs_scales in float32, and rounded once.
      - With block scales along k, accumulators are promoted every 128 elements of k: each
        accumulator is multiplied by the product of both scales and added in float32, whatever the
        precision.
      - Unless it is dequantized, float4_e2m1fn is converted to float8_e4m3fn, which is exact.
      - Operands that are dequantized to bfloat16 are multiplied exactly and accumulated in float32,
        and the result is rounded once. Their cotangents, and those of the scales, are computed in
        bfloat16.
      - Operands that are multiplied by their scales first are multiplied as float32, which on CUDA
        uses TF32 unless the precision is HIGHEST.
      - The cotangent of an operand has the operand's dtype, such as an 8-bit float. The cotangents
        of the scales are exact.

    Examples:
      >>> import jax, jax.numpy as jnp, jax_tcgemm
      >>> x, w = jax.random.normal(jax.random.key(0), (2, 64, 256))
      >>> x, w = jax_tcgemm.quantize(x, axis=-1), jax_tcgemm.quantize(w, axis=-1)
      >>> y = jax_tcgemm.scaled_matmul(x.qvalue, w.qvalue, x.scale, w.scale)
      >>> y.shape, y.dtype
      ((64, 64), dtype('float32'))
    """
    op = "scaled_matmul"
    lhs, rhs = as_array(op, "lhs", lhs), as_array(op, "rhs", rhs)
    options = call_options(op, implementation, config)
    dtype = canonical_element_type(op, preferred_element_type)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{op}: preferred_element_type must be a real floating-point dtype, got "
            f"{preferred_element_type=}; convert the result"
        )
    _check_operands(op, lhs, rhs)
    lhs_scales, lhs_block = _checked_scales(op, "lhs", lhs, lhs_scales, lhs_block)
    rhs_scales, rhs_block = _checked_scales(op, "rhs", rhs, rhs_scales, rhs_block)
    is_exact = is_exact_in_bfloat16(lhs.dtype, lhs_scales.dtype)
    is_exact &= is_exact_in_bfloat16(rhs.dtype, rhs_scales.dtype)
    lhs_scales, rhs_scales = lhs_scales.astype(jnp.float32), rhs_scales.astype(jnp.float32)
    num_batch = rhs.ndim - 2
    if any(scales.ndim and scales.shape[-1] > 1 for scales in (lhs_scales, rhs_scales)):
        blocks, precision = (lhs_block, rhs_block), canonical_precision(op, precision)
        encoding = BlockScaled(num_batch, blocks, precision=precision, is_exact=is_exact)
        scales = _with_dimensions(lhs, lhs_scales), _with_dimensions(rhs, rhs_scales)
        if not encoding.is_dequantized(scales):
            lhs, rhs = _in_8_bits(lhs), _in_8_bits(rhs)
        operands = lhs, rhs, *scales
        return with_encoded_epilogue(options, encoding, operands, Layer(np.dtype(dtype)), ())
    lhs, rhs = _in_8_bits(lhs), _in_8_bits(rhs)
    lhs_scales = _of_rows(lhs, lhs_scales, lhs_block)
    rhs_scales = _of_rows(rhs, rhs_scales, rhs_block)
    if rhs_scales.ndim:
        rhs_scales = jnp.swapaxes(rhs_scales, -1, -2)
    batch = tuple(range(num_batch))
    numbers = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch))
    scales, numbers = (lhs_scales, rhs_scales), {"dimension_numbers": numbers}
    return with_epilogue(options, lhs, rhs, _scaled(dtype), scales, **numbers, precision=precision)


def _in_8_bits(x: jax.Array) -> jax.Array:
    """Convert floats of 4 bits to floats of 8 bits, which have all of their values."""
    return x.astype(FLOAT8[0]) if x.dtype == jnp.float4_e2m1fn else x


@functools.cache
def _scaled(dtype: np.dtype) -> Callable:
    """Epilogue that applies scales. Cached by dtype, so that its trace is cached, too."""

    def scaled(acc, lhs_scales, rhs_scales):
        return (acc.astype(jnp.float32) * lhs_scales * rhs_scales).astype(dtype)

    return scaled


def _check_operands(op: str, lhs: jax.Array, rhs: jax.Array) -> None:
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"{op}: {name} must have a real dtype, got {name}.dtype={x.dtype}; use matmul"
            )
        if x.ndim < 2:
            raise ValueError(
                f"{op}: {name} must have at least two dimensions, got {name}.shape={x.shape}; add "
                "one of size 1"
            )
    if lhs.dtype != rhs.dtype and not (lhs.dtype in _SMALL_FLOATS and rhs.dtype in _SMALL_FLOATS):
        raise TypeError(
            f"{op}: lhs and rhs must have one dtype, or both be floats of 8 or 4 bits "
            "(float8_e4m3fn, float8_e5m2 and float4_e2m1fn), got lhs.dtype="
            f"{lhs.dtype} and rhs.dtype={rhs.dtype}; convert one"
        )
    if lhs.shape[-1] != rhs.shape[-1]:
        raise ShapeError(
            f"{op}: lhs and rhs must have the same last dimension, got lhs.shape={lhs.shape} and "
            f"rhs.shape={rhs.shape}; transpose one"
        )
    if rhs.ndim > 2 and rhs.shape[:-2] != lhs.shape[:-2]:
        raise ShapeError(
            f"{op}: rhs must have two dimensions or the batch dimensions of lhs, got lhs.shape="
            f"{lhs.shape} and rhs.shape={rhs.shape}; broadcast one"
        )


def _checked_scales(op: str, name: str, x: jax.Array, scales, block):
    """Check the scales of an operand; return them as an array, and their block shape."""
    what = f"{name}_scales"
    scales = as_array(op, what, scales)
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        raise TypeError(
            f"{op}: {what} must be of a real floating-point dtype, got {what}.dtype="
            f"{scales.dtype}; convert them"
        )
    *batch, rows, depth = x.shape
    is_block = isinstance(block, tuple | list) and len(block) == 2
    if block is not None and not (is_block and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(
            f"{op}: {name}_block must be None or the two extents of a block of rows and of K, got "
            f"{name}_block={block!r}; (1, 128) is a scale for each 128 elements of a row"
        )
    if scales.ndim == 0:
        return scales, (max(rows, 1), max(depth, 1))
    fits = scales.ndim == x.ndim
    if fits:
        *own, own_rows, own_depth = scales.shape
        fits = all(a in (1, b) for a, b in zip(own, batch, strict=True))
        if block is None:
            fits &= _divides(own_rows, rows) and _divides(own_depth, depth)
        else:
            fits &= (own_rows, own_depth) == (-(-rows // block[0]), -(-depth // block[1]))
    if not fits:
        leading = "".join(f"{extent}, " for extent in batch)
        if block is None:
            rule = (
                f"the shape (), ({leading}1, 1), ({leading}{rows}, 1) or, with a scale for each "
                f"block, of numbers that divide {name}.shape={x.shape}"
            )
            remedy = f"reshape them, or give {name}_block where a last block is short"
        else:
            numbers = -(-rows // block[0]), -(-depth // block[1])
            rule = f"the shape ({leading}{numbers[0]}, {numbers[1]}), or 1 for what is in front"
            remedy = f"that is a scale for each block of {name}_block={tuple(block)}"
        raise ValueError(
            f"{op}: {what} must have {rule}, got {what}.shape={scales.shape}; {remedy}"
        )
    if block is None:
        block = (max(rows // own_rows, 1), max(depth // own_depth, 1))
    return scales, tuple(block)


def _with_dimensions(x: jax.Array, scales: jax.Array) -> jax.Array:
    return scales if scales.ndim else scales.reshape((1,) * x.ndim)


def _divides(blocks: int, extent: int) -> bool:
    return blocks == 1 or (blocks > 0 and extent % blocks == 0)


def _of_rows(x: jax.Array, scales: jax.Array, block) -> jax.Array:
    """Expand scales of blocks of rows to per-row scales; a scalar is returned as it is."""
    if scales.ndim == 0:
        return scales
    return BlockScales(x.shape, scales.shape, block, x.ndim - 2).repeated_to_elements(scales)
