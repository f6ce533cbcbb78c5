"""Block scales of an operand of shape (*batch, *rows, k)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.problem.gemm import ScaleStrides
from jax_tcgemm.problem.operands.quantized import repeated

# From this many row blocks on, scales are stored with the row blocks contiguous, so that a kernel's
# load of the scales of a k-block reads few lines of memory. A CTA tile has fewer row blocks.
_LEAST_CONTIGUOUS_ROWS = 256


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """Shapes of an operand, of its blocks and of their scales.

    Attributes:
      operand_shape: shape of the operand.
      shape: shape of the scales, of the same rank. The last two dimensions are the numbers of
        blocks; each other dimension is 1, which broadcasts, or the operand's.
      block: shape of a block of the last two dimensions; the last block of each may be partial.
      num_batch: number of batch dimensions.
    """

    operand_shape: tuple[int, ...]
    shape: tuple[int, ...]
    block: tuple[int, int]
    num_batch: int

    def repeated_to_elements(self, scales: jax.Array) -> jax.Array:
        """Repeat each scale for the elements of its block; dimensions of size 1 stay 1."""
        return self._repeated(scales, [1 if n == 1 else x for n, x in self._pairs()])

    def folded(self, scales: jax.Array) -> jax.Array:
        """Return the scales in the layout of `scale_strides`: (batch, row blocks, k-blocks).

        With many row blocks, the layout is (batch, k-blocks, row blocks): a kernel that loads the
        scales of a k-block then reads few lines of memory.
        """
        own, _ = self._folded()
        batch, rows = own[: self.num_batch], own[self.num_batch : -1]
        shape = math.prod(batch), math.prod(rows), own[-1]
        scales = lax.reshape(self._repeated(scales, own), shape)
        return jnp.swapaxes(scales, 1, 2) if shape[1] >= _LEAST_CONTIGUOUS_ROWS else scales

    def scale_strides(self, batch_inner: int) -> ScaleStrides:
        """Return the strides of the folded scales in a problem with this `batch_inner`."""
        own, block_rows = self._folded()
        num_k_blocks, num_row_blocks = own[-1], math.prod(own[self.num_batch : -1])
        is_batched = math.prod(own[: self.num_batch]) > 1
        stride = is_batched * num_k_blocks * num_row_blocks
        within = num_k_blocks, 1
        if num_row_blocks >= _LEAST_CONTIGUOUS_ROWS:
            within = 1, num_row_blocks
        strides = *within, stride * batch_inner, stride
        return ScaleStrides(block_rows, self.block[1], *strides)

    def _pairs(self):
        return zip(self.shape, self.operand_shape, strict=True)

    def _folded(self) -> tuple[list[int], int]:
        """Return the shape of scales whose row dimensions can be collapsed, and rows of a block."""
        first, extents = self.num_batch, self.operand_shape
        batch, rows, block_rows = self.shape[:first], self.shape[first:-1], self.block[0]
        if any(n > 1 for n in batch):
            batch = extents[:first]
        num_rows = math.prod(extents[first:-1])
        if all(n == 1 for n in rows):
            block_rows = max(num_rows, 1)
        elif num_rows != extents[-2]:
            # Row blocks do not span two entries of an outer row dimension.
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
