"""Operands that are plain arrays.

    acc = transpose(dot_general(lhs, rhs, dimension_numbers), permutation)

The operands are lhs and rhs. A gated product has two accumulators: of two right operands, or of one
with a dimension of extent 2 that tells gate and up apart, which is `pair` of the product.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_tcgemm.device.dense import product as dense
from jax_tcgemm.device.fusion import epilogue
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives.encodings import Batched, Encoding, Names
from jax_tcgemm.primitives.rules import is_moving, moved
from jax_tcgemm.primitives.transposes import ProductLayout
from jax_tcgemm.problem.dtypes import accumulator_dtype
from jax_tcgemm.problem.layers import gate_and_up
from jax_tcgemm.sharding import partitioning, shardings


@dataclasses.dataclass(frozen=True)
class Plain(Encoding):
    """The encoding.

    Attributes:
      dimension_numbers: as of `tcgemm_dot_general`.
      permutation: as of `tcgemm_dot_general`.
      accumulator: as of `Encoding`.
      num_rhs: number of right operands.
      pair: the dimension of the product that tells two accumulators apart, or None.
      precision: as of `tcgemm_dot_general`.
      out_sharding: that of the product.
      symmetric: whether matrices of the product are symmetric, and what the epilogue makes of them.
    """

    dimension_numbers: tuple
    permutation: tuple[int, ...]
    accumulator: np.dtype
    num_rhs: int = 1
    pair: int | None = None
    precision: object = None
    out_sharding: object = None
    symmetric: bool = False

    @classmethod
    def of(cls, lhs, rhs, dimension_numbers, *, permutation=None, **fields) -> "Plain":
        """Return the encoding of a product of arrays, by default in the order of dot_general."""
        if permutation is None:
            permutation = range(plain.result_ndim(lhs.ndim, rhs.ndim, dimension_numbers))
        dtype = accumulator_dtype(lhs.dtype, rhs.dtype)
        return cls(dimension_numbers, tuple(permutation), dtype, **fields)

    @property
    def num_operands(self):
        """Count lhs and the right operands."""
        return 1 + self.num_rhs

    @property
    def num_batch(self):
        """Count the dimensions of the batch."""
        return len(self.dimension_numbers[1][0])

    @property
    def gated(self):
        """Whether there are two right operands, or one of gate and up."""
        return self.num_rhs == 2 or self.pair is not None

    @property
    def num_products(self):
        """Count a product for each right operand."""
        return self.num_rhs

    @property
    def layout(self):
        """Return what a product that reads through transposes changes."""
        return ProductLayout(self.dimension_numbers, self.permutation, self.num_rhs)

    def with_layout(self, layout):
        """Return the encoding of a product that reads through transposes."""
        numbers, permutation, _ = layout
        return dataclasses.replace(self, dimension_numbers=numbers, permutation=permutation)

    def unsharded(self):
        """Return the encoding of one device's product, any part of the whole."""
        return dataclasses.replace(self, out_sharding=None, symmetric=False)

    def products(self, operands, dtype, options):
        """Multiply by `tcgemm_dot_general`."""
        lhs, *rights = operands
        how = {
            "options": options,
            "dimension_numbers": self.dimension_numbers,
            "permutation": self.permutation,
            "precision": self.precision,
            "preferred_element_type": dtype,
            "out_sharding": self.out_sharding,
        }
        return [plain.dot_general(lhs, rhs, **how) for rhs in rights]

    def split_products(self, products, operands):
        """Split a product of gate and up."""
        del operands
        return products if self.pair is None else gate_and_up(*products, self.pair)

    def tangents(self, operands, moving, options, accumulators):
        """Multiply in the dtype of the operands, so that reverse mode is made of such products."""
        del accumulators
        (lhs, *rights), (dlhs, *drights) = operands, moving
        dtype, options = self.accumulator, options.without_config()
        if max(lhs.dtype.itemsize, rights[0].dtype.itemsize) >= 2:
            dtype = jnp.promote_types(lhs.dtype, rights[0].dtype)
        found = []
        for rhs, drhs in zip(rights, drights, strict=True):
            pairs = [(dlhs, rhs)] * is_moving(dlhs) + [(lhs, drhs)] * is_moving(drhs)
            addends = [x for both in pairs for x in self.products(both, dtype, options)]
            wide = [lax.convert_element_type(x, self.accumulator) for x in addends]
            found.append(functools.reduce(lax.add, wide) if wide else None)
        if self.pair is not None and found[0] is None:
            return [None, None]
        return self.split_products(found, operands)

    def batched(self, operands, dims, size, *, reduces, mesh_axis):
        """Map a plain product, whose new dimension is a batch dimension, or one of rows or columns.

        Of an epilogue that reduces it comes first, where JAX has it in the results, too.
        """
        (lhs, *rights), (lhs_dim, *right_dims) = operands, dims
        rhs_dim = next((dim for dim in right_dims if dim is not None), None)
        if rhs_dim is not None:
            both = zip(rights, right_dims, strict=True)
            rights = [moved(x, dim, rhs_dim, size) for x, dim in both]
        numbers, order, position = plain.batched_numbers(
            (lhs.ndim, rights[0].ndim),
            (lhs_dim, rhs_dim),
            self.dimension_numbers,
            self.permutation,
        )
        if position and reduces:
            order, position = (order[position], *order[:position], *order[position + 1 :]), 0
        pair, in_acc = self.pair, position
        if pair is not None:
            pair += position <= pair
            in_acc -= pair < position
        encoding = dataclasses.replace(
            self,
            dimension_numbers=numbers,
            permutation=order,
            pair=pair,
            out_sharding=shardings.with_dimension(
                self.out_sharding, position, len(order), mesh_axis
            ),
        )
        return Batched(encoding, (lhs, *rights), in_acc)

    def _without_pair(self, dims: tuple) -> tuple:
        """Return the entries of an accumulator's dimensions, from those of the product's."""
        return dims if self.pair is None else (*dims[: self.pair], *dims[self.pair + 1 :])

    def _product_shape(self, lhs, rhs) -> tuple[int, ...]:
        contract, batch = self.dimension_numbers
        shape = [lhs.shape[axis] for axis in batch[0]]
        for x, *known in zip((lhs, rhs), contract, batch, strict=True):
            taken = {axis for axes in known for axis in axes}
            shape += [extent for axis, extent in enumerate(x.shape) if axis not in taken]
        return tuple(shape[axis] for axis in self.permutation)

    def shape(self, operands):
        """Return the shape of the product, without gate and up."""
        return self._without_pair(self._product_shape(*operands[:2]))

    def product_of(self, operands, operand_shapes, function, *, options, in_place):
        """Describe a product of plain arrays."""
        lhs, rhs, *_ = operands
        how = {
            "options": options,
            "dimension_numbers": self.dimension_numbers,
            "permutation": self.permutation,
            "precision": self.precision,
        }
        out = jax.ShapeDtypeStruct(self._product_shape(lhs, rhs), self.accumulator)
        product = plain.product_of(lhs, rhs, out, how)
        product = dataclasses.replace(product, symmetric=self.symmetric)
        sizes = self.num_rhs, self.pair, in_place
        return epilogue.Product(product, function, operand_shapes, *sizes, symmetric=self.symmetric)

    def names(self, operands):
        """Divide every dimension, contracted ones among them."""
        lhs, rhs, *_ = operands
        of_lhs, of_rhs, names = plain.names_of(
            lhs.ndim, rhs.ndim, self.dimension_numbers, self.permutation
        )
        accumulator = self._without_pair(names)
        whole = frozenset(names) - frozenset(accumulator)
        return Names((of_lhs, *[of_rhs] * self.num_rhs), accumulator, whole, names)

    def obstacle_to_division(self, operands, whole, product, device, options):
        """Refuse dtypes that nothing covers, and to divide what the epilogue takes whole."""
        if not dense.is_covered(product.product, device.platform):
            return "no implementation covers the dtypes of the product"
        if not whole:
            return ""
        operands = operands[:2]
        if partitioning.has_explicit_axes(*operands):
            one = dataclasses.replace(self, num_rhs=1, pair=None)
            names = one.names(operands)
            division = partitioning.Division(names.operands, (names.product,), call=one.products)
            out = one.types(operands, options)
            layout = partitioning.explicit_layout(division, operands, out)
            divided = layout.divided.keys() | layout.scattered.keys()
            if not divided & {self._without_pair(names.product)[dim] for dim in whole}:
                return ""
        return "devices may divide a dimension that the function takes whole"

    def flops(self, operands):
        """Count those of the products."""
        own = plain.flops(*operands[:2], dimension_numbers=self.dimension_numbers)
        return own * self.num_rhs
