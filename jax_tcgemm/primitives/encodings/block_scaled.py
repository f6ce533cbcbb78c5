"""Operands with block scales along their last two dimensions.

    acc[*batch, *rows, *columns] =
        sum over k of (lhs * lhs_scales)[*batch, *rows, k] * (rhs * rhs_scales)[*batch, *columns, k]

The operands are lhs, rhs and the scales of both, which are repeated to the shape of what they
scale, `BlockScales`. In a gated product, rhs and its scales have a first dimension of size 2, gate
and up.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import epilogue
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import functions
from jax_tcgemm.primitives.encodings import Batched, Encoding, Instead, Names
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.primitives.rules import moved
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.layers import gate_and_up
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.problem.precision import of_block_scales, of_dequantized


@dataclasses.dataclass(frozen=True)
class BlockScaled(Encoding):
    """The encoding.

    Attributes:
      num_batch: how many dimensions are of the batch.
      blocks: extents of a block of the last two dimensions of each operand.
      gated: as of `Encoding`.
      precision: as for `matmul`, canonical.
      is_bare: as of `Encoding`.
      is_exact: whether bfloat16 has the values of dequantized operands, so that products of them
        are multiplied in bfloat16, not in float32.
    """

    num_batch: int
    blocks: tuple[tuple[int, int], tuple[int, int]]
    gated: bool = False
    precision: object = None
    is_bare: bool = False
    is_exact: bool = False

    num_operands, stores_narrow = 4, False

    def is_dequantized(self, scales) -> bool:
        """Return whether the product is one of bfloat16.

        It is if that is exact and no kernel applies the scales: their blocks are not multiples of
        128 along k.
        """
        depths = [
            depth for own, (_, depth) in zip(scales, self.blocks, strict=True) if own.shape[-1] > 1
        ]
        return self.is_exact and any(depth % 128 for depth in depths)

    def instead(self, operands, options):
        """Multiply dequantized operands."""
        if not self.is_dequantized(operands[2:]):
            return None
        lhs, rhs = self._dequantized(operands)
        how = {"precision": of_dequantized(self.precision), "pair": self._pair(lhs)}
        return Instead(Plain.of(lhs, rhs, self._numbers(lhs, rhs), **how), (lhs, rhs), options)

    def product_calls(self, operands):
        """Multiply as a bare product, with gate and up side by side in its columns."""
        if self.is_bare:
            return ()
        lhs, rhs, lhs_scales, rhs_scales = operands
        if self.gated:
            rhs, rhs_scales = (jnp.moveaxis(x, 0, self.num_batch) for x in (rhs, rhs_scales))
        bare = dataclasses.replace(self, gated=False, is_bare=True)
        return [(bare, (lhs, rhs, lhs_scales, rhs_scales))]

    def products(self, operands, dtype, options):
        """Multiply dequantized operands, by XLA."""
        return [self._product(*self._dequantized(operands), dtype, options)]

    def _dequantized(self, operands) -> list[jax.Array]:
        lhs, rhs, *scales = operands
        triples = zip((lhs, rhs), scales, self.blocks, strict=True)
        return [self._dequantized_operand(*each) for each in triples]

    def _dequantized_operand(self, x, scales, block) -> jax.Array:
        x = dequantized(x, scales, block)
        return x.astype(jnp.bfloat16) if self.is_exact else x

    def _product(self, lhs, rhs, dtype, options: CallOptions) -> jax.Array:
        return plain.dot_general(
            lhs,
            rhs,
            options=options.of_dequantized_blocks(),
            dimension_numbers=self._numbers(lhs, rhs),
            precision=of_dequantized(self.precision),
            preferred_element_type=dtype,
        )

    def _numbers(self, lhs, rhs):
        batch = tuple(range(self.num_batch))
        of_rhs = tuple(axis + self.gated for axis in batch)
        return ((lhs.ndim - 1,), (rhs.ndim - 1,)), (batch, of_rhs)

    def _pair(self, lhs) -> int | None:
        """The dimension of the plain product that tells two accumulators apart."""
        return lhs.ndim - 1 if self.gated else None

    def split_products(self, products, operands):
        """Split a product of gate and up."""
        return gate_and_up(*products, self._pair(operands[0])) if self.gated else products

    def tangents(self, operands, moving, options, accumulators):
        """Multiply dequantized operands and the tangents of the others."""
        del accumulators
        values, tangents = [], []
        for side, block in enumerate(self.blocks):
            dequantize = functools.partial(self._dequantized_operand, block=block)
            x, dx = functions.value_and_tangent(dequantize, operands[side::2], moving[side::2])
            values.append(x)
            tangents.append(dx)
        (lhs, rhs), (dlhs, drhs) = values, tangents
        addends = [] if dlhs is None else [self._product(dlhs, rhs, self.accumulator, options)]
        addends += [] if drhs is None else [self._product(lhs, drhs, self.accumulator, options)]
        if not addends:
            return [None] * self.num_accumulators
        return self.split_products([functools.reduce(lax.add, addends)], operands)

    def batched(self, operands, dims, size, *, reduces, mesh_axis):
        """Add the dimension to the batch, the rows or the columns, depending on what is mapped."""
        del mesh_axis
        lhs, rhs, lhs_scales, rhs_scales = operands
        lhs_dims, rhs_dims = dims[::2], dims[1::2]
        has_lhs, has_rhs = (any(d is not None for d in own) for own in (lhs_dims, rhs_dims))
        if reduces:
            # What is reduced is rows and columns as they are: each entry has a product of its own.
            has_lhs = has_rhs = True
        position = 0 if has_lhs and has_rhs else self.num_batch
        if has_lhs:
            lhs, lhs_scales = _with_dimension((lhs, lhs_scales), lhs_dims, position, size)
        if has_rhs:
            position_of_rhs = position + self.gated
            rhs, rhs_scales = _with_dimension((rhs, rhs_scales), rhs_dims, position_of_rhs, size)
        num_batch = self.num_batch + (has_lhs and has_rhs)
        return Batched(
            dataclasses.replace(self, num_batch=num_batch),
            (lhs, rhs, lhs_scales, rhs_scales),
            position if has_lhs else lhs.ndim - 1,
        )

    def shape(self, operands):
        """Return (*batch, *rows, *columns)."""
        lhs, rhs, *_ = operands
        return *lhs.shape[:-1], *rhs.shape[self.gated + self.num_batch : -1]

    def product_of(self, operands, operand_shapes, function, *, options, in_place):
        """Describe a product of 8 bits whose scales the kernel applies."""
        lhs, rhs, *scales = operands
        columns = rhs.shape[self.gated + self.num_batch : -1]
        shape = (*lhs.shape[:-1], *rhs.shape[: self.gated], *columns)
        how = {
            "options": options,
            "dimension_numbers": self._numbers(lhs, rhs),
            "permutation": tuple(range(len(shape))),
            "precision": of_block_scales(self.precision),
        }
        triples = zip((lhs, rhs), scales, self.blocks, (0, self.gated), strict=True)
        return epilogue.Product(
            plain.product_of(lhs, rhs, jax.ShapeDtypeStruct(shape, self.accumulator), how),
            function,
            operand_shapes,
            pair=self._pair(lhs),
            in_place=in_place,
            scales=tuple(
                BlockScales(tuple(x.shape[first:]), tuple(own.shape[first:]), block, self.num_batch)
                for x, own, block, first in triples
            ),
        )

    def names(self, operands):
        """Divide dimensions whose blocks have one element; K and the others are whole."""
        lhs, rhs, *scales = operands
        named, whole = [], {"pair", "k"}
        for side, x, pair in (("m", lhs, ()), ("n", rhs, ("pair",) * self.gated)):
            rows = range(self.num_batch, x.ndim - len(pair) - 1)
            batch = (f"b{i}" for i in range(self.num_batch))
            named.append((*pair, *batch, *(f"{side}{i}" for i in rows), "k"))
        of_operands = [*named]
        for side, (x, own) in enumerate(zip((lhs, rhs), scales, strict=True)):
            names = []
            for axis, (number, extent) in enumerate(zip(own.shape, x.shape, strict=True)):
                is_each = number == extent and number > 1
                names.append(named[side][axis] if is_each else f"s{side}x{axis}")
                if not is_each:
                    whole |= {names[-1]} | ({named[side][axis]} if number > 1 else set())
            of_operands.append(tuple(names))
        columns = named[1][self.gated + self.num_batch : -1]
        return Names(tuple(of_operands), (*named[0][:-1], *columns), frozenset(whole))

    def obstacle_to_division(self, operands, whole, product, device, options):
        """Refuse dtypes that nothing covers, and dimensions that the epilogue takes whole."""
        del operands, options
        if not dense.is_covered(product.product, device.platform):
            return "no implementation covers the dtypes of the product"
        if whole:
            return "devices may divide a dimension that the function takes whole"
        return ""

    def flops(self, operands):
        """Count those of the plain product."""
        lhs, rhs, *_ = operands
        return plain.flops(lhs, rhs, dimension_numbers=self._numbers(lhs, rhs))


def is_exact_in_bfloat16(dtype, scale_dtype=None) -> bool:
    """Return whether bfloat16 has every product of an element and a scale, if there is one.

    bfloat16 has 8 bits of significand. Subnormal numbers, below 2**-126, are not considered.
    """
    bits = _significand_bits(dtype)
    # A power of two adds no bits.
    if scale_dtype is not None and scale_dtype != jnp.float8_e8m0fnu:
        bits += _significand_bits(scale_dtype)
    return bits <= 8


def _significand_bits(dtype) -> int:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return 1 + jnp.finfo(dtype).nmant


def dequantized(x: jax.Array, scales: jax.Array, block) -> jax.Array:
    """An operand in float32, whose last two dimensions have scales of such blocks."""
    # Where XLA finds conversions to 8 bits and back beside each other it may leave both out.
    x = lax.optimization_barrier(x)
    return x.astype(np.float32) * BlockScales(x.shape, scales.shape, block, 0).repeated_to_elements(
        scales
    )


def _with_dimension(arrays: Sequence[jax.Array], dims, position: int, size: int):
    """An operand and its scales with the new dimension, where scales that lack it have 1."""
    x, scales = arrays
    x = moved(x, dims[0], position, size)
    if dims[1] is None:
        return x, lax.expand_dims(scales, (position,))
    return x, moved(scales, dims[1], position, size)
