"""Groups of rows, each by a matrix of its own, with scales of blocks of both.

The operands are lhs, rhs, group_sizes and group_offset, as of `Ragged`, and the scales of blocks of
lhs, (*b, blocks of m, blocks of k), and of rhs, (*b, g, blocks of n, blocks of k), of a gated
product (*b, g, 2, blocks of n, blocks of k). The accumulators are those of lhs and rhs times their
scales.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_tcgemm.primitives import functions
from jax_tcgemm.primitives.encodings import Batched
from jax_tcgemm.primitives.encodings.block_scaled import dequantized
from jax_tcgemm.primitives.encodings.ragged import Ragged, side_by_side
from jax_tcgemm.primitives.ragged_dot import RaggedOperands
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.problem.operands.quantized import spread_along
from jax_tcgemm.problem.precision import of_dequantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedBlockScaled(Ragged):
    """The encoding.

    Attributes:
      blocks: extents of a block of lhs along m and k, and of rhs along n and k.
      is_bare: as of `Encoding`.
    """

    blocks: tuple[tuple[int, int], tuple[int, int]]
    is_bare: bool = False

    operand_names = (*RaggedOperands._fields[:4], "lhs_scales", "rhs_scales")

    def products(self, operands, dtype, options):
        """Multiply dequantized operands."""
        dequantizers = enumerate(self._dequantizers(operands[0]))
        wide = [f(*operands[side::4]) for side, f in dequantizers]
        operands = *wide, *operands[2:4]
        return self._plain.products(operands, dtype, options.of_dequantized_blocks())

    def product_calls(self, operands):
        """Multiply as bare products, once by gate and up side by side."""
        if self.is_bare:
            return ()
        if not self.gated:
            return [(dataclasses.replace(self, by_group=(), is_bare=True), operands)]
        lhs, rhs, sizes, offset, lhs_scales, scales = operands
        rights, (of_lhs, (columns, depth)) = side_by_side(rhs), self.blocks
        if len(rights) > 1:
            of_rights = [scales[..., i, :, :] for i in range(2)]
        else:
            n, axis = rhs.shape[-1], scales.ndim - 2
            if n % columns != 0:
                # A short block of one matrix has the other one's columns behind it.
                scales, columns = spread_along(axis, scales, n, columns), 1
            of_rights = [lax.collapse(scales, axis - 1, axis + 1)]
        blocks = of_lhs, (columns, depth)
        own = dataclasses.replace(self, gated=False, by_group=(), blocks=blocks, is_bare=True)
        pairs = zip(rights, of_rights, strict=True)
        return [(own, (lhs, right, sizes, offset, lhs_scales, x)) for right, x in pairs]

    @property
    def _plain(self) -> Ragged:
        """The encoding of dequantized operands."""
        names = ("groups", "accumulator", "gated", "out_sharding")
        own = {name: getattr(self, name) for name in names}
        return Ragged(**own, precision=of_dequantized(self.precision))

    def _dequantizers(self, lhs) -> list[Callable]:
        """The functions that dequantize lhs, and rhs, of arrays and their scales."""
        of_lhs, of_rhs = self.blocks

        def of_matrices(rhs, scales):
            """Dequantize rhs, in a gated product (*b, g, k, 2, n)."""
            k = lhs.ndim - 1
            return jnp.moveaxis(dequantized(jnp.moveaxis(rhs, k, -1), scales, of_rhs), -1, k)

        return [lambda *arrays: dequantized(*arrays, of_lhs), of_matrices]

    def tangents(self, operands, moving, options, accumulators):
        """Multiply dequantized operands and the tangents of the others."""
        found = [
            functions.value_and_tangent(f, operands[side::4], moving[side::4])
            for side, f in enumerate(self._dequantizers(operands[0]))
        ]
        wide, tangents = zip(*found, strict=True)
        operands = *wide, *operands[2:4]
        options = options.of_dequantized_blocks()
        return self._plain.tangents(operands, tangents, options, accumulators)

    def batched(self, operands, dims, size, *, reduces, mesh_axis):
        """Add a first batch dimension, the same one in scales as in what they scale."""
        how = {"reduces": reduces, "mesh_axis": mesh_axis}
        encoding, operands, position = super().batched(operands, dims, size, **how)
        lhs, rhs, *groups, lhs_scales, rhs_scales = operands
        lhs, lhs_scales = _of_equal_batch(lhs, lhs_scales)
        rhs, rhs_scales = _of_equal_batch(rhs, rhs_scales)
        operands = (lhs, rhs, *groups, lhs_scales, rhs_scales)
        return Batched(encoding, operands, position)

    def scales(self, operands):
        """Describe scales of lhs, and of rhs as (*batch, groups[, 2], n, k)."""
        lhs, rhs, *_, lhs_scales, rhs_scales = operands
        *matrices, k = rhs.shape[: lhs.ndim]
        num_batch = len(matrices) - 1
        *pair, n = rhs.shape[lhs.ndim :]
        shape = (*matrices, *pair, n, k)
        of_lhs, of_rhs = self.blocks
        return (
            BlockScales(tuple(lhs.shape), tuple(lhs_scales.shape), of_lhs, num_batch),
            BlockScales(shape, tuple(rhs_scales.shape), of_rhs, len(shape) - 2),
        )


def _of_equal_batch(*arrays: jax.Array) -> list[jax.Array]:
    """Return arrays whose first dimension, of size 1 or another one, is the largest of all."""
    size = max(x.shape[0] for x in arrays)
    return [jnp.broadcast_to(x, (size, *x.shape[1:])) for x in arrays]
