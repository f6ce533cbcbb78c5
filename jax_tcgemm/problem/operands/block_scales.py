"""Scales of blocks of an operand whose dimensions are (*batch, *rows, k)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.problem.gemm import ScaleStrides
from jax_tcgemm.problem.operands.quantized import repeated

# More than a tile has: fewer are read from few lines however they lie.
_MANY_ROWS = 256


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """Which scale is for which element of an operand.

    Attributes:
      operand_shape: extents of the operand.
      shape: those of the scales, as many. Of the last two dimensions they are the numbers of
        blocks, of others 1, for a scale that is for all, or the operand's.
      block: extents of a block of the last two dimensions; the last one of each may be short.
      num_batch: how many dimensions are of the batch.
    """

    operand_shape: tuple[int, ...]
    shape: tuple[int, ...]
    block: tuple[int, int]
    num_batch: int

    def spread(self, scales: jax.Array) -> jax.Array:
        """A scale for each element; 1 stays where one is for all."""
        return self._repeated(scales, [1 if n == 1 else x for n, x in self._pairs()])

    def folded(self, scales: jax.Array) -> jax.Array:
        """Scales as `scale_strides` describes them, (batch entries, blocks of rows, blocks of K).

        Scales of many rows are contiguous, (batch entries, blocks of K, blocks of rows): a kernel
        that loads the scales of a block of K then reads few lines of memory.
        """
        own, _ = self._folded()
        batch, rows = own[: self.num_batch], own[self.num_batch : -1]
        shape = math.prod(batch), math.prod(rows), own[-1]
        scales = lax.reshape(self._repeated(scales, own), shape)
        return jnp.swapaxes(scales, 1, 2) if shape[1] >= _MANY_ROWS else scales

    def scale_strides(self, batch_inner: int) -> ScaleStrides:
        """Strides of the folded scales in a problem with this `batch_inner`."""
        own, block_rows = self._folded()
        depth, num_rows = own[-1], math.prod(own[self.num_batch : -1])
        is_batched = math.prod(own[: self.num_batch]) > 1
        stride = is_batched * depth * num_rows
        row_stride, k_stride = (1, num_rows) if num_rows >= _MANY_ROWS else (depth, 1)
        strides = row_stride, k_stride, stride * batch_inner, stride
        return ScaleStrides(block_rows, self.block[1], *strides)

    def _pairs(self):
        return zip(self.shape, self.operand_shape, strict=True)

    def _folded(self) -> tuple[list[int], int]:
        """How many scales each dimension has where those of rows are one, and rows of a block."""
        first, extents = self.num_batch, self.operand_shape
        batch, rows, block_rows = self.shape[:first], self.shape[first:-1], self.block[0]
        if any(n > 1 for n in batch):
            batch = extents[:first]
        num_rows = math.prod(extents[first:-1])
        if all(n == 1 for n in rows):
            block_rows = max(num_rows, 1)
        elif num_rows != extents[-2]:
            # Blocks of rows end where the dimension does.
            is_even = extents[-2] % block_rows == 0
            rows = (*extents[first:-2], rows[-1] if is_even else extents[-2])
            block_rows = block_rows if is_even else 1
        return [*batch, *rows, self.shape[-1]], block_rows

    def _repeated(self, scales: jax.Array, target) -> jax.Array:
        sizes = {len(self.shape) - 2: self.block[0], len(self.shape) - 1: self.block[1]}
        for axis, extent in enumerate(target):
            if scales.shape[axis] == extent:
                continue
            size = extent if scales.shape[axis] == 1 else sizes[axis]
            scales = repeated(axis, scales, size)
            if scales.shape[axis] != extent:
                scales = lax.slice_in_dim(scales, 0, extent, axis=axis)
        return scales
