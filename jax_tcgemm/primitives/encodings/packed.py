"""Rows multiplied by a packed weight.

    acc[*rows, *columns] = sum over k of x[*rows, k] * w[k, *columns]

or, grouped, with one weight for each group of rows:

    acc[r, n] = sum over k of x[r, k] * w[g, k, n]

The operands are:

- x of shape (*rows, k), grouped (m, k), of float16, bfloat16 or float8_e4m3fn;
- with float8_e4m3fn, the per-row scales of x in float32, of shape (*rows);
- the arrays of the packed weight (problem/operands/packed_weight.py);
- grouped, group_sizes (s,) and group_offset (1,), as for `tcgemm_ragged_dot`.

In a gated product, the columns of the weight are (2, n). Rows that belong to no group have the
result 0. The accumulators are linear in x; the weight is bytes and has no derivatives.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tcgemm.device.fusion import packed as device_packed
from jax_tcgemm.primitives import dot_general as plain
from jax_tcgemm.primitives import functions
from jax_tcgemm.primitives import ragged_dot as ragged
from jax_tcgemm.primitives.encodings import Batched, Instead, Names, Rows
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
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.dtypes import DTYPE_NAMES
from jax_tcgemm.problem.layers import gate_and_up
from jax_tcgemm.problem.operands.packed_weight import TILE, PackedFormat, PackedWeight
from jax_tcgemm.sharding import partitioning, ragged_division

# With more rows than this, on average over the groups, the weight is dequantized to memory once,
# and the kernels of plain products, which overlap their epilogues, multiply it.
MOST_ROWS = 2048
# With at most this many rows, float8 rows are multiplied in bfloat16: the kernel is bound by the
# reads of the weight.
_FEW_ROWS = 32
E4M3 = np.dtype(jnp.float8_e4m3fn)


def operands_of(x, w: PackedWeight, row_scales=None, groups=()) -> tuple[jax.Array, ...]:
    """Return the operands of a product.

    Args:
      x: rows.
      w: the weight, or with groups the stacked weights.
      row_scales: with float8_e4m3fn rows, their scales; else None.
      groups: group_sizes and group_offset, or ().
    """
    scales = () if row_scales is None else (row_scales,)
    return (x, *scales, *arrays_of(w), *groups)


class _Operands(NamedTuple):
    """The operands of a product by their roles; `scales` and `groups` may be empty."""

    x: jax.Array
    scales: Sequence
    weight: Sequence
    groups: Sequence

    @property
    def rows(self) -> tuple:
        """Return x and its scales."""
        return (self.x, *self.scales)


class _Route(enum.Enum):
    """How a product with a packed weight is computed."""

    # By a call of the primitive, in 8 or 16 bits.
    PACKED = enum.auto()
    # By a call of the primitive, with float8 rows converted to bfloat16.
    IN_16_BITS = enum.auto()
    # By a plain product with the dequantized weight.
    DEQUANTIZED = enum.auto()


@dataclasses.dataclass(frozen=True)
class Packed(Grouped):
    """The encoding.

    Attributes:
      format: of the weight.
      num_operands: as of `Encoding`.
      gated: as of `Encoding`.
      grouped: whether rows belong to groups.
      by_group: as of `Grouped`.
      keeps_zeros: whether the epilogue maps accumulators that are 0 to 0, so that rows that belong
        to no group need no mask.
      is_bare: as of `Encoding`; then the columns are (tiles, 16), and devices may divide the tiles.
    """

    format: PackedFormat
    num_operands: int
    gated: bool = False
    grouped: bool = False
    by_group: tuple[bool, ...] = ()
    keeps_zeros: bool = False
    is_bare: bool = False

    num_batch = 0

    @classmethod
    def bare(cls, form: PackedFormat, operands: Sequence, *, grouped: bool = False) -> "Packed":
        """Return the encoding of a product without an epilogue."""
        return cls(form, len(operands), grouped=grouped, keeps_zeros=True, is_bare=True)

    def _split(self, operands: Sequence) -> _Operands:
        """Return the operands, or their types, by their roles."""
        x, *others = operands
        first = int(getattr(x, "aval", x).dtype == E4M3)
        last = len(others) - 2 * self.grouped
        return _Operands(x, others[:first], others[first:last], others[last:])

    # --- the products ---------------------------------------------------------------------------

    def product_calls(self, operands):
        """Return the bare product; of a bare product with float8 rows the one in 16 bits."""
        if not self.is_bare:
            return [(Packed.bare(self.format, operands, grouped=self.grouped), operands)]
        found = self._split(operands)
        return [self._in_16_bits(found)] if found.scales else []

    def products(self, operands, dtype, options):
        """Multiply by the dequantized weight."""
        x, scales, weight, groups = self._split(operands)
        x = dequantized(x, *scales)
        w = rows_of_weight(weight_of(weight, self.format), options=options, dtype=x.dtype)
        how = {"options": options.of_step(), "preferred_element_type": dtype}
        if groups:
            how |= {"rhs_transposed": True, "groups": w.shape[0]}
            out = ragged.ragged_dot(x, w, *groups, **how)
        else:
            numbers = ((x.ndim - 1,), (1,)), ((), ())
            out = plain.dot_general(x, w, dimension_numbers=numbers, **how)
        return [out.reshape(*x.shape[:-1], w.shape[-2] // TILE, TILE)]

    def split_products(self, products, operands):
        """Return the columns of the weight without those that pad the last tile, gate and up."""
        if self.is_bare:
            return products
        out = in_columns(*products, self.format)
        return gate_and_up(out, operands[0].ndim - 1) if self.gated else [out]

    def instead(self, operands, options):
        """Multiply many rows by the dequantized weight, and few float8 rows in 16 bits."""
        found, route = self._split(operands), self._route(operands, options)
        if route is _Route.IN_16_BITS:
            return Instead(*self._in_16_bits(found), options)
        if route is _Route.DEQUANTIZED and not self.grouped and not self.is_bare:
            x, form = found.x, self.format
            w = rows_of_weight(weight_of(found.weight, form), options=options, dtype=x.dtype)
            w = w[: form.n].reshape(*form.shape[1:], form.k)
            numbers = ((x.ndim - 1,), (w.ndim - 1,)), ((), ())
            encoding = Plain.of(x, w, numbers, pair=x.ndim - 1 if self.gated else None)
            return Instead(encoding, (x, w), options.without_config())
        return None

    def runs_unfused(self, operands, options):
        """Return whether so many rows multiply the dequantized weight by `products`."""
        return self._route(operands, options) is _Route.DEQUANTIZED

    def _route(self, operands, options: CallOptions) -> _Route:
        """Return how a call is computed of which no implementation is forced."""
        x, scales, _, groups = self._split(operands)
        rows, number = math.prod(x.shape[:-1]), groups[0].shape[0] if groups else 1
        if not (options.is_unconstrained and isinstance(rows, int)):
            return _Route.PACKED
        if scales:
            return _Route.IN_16_BITS if rows <= _FEW_ROWS * number else _Route.PACKED
        return _Route.DEQUANTIZED if rows > MOST_ROWS * number else _Route.PACKED

    def _in_16_bits(self, found: _Operands) -> tuple["Packed", tuple]:
        """Return the encoding and the operands with float8 rows converted to bfloat16."""
        return self._with_rows(found, dequantized(*found.rows))

    def _with_rows(self, found: _Operands, x) -> tuple["Packed", tuple]:
        """Return the encoding and the operands with rows x in place of those and their scales."""
        own = dataclasses.replace(self, num_operands=self.num_operands - len(found.scales))
        return own, (x, *found.weight, *found.groups)

    # --- the rules ------------------------------------------------------------------------------

    @property
    def masks_results(self):
        """Whether rows of no group may have other results than 0."""
        return self.grouped and not self.keeps_zeros

    def rows(self, operands, options):
        """Return the rows of groups, unless the epilogue keeps zeros and so takes no operands."""
        if not self.masks_results:
            return Rows()
        _, _, weight, groups = self._split(operands)
        shape = self.shape(operands)
        return RowsOfGroups.of(*groups, weight[0].shape[0], shape, self.by_group, options)

    def tangents(self, operands, moving, options, accumulators):
        """Multiply the tangent of x by the weight, in the dtype of x.

        Reverse mode is then made of such products. The weight is bytes and has no tangent.
        """
        found = self._split(operands)
        primals = found.rows
        _, dx = functions.value_and_tangent(dequantized, primals, moving[: len(primals)])
        if dx is None:
            return [None] * self.num_accumulators
        own, operands = self._with_rows(found, dx)
        operands = same_varying(*operands)
        found = accumulators(own, operands, dx.dtype, options.without_config())
        return [lax.convert_element_type(x, self.accumulator) for x in found]

    def batched(self, operands, dims, size, *, reduces, mesh_axis):
        """Add the dimension to the rows; mapped weights and groups are no single product."""
        del reduces, mesh_axis
        number = len(self._split(operands).rows)
        if self.grouped or any(dim is not None for dim in dims[number:]):
            return None
        pairs = zip(operands[:number], dims, strict=False)
        rows = [moved(x, dim, 0, size) for x, dim in pairs]
        return Batched(self, (*rows, *operands[number:]), 0)

    def batched_product(self, operands, dims, size, mesh_axis, product):
        """Multiply the rows of each mapped weight as a group."""
        found = self._split(operands)
        number = len(found.rows)
        if self.grouped or None in dims[number:] or mesh_axis is not None:
            return None
        x, *scales = (moved(x, dim, 0, size) for x, dim in zip(found.rows, dims, strict=False))
        weight = map(jnp.moveaxis, found.weight, dims[number:], [0] * len(found.weight))
        _, *shape, k = x.shape
        groups = jnp.full(size, math.prod(shape), np.int32), jnp.zeros(1, np.int32)
        rows = x.reshape(-1, k), *(own.reshape(-1) for own in scales)
        operands = *rows, *weight, *groups
        out = product(Packed.bare(self.format, operands, grouped=True), operands)
        return out.reshape(size, *shape, *out.shape[1:])

    def shape(self, operands):
        """Return (*rows, *columns), of a gated product (*rows, n)."""
        found = self._split(operands)
        if self.is_bare:
            return *found.x.shape[:-1], found.weight[0].shape[-3], TILE
        return *found.x.shape[:-1], *self.format.shape[1 + self.gated :]

    def product_of(self, operands, operand_shapes, function, *, options, in_place):
        """Describe a product that kernels of packed weights compute, nothing of it in place."""
        del in_place
        x, _, weight, groups = self._split(operands)
        own = {"form": "product", "m": math.prod(x.shape[:-1]), "out_dtype": "f32"}
        own["in_dtype"] = DTYPE_NAMES[np.dtype(x.dtype)]
        if groups:
            own["form"] = "grouped"
            # A device that has some of the groups has fewer weights than there are sizes.
            own |= {"experts": weight[0].shape[0], "num_sizes": groups[0].shape[0]}
        return device_packed.Product(
            options,
            self.format,
            problem_of(weight[0].shape[-3], self.format, **own),
            function,
            self.shape(operands),
            x.ndim - 1,
            operand_shapes,
            self.gated,
            self.is_bare,
            padded(self.by_group, len(operand_shapes)),
        )

    def names(self, operands):
        """Divide rows; in a bare product also the tiles of columns, and the groups."""
        x, scales, weight, groups = self._split(operands)
        rows = tuple(f"m{axis}" for axis in range(x.ndim - 1))
        of_weight = division_of_weight(weight)
        of_groups = (("sizes",), ("one",)) if groups else ()
        of_operands = ((*rows, "k"), *([rows] * len(scales)), *of_weight, *of_groups)
        if self.is_bare:
            inner = (name for own in of_weight for name in own[-2:])
            whole = frozenset(("k", *inner, *(("sizes", "one") if groups else ())))
            even = ("g",) if groups else ()
            return Names(of_operands, (*rows, "tile", "column"), whole, even=even)
        columns = tuple(f"n{axis}" for axis in range(len(self.format.shape) - 1 - self.gated))
        whole = frozenset(("k", *columns, *(name for own in of_weight for name in own)))
        return Names(of_operands, (*rows, *columns), whole)

    def of_shards(self, layout, operands):
        """Find how many rows of each group a device has."""
        if not self.grouped:
            return self, operands
        *others, sizes, offset = operands
        return self, (*others, *ragged_division.groups_here(layout, "m0", sizes, offset))

    def obstacle_to_division(self, operands, whole, product, device, options):
        """Refuse to divide anything but rows, and rows that the epilogue takes whole."""
        del device, options
        if self.is_bare:
            return ""
        if self.grouped:
            return "devices may divide the rows of groups"
        x, _, weight, _ = self._split(operands)
        if not partitioning.has_explicit_axes(*operands):
            return "devices may divide the columns of the weight"
        if any(part is not None for own in weight for part in own.sharding.spec.partitions):
            return "devices divide the columns of the weight"
        if x.sharding.spec.partitions[-1] is not None:
            return "devices divide what is contracted"
        if any(dim < product.num_rows for dim in whole):
            return "devices may divide a dimension that the function takes whole"
        return ""

    def flops(self, operands):
        """Count those of all columns."""
        return 2 * math.prod(operands[0].shape) * self.format.n


def dequantized(x, row_scales=None):
    """Return rows, float8 rows multiplied by their scales and in bfloat16."""
    if row_scales is None:
        return x
    return (x.astype(jnp.float32) * row_scales[..., None]).astype(jnp.bfloat16)


def in_columns(product: jax.Array, form: PackedFormat) -> jax.Array:
    """Return a product (*rows, tiles, 16) with the columns of the weight."""
    rows = product.shape[:-2]
    out = product.reshape(*rows, product.shape[-2] * TILE)
    if out.shape[-1] != form.n:
        out = lax.slice_in_dim(out, 0, form.n, axis=-1)
    return out.reshape(*rows, *form.shape[1:])
