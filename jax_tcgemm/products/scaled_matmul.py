"""The public `scaled_matmul`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.primitives import dot_general as primitive
from jax_tcgemm.problem.dtypes import FLOAT8
from jax_tcgemm.problem.precision import canonical_precision
from jax_tcgemm.products.arguments import ShapeError, as_array, canonical_element_type
from jax_tcgemm.products.epilogue import with_epilogue
from jax_tcgemm.selection import DEQUANTISED, check_names


def scaled_matmul(
    lhs,
    rhs,
    lhs_scales,
    rhs_scales,
    *,
    preferred_element_type=jnp.float32,
    precision=None,
    implementation: str | None = None,
    config: str | None = None,
):
    """The product of quantised matrices and their scales, as `jax.nn.scaled_matmul`.

        out[..., m, n] = sum over k of (lhs * lhs_scales)[..., m, k] * (rhs * rhs_scales)[..., n, k]

    where scales are repeated to the shape of what they scale. With one scale for all of an operand,
    or one for each of its rows, the product is of the quantised operands, and what it adds up is
    multiplied by both scales before it is rounded: an epilogue of the same call, where one kernel
    does both. With scales of blocks of K the operands are multiplied by them first, in float32, and
    XLA multiplies what that gives; `jax_tcgemm.explain` says so.

    Args:
      lhs: array of shape (..., m, k) of a real dtype, mostly float8_e4m3fn or float8_e5m2.
      rhs: array of shape (n, k), or (..., n, k) with the batch dimensions of lhs, of the same
        dtype, or of the other one of these two. `quantize` makes both.
      lhs_scales: floating-point array of shape () or (..., 1, 1), (..., m, 1), or (..., m', k'),
        where m' and k' divide m and k into blocks: DeepSeek's is (m, k / 128).
      rhs_scales: the same for rhs: (), (..., 1, 1), (..., n, 1), or (..., n', k').
      preferred_element_type: real floating-point dtype of the result.
      precision: as for `matmul`. Of 8-bit floats, `lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32` is
        the default, and ANY_F8_ANY_F8_F32_FAST_ACCUM faster; see Numerics there.
      implementation: name of an implementation that runs the product, or the call fails, as it does
        with scales of blocks of K for all but "xla"; None selects one. Derivatives inherit it.
      config: a config of that implementation; None selects one.

    Returns:
      The product, of shape (..., m, n) and dtype preferred_element_type.

    Raises:
      TypeError: for operands that are not real numeric arrays of one dtype, or both of 8-bit
        floats, and for scales or a result that are not real floating point.
      ValueError: for operands or scales of shapes that do not fit, an unknown implementation or
        config, or, when the program is lowered, an implementation that cannot run the product.

    Numerics:
      8-bit floats are multiplied exactly and added up as for `matmul`, in float32; the sum is
      multiplied by lhs_scales, then by rhs_scales in float32, and rounded once. With scales of
      blocks of K the operands are multiplied by their scales in float32, and these products are
      as those of float32 by `matmul`: on CUDA in TF32 unless the precision is HIGHEST.

      Cotangents have the dtypes of what they are of, 8-bit floats for the operands; those of the
      scales are exact.

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
    check_names(op, implementation, config)
    dtype = canonical_element_type(op, preferred_element_type)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{op}: preferred_element_type must be a real floating-point dtype, got "
            f"{preferred_element_type=}; convert the result"
        )
    _check_operands(op, lhs, rhs)
    lhs_scales = _checked_scales(op, "lhs", lhs, lhs_scales)
    rhs_scales = _checked_scales(op, "rhs", rhs, rhs_scales)
    batch = tuple(range(rhs.ndim - 2))
    numbers = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, batch))
    if any(scales.ndim and scales.shape[-1] > 1 for scales in (lhs_scales, rhs_scales)):
        out = primitive.dot_general(
            _dequantised(lhs, lhs_scales),
            _dequantised(rhs, rhs_scales),
            op=DEQUANTISED,
            dimension_numbers=numbers,
            precision=_of_float32(canonical_precision(op, precision)),
            preferred_element_type=np.dtype(np.float32),
            implementation=implementation,
            config=config,
        )
        return out.astype(dtype)
    lhs_scales, rhs_scales = _of_rows(lhs, lhs_scales), _of_rows(rhs, rhs_scales)
    if rhs_scales.ndim:
        rhs_scales = jnp.swapaxes(rhs_scales, -1, -2)
    return with_epilogue(
        op,
        lhs,
        rhs,
        _scaled(dtype),
        (lhs_scales, rhs_scales),
        dimension_numbers=numbers,
        precision=precision,
        implementation=implementation,
        config=config,
    )


@functools.cache
def _scaled(dtype: np.dtype) -> Callable:
    """The epilogue; of one dtype the same function, whose trace is known."""

    def scaled(acc, lhs_scales, rhs_scales):
        return (acc.astype(jnp.float32) * lhs_scales * rhs_scales).astype(dtype)

    return scaled


def _of_float32(precision):
    """A canonical precision for operands that are no 8-bit floats any more."""
    return None if getattr(precision, "name", "").startswith("ANY_F8_") else precision


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
    if lhs.dtype != rhs.dtype and not (lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8):
        raise TypeError(
            f"{op}: lhs and rhs must have one dtype, or both be 8-bit floats, got lhs.dtype="
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


def _checked_scales(op: str, name: str, x: jax.Array, scales) -> jax.Array:
    """The scales of an operand in float32."""
    what = f"{name}_scales"
    scales = as_array(op, what, scales)
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        raise TypeError(
            f"{op}: {what} must be of a real floating-point dtype, got {what}.dtype="
            f"{scales.dtype}; convert them"
        )
    *batch, rows, depth = x.shape
    fits = scales.ndim == 0
    if scales.ndim == x.ndim:
        *own, own_rows, own_depth = scales.shape
        fits = all(a in (1, b) for a, b in zip(own, batch, strict=True))
        fits &= _divides(own_rows, rows) and _divides(own_depth, depth)
    if not fits:
        leading = "".join(f"{extent}, " for extent in batch)
        raise ValueError(
            f"{op}: {what} must have the shape (), ({leading}1, 1), ({leading}{rows}, 1) or, with "
            f"a scale for each block, of numbers that divide {name}.shape={x.shape}, got "
            f"{what}.shape={scales.shape}; reshape them"
        )
    return scales.astype(jnp.float32)


def _divides(blocks: int, extent: int) -> bool:
    return blocks == 1 or (blocks > 0 and extent % blocks == 0)


def _of_rows(x: jax.Array, scales: jax.Array) -> jax.Array:
    """Scales of blocks of rows as those of rows; one for all of them as it is."""
    if scales.ndim == 0 or scales.shape[-2] == 1:
        return scales
    return jnp.repeat(scales, x.shape[-2] // scales.shape[-2], axis=-2)


def _dequantised(x: jax.Array, scales: jax.Array) -> jax.Array:
    """An operand times its scales."""
    # Where XLA finds conversions to 8 bits and back beside each other it may leave both out.
    x = lax.optimization_barrier(x)
    if scales.ndim:
        scales = _of_rows(x, scales)
        if scales.shape[-1] > 1:
            scales = jnp.repeat(scales, x.shape[-1] // scales.shape[-1], axis=-1)
    return x.astype(jnp.float32) * scales
