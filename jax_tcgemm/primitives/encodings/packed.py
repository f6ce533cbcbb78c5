"""Rows by a packed weight.

    acc[*rows, *columns] = sum over k of x[*rows, k] * w[k, *columns]

or, grouped, the rows of each group by a weight of their own,

    acc[r, n] = sum over k of x[r, k] * w[g, k, n]

The factors are those of `tcgemm_packed_dot`: x and, beside float8_e4m3fn, the scales of its rows,
then the arrays of the weight and, grouped, group_sizes and group_offset. Of a gated product the
columns of the weight are (2, n). Results are 0 in rows that belong to no group.
"""

import dataclasses
import math

import jax
import numpy as np

from jax_tcgemm.device import packed_epilogue
from jax_tcgemm.primitives import functions, packed_dot
from jax_tcgemm.primitives.encodings import Batched, Names, Rows
from jax_tcgemm.primitives.encodings.grouped import Grouped
from jax_tcgemm.primitives.encodings.plain import Plain
from jax_tcgemm.primitives.encodings.rows_of_groups import RowsOfGroups, padded
from jax_tcgemm.primitives.packed_weight import (
    arrays_of,
    division_of_weight,
    problem_of,
    rows_of_weight,
    weight_of,
)
from jax_tcgemm.primitives.rules import moved, same_varying
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.layers import halves
from jax_tcgemm.problem.packed_weight import PackedFormat, PackedWeight
from jax_tcgemm.sharding import partitioning


def factors_of(x, w: PackedWeight, row_scales=None, groups=()) -> tuple[jax.Array, ...]:
    """The factors of a product; row_scales as for `packed_dot`, `groups` () or sizes and offset."""
    return packed_dot.rows_of(x, row_scales) + arrays_of(w) + tuple(groups)


@dataclasses.dataclass(frozen=True)
class Packed(Grouped):
    """The encoding.

    Attributes:
      format: of the weight.
      num_factors: as of `Encoding`.
      gated: as of `Encoding`.
      grouped: whether rows are those of groups.
      by_group: as of `Grouped`.
      keeps_zeros: whether the function makes 0 of accumulators that are 0, so that nothing has to
        be written in rows that belong to no group.
    """

    format: PackedFormat
    num_factors: int
    gated: bool = False
    grouped: bool = False
    by_group: tuple[bool, ...] = ()
    keeps_zeros: bool = False

    num_batch = 0

    def products(self, factors, dtype, options):
        """Multiply by `tcgemm_packed_dot`."""
        x, scales, weight, groups = self._split(factors)
        w = weight_of(weight, self.format)
        how = {"options": options, "dtype": dtype, "row_scales": scales[0] if scales else None}
        product = packed_dot.packed_ragged_dot if groups else packed_dot.packed_dot
        return [product(x, w, *groups, **how)]

    def apart(self, products, factors):
        """Split a product of gate and up."""
        return halves(*products, factors[0].ndim - 1) if self.gated else products

    def _split(self, factors):
        return packed_dot.split(factors, self.grouped)

    @property
    def masks_results(self):
        """Whether rows of no group may have other results than 0."""
        return self.grouped and not self.keeps_zeros

    def rows(self, factors, options):
        """Return the rows of groups, unless the function keeps zeros and so takes no operands."""
        if not self.masks_results:
            return Rows()
        _, _, weight, groups = self._split(factors)
        shape = self.shape(factors)
        return RowsOfGroups.of(*groups, weight[0].shape[0], shape, self.by_group, options)

    def tangents(self, factors, moving, options):
        """Multiply the tangent of x by the weight, which is bytes and has no tangent."""
        rows, weight = packed_dot.rows_and_weight(factors)
        _, dx = functions.value_and_tangent(packed_dot.dequantized, rows, moving[: len(rows)])
        if dx is None:
            return [None] * self.num_accumulators
        own = dataclasses.replace(self, num_factors=1 + len(weight))
        factors = same_varying(dx, *weight)
        return own.accumulators(factors, self.accumulator, options.without_config())

    def batched(self, factors, dims, size, *, reduces, mesh_axis):
        """Add the dimension to the rows; mapped weights and groups are no single product."""
        del reduces, mesh_axis
        rows, weight = packed_dot.rows_and_weight(factors)
        if self.grouped or any(dim is not None for dim in dims[len(rows) :]):
            return None
        pairs = zip(rows, dims, strict=False)
        rows = [moved(x, dim, 0, size) for x, dim in pairs]
        return Batched(self, (*rows, *weight), 0)

    def instead(self, factors, operands, options, function, bind):
        """Multiply many rows by the dequantized weight, and few rows of 8 bits in 16 bits."""
        (x, *scales), weight = packed_dot.rows_and_weight(factors)
        way = self.way(factors, options)
        if way is packed_dot.Way.BY_ARRAY and not self.grouped:
            form = self.format
            w = rows_of_weight(weight_of(weight, form), options=options, dtype=x.dtype)
            w = w[: form.n].reshape(*form.shape[1:], form.k)
            numbers = ((x.ndim - 1,), (w.ndim - 1,)), ((), ())
            encoding = Plain.of(x, w, numbers, pair=x.ndim - 1 if self.gated else None)
            return bind(encoding, (x, w), operands, options.without_config(), function)
        if way is packed_dot.Way.IN_16_BITS:
            own = dataclasses.replace(self, num_factors=1 + len(weight))
            x = packed_dot.dequantized(x, *scales)
            return bind(own, (x, *weight), operands, options, function)
        return None

    def way(self, factors, options) -> packed_dot.Way:
        """Return how the accumulators are computed where no kernel runs the function."""
        x, scales, _, groups = self._split(factors)
        number = groups[0].shape[0] if groups else 1
        return packed_dot.way_of(x.shape[:-1], bool(scales), options, number)

    def shape(self, factors):
        """Return (*rows, *columns), of a gated product (*rows, n)."""
        return *factors[0].shape[:-1], *self.format.shape[1 + self.gated :]

    def product_of(self, factors, operand_shapes, function, *, options, in_place):
        """Describe a product that kernels of packed weights compute, nothing of it in place."""
        del in_place
        x, _, weight, groups = self._split(factors)
        own = {"form": "product", "m": math.prod(x.shape[:-1]), "out_dtype": "f32"}
        own["in_dtype"] = DTYPE_NAMES[np.dtype(x.dtype)]
        if groups:
            own["form"] = "grouped"
            own |= {"experts": weight[0].shape[0], "num_sizes": groups[0].shape[0]}
        return packed_epilogue.Product(
            options,
            self.format,
            problem_of(weight[0].shape[-3], self.format, **own),
            function,
            self.shape(factors),
            x.ndim - 1,
            operand_shapes,
            self.gated,
            padded(self.by_group, len(operand_shapes)),
        )

    def names(self, factors):
        """Divide rows."""
        x, scales, weight, _ = self._split(factors)
        rows = tuple(f"m{axis}" for axis in range(x.ndim - 1))
        columns = tuple(f"n{axis}" for axis in range(len(self.format.shape) - 1 - self.gated))
        of_weight = division_of_weight(weight)
        whole = frozenset(("k", *columns, *(name for own in of_weight for name in own)))
        return Names(((*rows, "k"), *([rows] * len(scales)), *of_weight), (*rows, *columns), whole)

    def obstacle_to_division(self, factors, whole, product, device, options):
        """Refuse to divide anything but rows, and rows that the function takes whole."""
        del device, options
        if self.grouped:
            return "devices may divide the rows of groups"
        (x, *_), weight = packed_dot.rows_and_weight(factors)
        if not partitioning.has_explicit_axes(*factors):
            return "devices may divide the columns of the weight"
        if any(part is not None for own in weight for part in own.sharding.spec.partitions):
            return "devices divide the columns of the weight"
        if x.sharding.spec.partitions[-1] is not None:
            return "devices divide what is contracted"
        if any(dim < product.num_rows for dim in whole):
            return "devices may divide a dimension that the function takes whole"
        return ""

    def flops(self, factors):
        """Count those of all columns."""
        return 2 * math.prod(factors[0].shape) * self.format.n
