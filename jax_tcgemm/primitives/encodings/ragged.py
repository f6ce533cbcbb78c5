"""Groups of rows, each by a matrix of its own.

    acc[*b, i, n] = sum over k of lhs[*b, i, k] * rhs[*b, g, k, n]   for the rows i of group g

The operands are the operands of `tcgemm_ragged_dot` of form rows: lhs, rhs, group_sizes,
group_offset and, where gathered, gather. Of a gated product rhs is (*b, g, k, 2, n). Results are 0
in rows that belong to no group.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import grouped_epilogue
from jax_tcgemm.primitives import ragged_dot as plain
from jax_tcgemm.primitives.encodings import Batched, Names
from jax_tcgemm.primitives.encodings.grouped import Grouped
from jax_tcgemm.primitives.encodings.rows_of_groups import RowsOfGroups, padded
from jax_tcgemm.primitives.ragged_dot import RaggedOperands
from jax_tcgemm.primitives.rules import is_moving
from jax_tcgemm.problem.dtypes import accumulator_dtype
from jax_tcgemm.problem.operands.block_scales import BlockScales
from jax_tcgemm.sharding import ragged_division, shardings


@dataclasses.dataclass(frozen=True)
class Ragged(Grouped):
    """The encoding.

    Attributes:
      groups: number of groups that rhs has.
      accumulator: as of `Encoding`.
      gated: as of `Encoding`.
      gathered: whether rows of lhs are gathered.
      by_group: as of `Grouped`.
      precision: as of `tcgemm_ragged_dot`.
      out_sharding: that of an accumulator; None follows lhs and rhs.
    """

    groups: int
    accumulator: np.dtype = Grouped.accumulator
    gated: bool = False
    gathered: bool = False
    by_group: tuple[bool, ...] = ()
    precision: object = None
    out_sharding: object = None

    num_batch, masks_results = 0, True

    @classmethod
    def of(cls, operands: RaggedOperands, **fields) -> "Ragged":
        """Return the encoding of a product of arrays."""
        dtype = accumulator_dtype(operands.lhs.dtype, operands.rhs.dtype)
        groups, gathered = operands.rhs.shape[0], operands.gather is not None
        return cls(groups, dtype, gathered=gathered, **fields)

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the operands, as `RaggedOperands` has them."""
        return RaggedOperands._fields[: 4 + self.gathered]

    @property
    def num_operands(self):
        """Count lhs, rhs, sizes, offset and what else there is."""
        return len(self.operand_names)

    def unsharded(self):
        """Return the encoding of one device's product."""
        return dataclasses.replace(self, out_sharding=None)

    def of_shards(self, layout, operands):
        """Find which groups a device has, and how many of their rows."""
        lhs, rhs, sizes, offset, *rest = operands
        groups = ragged_division.groups_here(layout, "m", sizes, offset)
        own = dataclasses.replace(self, groups=layout.shard_extent("g"))
        return own, (lhs, rhs, *groups, *rest)

    def products(self, operands, dtype, options):
        """Multiply by `tcgemm_ragged_dot`, once by gate and up side by side."""
        lhs, rhs, *rest = operands
        how = {
            "options": options,
            "groups": self.groups,
            "precision": self.precision,
            "preferred_element_type": dtype,
            "out_sharding": self.out_sharding,
        }
        rights = side_by_side(rhs) if self.gated else [rhs]
        return [plain.ragged_dot(lhs, right, *rest, **how) for right in rights]

    def split_products(self, products, operands):
        """Split a product by gate and up side by side."""
        del operands
        if len(products) == self.num_accumulators:
            return products
        return jnp.split(*products, 2, axis=-1)

    def rows(self, operands, options):
        """Return the rows of the accumulators."""
        groups = (*operands[2:4], self.groups)
        return RowsOfGroups.of(*groups, self.shape(operands), self.by_group, options)

    def tangents(self, operands, moving, options, accumulators):
        """Multiply in the dtype of lhs and rhs, so that reverse mode is made of such products."""
        del accumulators
        (lhs, rhs, *rest), (dlhs, drhs, *_) = operands, moving
        dtype = np.dtype(jnp.promote_types(lhs.dtype, rhs.dtype))
        dtype = dtype if dtype.itemsize > 1 else self.accumulator
        pairs = [(dlhs, rhs)] if dlhs is not None and is_moving(dlhs) else []
        pairs += [(lhs, drhs)] if drhs is not None and is_moving(drhs) else []
        if not pairs:
            return [None] * self.num_accumulators
        options = options.without_config()
        addends = [self.accumulators((*pair, *rest), dtype, options) for pair in pairs]
        sums = zip(*addends, strict=True)
        return [functools.reduce(lax.add, [x.astype(self.accumulator) for x in s]) for s in sums]

    def batched(self, operands, dims, size, *, reduces, mesh_axis):
        """Add a first batch dimension, of size 1 in operands that are not mapped."""
        del size, reduces
        operands = [
            lax.expand_dims(x, (0,)) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        ndim = operands[2].ndim + 1
        sharding = shardings.with_dimension(self.out_sharding, 0, ndim, mesh_axis)
        return Batched(dataclasses.replace(self, out_sharding=sharding), operands, 0)

    def shape(self, operands):
        """Return (*batch, rows, columns)."""
        lhs, rhs, sizes, *_ = operands
        rows = operands[4].shape[-1] if self.gathered else lhs.shape[-2]
        batch = np.broadcast_shapes(*(x.shape[: sizes.ndim - 1] for x in operands))
        return (*batch, rows, rhs.shape[-1])

    def scales(self, operands) -> tuple[BlockScales, ...]:
        """Describe block scales of lhs and rhs to the planner, if there are any."""
        del operands
        return ()

    def _of_product(self, operands, **params) -> tuple[tuple, dict]:
        """The operands and parameters of `tcgemm_ragged_dot` that describe a product."""
        params |= {"form": "rows", "rhs_transposed": False, "gathered": self.gathered}
        return operands[: 4 + self.gathered], params

    def product_of(self, operands, operand_shapes, function, *, options, in_place):
        """Describe a grouped product, nothing of it in place."""
        del in_place
        result = jax.ShapeDtypeStruct((), self.accumulator)
        how = {"options": options, "precision": self.precision}
        own, params = self._of_product(operands, **how)
        product = plain.product_of(*own, result, params)
        product = dataclasses.replace(product, gated=self.gated)
        by_group = padded(self.by_group, len(operand_shapes))
        scales = self.scales(operands)
        return grouped_epilogue.Product(product, function, operand_shapes, by_group, scales)

    def names(self, operands):
        """Divide rows, columns, batch and groups, whose rows are 0 on devices without them."""
        named = dict(zip(self.operand_names, operands, strict=True))
        names, accumulator, whole = ragged_division.names_of(named)
        # The epilogue cannot wait for a sum over k without the groups of its rows.
        return Names(names, accumulator, frozenset((*whole, "k")), even=("g",))

    def obstacle_to_division(self, operands, whole, product, device, options):
        """Refuse dtypes that nothing covers, and dimensions that the epilogue takes whole."""
        del operands, options
        if not dense.is_covered(product.product, device.platform):
            return "no implementation covers the dtypes of the product"
        return "devices may divide a dimension that the function takes whole" if whole else ""

    def flops(self, operands):
        """Count those of all rows, as if each were of a group."""
        own, params = self._of_product(operands)
        return plain.flops(*own, **params) * self.num_accumulators


def side_by_side(rhs: jax.Array) -> list[jax.Array]:
    """Return gate and up of (*b, g, k, 2, n) in one array (*b, g, k, 2 * n), or else in two."""
    if jax.typeof(rhs).sharding.spec.partitions[-1]:
        # Columns that are divided by explicit axes cannot be put side by side.
        return [rhs[..., 0, :], rhs[..., 1, :]]
    return [lax.collapse(rhs, rhs.ndim - 2)]
