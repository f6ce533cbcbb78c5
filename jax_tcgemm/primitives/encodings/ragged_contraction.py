"""Contraction over the tokens of each group, of 8-bit operands with block scales.

    acc[*b, g, m, n] = sum over the tokens i of group g of
        (lhs * lhs_scales)[*b, m, i] * (rhs * rhs_scales)[*b, n, i]

The operands are lhs (*b, m, k) and rhs (*b, n, k), of one float8 or int8 dtype, group_sizes
(*b, s), group_offset (*b, 1), and lhs_scales and rhs_scales in float32, of shape (*b, blocks of m
or n, blocks of k). All have the same number of batch dimensions, each of size 1 where it is
broadcast. The accumulators are the gradient of the matrices of a grouped product, both of whose
operands are held transposed.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device import grouped
from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import grouped_contraction
from jax_tcgemm.primitives import functions
from jax_tcgemm.primitives import ragged_dot as plain
from jax_tcgemm.primitives.encodings import Batched, Encoding, Names
from jax_tcgemm.primitives.encodings.block_scaled import dequantized
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.problem.precision import of_block_scales, of_dequantized


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedContraction(Encoding):
    """The encoding, of a bare product.

    Attributes:
      num_batch: as of `Encoding`.
      groups: the number of groups that accumulators have.
      blocks: block shape of lhs along m and k, and of rhs along n and k.
      precision: as for `ragged_dot`, canonical.
    """

    groups: int
    blocks: tuple[tuple[int, int], tuple[int, int]]
    precision: object = None
    num_batch: int = 0

    num_operands, gated, stores_narrow, is_bare = 6, False, False, True

    def products(self, operands, dtype, options):
        """Multiply dequantized operands, and bfloat16 copies of operands with per-row scales."""
        lhs, rhs, *groups, lhs_scales, rhs_scales = operands
        scales = lhs_scales, rhs_scales
        how = {
            "options": options.of_dequantized_blocks(),
            "form": "contraction",
            "groups": self.groups,
            "precision": of_dequantized(self.precision),
            "preferred_element_type": self.accumulator,
        }
        if any(x.shape[-1] > 1 for x in scales):
            wide = [dequantized(*x) for x in zip((lhs, rhs), scales, self.blocks, strict=True)]
            acc = plain.ragged_dot(*(jnp.swapaxes(x, -1, -2) for x in wide), *groups, **how)
            return [acc.astype(dtype)]
        # bfloat16 represents 8-bit values exactly, and per-row scales can follow the product.
        values = [lax.optimization_barrier(x).astype(jnp.bfloat16) for x in (lhs, rhs)]
        acc = plain.ragged_dot(*(jnp.swapaxes(x, -1, -2) for x in values), *groups, **how)
        of_lhs, of_rhs = (
            BlockScales((*x.shape[:-1], 1), own.shape, block, 0).repeated_to_elements(own)[
                ..., None, :, :
            ]
            for x, own, block in zip((lhs, rhs), scales, self.blocks, strict=True)
        )
        return [(acc * of_lhs * jnp.swapaxes(of_rhs, -1, -2)).astype(dtype)]

    def split_products(self, products, operands):
        """Return the one product."""
        del operands
        return products

    def tangents(self, operands, moving, options, accumulators):
        """Differentiate the product of dequantized operands."""
        del accumulators

        def product(*operands):
            return self.products(operands, self.accumulator, options)[0]

        return [functions.value_and_tangent(product, operands, moving)[1]]

    def batched(self, operands, dims, size, *, reduces, mesh_axis):
        """Add a first batch dimension, of size 1 in operands that are not mapped."""
        del size, reduces, mesh_axis
        operands = [
            lax.expand_dims(x, (0,)) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        for side in range(2):
            # Scales have the batch dimensions of their operand.
            pair = side, 4 + side
            extent = max(operands[i].shape[0] for i in pair)
            for i in pair:
                operands[i] = jnp.broadcast_to(operands[i], (extent, *operands[i].shape[1:]))
        return Batched(dataclasses.replace(self, num_batch=self.num_batch + 1), operands, 0)

    def shape(self, operands):
        """Return (*batch, groups, m, n)."""
        lhs, rhs, *_ = operands
        return *self._batch(*operands), self.groups, lhs.shape[-2], rhs.shape[-2]

    def _batch(self, *operands) -> tuple[int, ...]:
        return np.broadcast_shapes(*(x.shape[: self.num_batch] for x in operands))

    def product_of(self, operands, operand_shapes, function, *, options, in_place):
        """Describe a contraction whose scales the kernel applies."""
        del operand_shapes, in_place
        lhs, rhs, sizes, offset, *scales = operands
        batch = self._batch
        product = grouped.Product(
            options=options,
            form="contraction",
            batches=(batch(lhs), batch(rhs), batch(sizes, offset)),
            m=lhs.shape[-2],
            n=rhs.shape[-2],
            k=lhs.shape[-1],
            groups=self.groups,
            num_sizes=sizes.shape[-1],
            rhs_transposed=False,
            gated=False,
            gathered_rows=None,
            lhs_dtype=np.dtype(lhs.dtype),
            rhs_dtype=np.dtype(rhs.dtype),
            result_dtype=np.dtype(function.out_avals[0].dtype),
            precision=of_block_scales(self.precision),
        )
        triples = zip((lhs, rhs), scales, self.blocks, strict=True)
        of_blocks = (
            BlockScales(tuple(x.shape), tuple(own.shape), block, self.num_batch)
            for x, own, block in triples
        )
        return grouped_contraction.Product(product, tuple(of_blocks))

    def names(self, operands):
        """Divide m and n, where each row has a scale of its own or all have one."""
        batch = tuple(f"b{i}" for i in range(self.num_batch))
        extents = self._batch(*operands)
        endings = [("m", "k"), ("n", "k"), ("sizes",), ("one",)]
        whole = {"k", "sizes", "one", "g"}
        for side, name in enumerate("mn"):
            number, extent = operands[4 + side].shape[-2], operands[side].shape[-2]
            is_each = number == extent and number > 1
            endings.append((name if is_each else f"rows{side}", f"k{side}"))
            whole |= {*endings[-1]} - {name} | ({name} if number > 1 and not is_each else set())
        names = []
        for i, (x, ending) in enumerate(zip(operands, endings, strict=True)):
            # A batch dimension of size 1 that is broadcast has a name of its own.
            pairs = enumerate(zip(batch, extents, strict=True))
            leading = [n if x.shape[j] == extent else f"{n}_{i}" for j, (n, extent) in pairs]
            whole |= {*leading} - {*batch}
            names.append((*leading, *ending))
        return Names(tuple(names), (*batch, "g", "m", "n"), frozenset(whole))

    def obstacle_to_division(self, operands, whole, product, device, options):
        """Refuse dtypes that nothing covers."""
        del operands, whole, options
        if not dense.is_covered(product.product, device.platform):
            return "no implementation covers the dtypes of the product"
        return ""

    def flops(self, operands):
        """Count those of all tokens, as if each were of a group."""
        lhs, rhs, *_ = operands
        return 2 * lhs.size * rhs.shape[-2]
