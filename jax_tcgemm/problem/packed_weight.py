"""Packed weights: integers of 4 or 8 bits in the order in which a kernel reads them.

A weight of shape (k, n), whose elements are (u - zero) * scale * column_scale with unsigned u, lies
in memory as

    values         (tiles, pieces, 512)    16 columns, and 64 rows of 4 bits or 32 rows of 8 bits
    scales         (tiles, groups, 16 * bytes)
    zero_points    (tiles, groups, 32)     int16
    column_scales  (tiles, 1, 64)          float32, in the order of the scales of one group

of bytes; of stacked weights (*stacked, tiles, ...). A piece is what a warp multiplies from
registers: 16 bytes for each lane, its own elements of A in `mma.m16n8k16` of the transposed
product. In a block of 32 rows lane 4g + c has the rows 8c to 8c + 7, so that of x it reads 16 bytes
at a time, and of the columns g and g + 8:

    row     64 chunk + 32 b + 8 c + 4 s + 2 h + e     step s of block b, half h of A, element e
    column  16 tile + 8 r + g                         r tells rows g and g + 8 of A apart

csrc/kernels/packed has the other side.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

VERSION = 1
TILE = 16
PIECE_BYTES = 512
# Rows are filled up to this many.
CHUNK = 64
GROUP_SIZES = (16, 32, 64, 128)
WIDE_SCALE_DTYPES = ("bfloat16", "float16", "float32")
SCALE_DTYPES = (*WIDE_SCALE_DTYPES, "float8_e8m0fnu", "float8_e4m3fn")

# Values of NF4, as QLoRA defines them (Dettmers et al., appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

# Values of float4_e2m1fn by their codes: bit 3 is the sign (OCP Microscaling Formats, section 5.3).
E2M1 = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)


class Coding(NamedTuple):
    """How integers are stored: in so many bits, plus an offset that makes them unsigned."""

    bits: int
    offset: int

    @property
    def least(self) -> int:
        """The smallest integer."""
        return -self.offset

    @property
    def largest(self) -> int:
        """The largest integer."""
        return 2**self.bits - 1 - self.offset


CODINGS = {
    "int4": Coding(4, 8),
    "uint4": Coding(4, 0),
    "int8": Coding(8, 128),
    "uint8": Coding(8, 0),
    "table": Coding(4, 0),
    "float8_e4m3fn": Coding(8, 0),
    "float8_e5m2": Coding(8, 0),
}
FLOAT8_NAMES = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class PackedFormat:
    """What is static of a packed weight.

    Attributes:
      shape: (k, ...), of the weight.
      group_size: rows that share a scale; k for whole columns.
      qtype: "int4", "uint4", "int8", "uint8", "table", "float8_e4m3fn" or "float8_e5m2".
      scale_dtype: of the scales, by name.
      table: the 16 values that a table's integers stand for, else None.
      version: of the order in which all that lies in memory.
      has_zero_points: whether each group and column has a zero point.
      has_column_scales: whether each column has a float32 scale beside the block scales.
    """

    shape: tuple[int, ...]
    group_size: int
    qtype: str
    scale_dtype: str
    table: tuple[float, ...] | None = None
    version: int = VERSION
    has_zero_points: bool = False
    has_column_scales: bool = False

    @property
    def code(self) -> str:
        """Return what the bits stand for: "integer", "table", or a float dtype by its name."""
        if self.table is not None:
            return "float4_e2m1fn" if self.table == E2M1 else "table"
        return self.qtype if self.qtype in FLOAT8_NAMES else "integer"

    @property
    def has_lookup(self) -> bool:
        """Whether kernels look values up in a table."""
        return self.code == "table"

    @property
    def coding(self) -> Coding:
        """How integers are stored."""
        return CODINGS[self.qtype]

    @property
    def k(self) -> int:
        """Rows."""
        return self.shape[0]

    @property
    def n(self) -> int:
        """Columns."""
        return math.prod(self.shape[1:])

    @property
    def groups(self) -> int:
        """Scales of a column."""
        return max(self.k // max(self.group_size, 1), 1)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of bytes by name, in the order in which kernels take these."""
        tiles = -(-self.n // TILE)
        pieces = -(-self.k // CHUNK) * (self.coding.bits // 4)
        scale_bytes = TILE * jnp.dtype(self.scale_dtype).itemsize
        shapes = {
            "values": (tiles, pieces, PIECE_BYTES),
            "scales": (tiles, self.groups, scale_bytes),
        }
        if self.has_zero_points:
            shapes["zero_points"] = (tiles, self.groups, 2 * TILE)
        if self.has_column_scales:
            shapes["column_scales"] = (tiles, 1, 4 * TILE)
        return shapes


def group_size_within(size: int, least: int = GROUP_SIZES[0]) -> int | None:
    """The largest group size, from `least` on, that divides a number of rows, or None."""
    return next((own for own in reversed(GROUP_SIZES) if own >= least and size % own == 0), None)


class Unpacked(NamedTuple):
    """What `pack_weights` was given: integers as int8 or uint8, everything else unchanged.

    Column scales are float32, one per column.
    """

    q: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None
    g_idx: jax.Array | None
    column_scale: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "zero_points", "order", "column_scales"),
    meta_fields=("format",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight of few bits, as `pack_weights` makes it, in the order in which a kernel reads it.

    It is a pytree of bytes, so that nothing converts it by mistake, and has no derivatives:
    `jax.grad(..., allow_int=True)` gives float0 for it. Several of one format can be stacked, as
    the weights of experts are (`ragged_dot`), mapped by `jax.vmap` or taken one by one by
    `jax.lax.scan`.

    Attributes:
      values: the integers; see jax_tcgemm/problem/packed_weight.py for the order.
      scales: bytes of the scales.
      zero_points: bytes of the zero points, or None.
      order: None, or the row of the weight that each packed row is, where groups are not of
        neighbours.
      format: all that is static.
      column_scales: bytes of the float32 scales of columns, or None.
    """

    values: jax.Array
    scales: jax.Array
    zero_points: jax.Array | None
    order: jax.Array | None
    format: PackedFormat
    column_scales: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight, (k, ...), after the dimensions along which several are stacked."""
        return (*self.values.shape[:-3], *self.format.shape)

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    @property
    def dtype(self):
        """That of its scales; bfloat16 if these are 8-bit floats."""
        dtype = jnp.dtype(self.format.scale_dtype)
        return jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    def unpack(self) -> Unpacked:
        """What `pack_weights` was given."""
        return _unpack(self)

    def dequantize(self, dtype=None) -> jax.Array:
        """The weight as an array, computed in float32 and rounded once.

        Args:
          dtype: of the array; None takes the dtype of the weight.
        """
        return _dequantize(self, self.dtype if dtype is None else jnp.dtype(dtype))


def _mapped(f, w: PackedWeight):
    for _ in range(w.values.ndim - 3):
        f = jax.vmap(f)
    return f(w)


# --- packing ------------------------------------------------------------------------------------

# Outside of `jax.jit`, packing and unpacking are one program each; inside of it, the operations
# that they are made of.


@functools.partial(jax.jit, static_argnames="form", inline=True)
def packed(q, scale, zero_point, order, column_scale, form: PackedFormat) -> PackedWeight:
    """Packs checked arrays of shapes (k, n) and (groups, n), and column scales of shape (n,)."""
    offset = form.coding.offset
    if order is not None:
        q = q[order]
    if form.qtype in FLOAT8_NAMES:
        u = lax.bitcast_convert_type(q, jnp.uint8)
    else:
        u = (q.astype(jnp.int32) + offset).astype(jnp.uint8)
    zero_points = column_scales = None
    if zero_point is not None:
        zero_points = _packed_factors((zero_point.astype(jnp.int32) + offset).astype(jnp.int16))
    if column_scale is not None:
        column_scales = _packed_factors(column_scale[None])
    values, scales = _packed_values(u, form), _packed_factors(scale)
    return PackedWeight(values, scales, zero_points, order, form, column_scales)


def with_column_scales(w: PackedWeight) -> PackedWeight:
    """The same weight with column scales, which are 1 where it had none."""
    if w.column_scales is not None:
        return w
    ones = _packed_factors(jnp.ones((1, w.format.n), jnp.float32))
    ones = jnp.broadcast_to(ones, (*w.values.shape[:-3], *ones.shape))
    form = dataclasses.replace(w.format, has_column_scales=True)
    return dataclasses.replace(w, format=form, column_scales=ones)


def _packed_values(u, form: PackedFormat):
    tiles, pieces, _ = form.shapes["values"]
    chunks = -(-form.k // CHUNK)
    u = jnp.pad(u, ((0, chunks * CHUNK - form.k), (0, tiles * TILE - form.n)))
    u = u.reshape(chunks, 2, 4, 2, 2, 2, tiles, 2, 8)
    chunk, b, c, s, h, e, tile, r, g = range(9)
    if form.coding.bits == 4:
        # A word is a step; its nibbles are pairs of a0 to a3, apart by 16 bits, which are converted
        # together, or of a table side by side, as which they are looked up.
        nibbles = (h, r, e) if form.has_lookup else (e, h, r)
        u = jnp.transpose(u, (tile, chunk, g, c, b, s, *nibbles))
        u = u[..., 0] | u[..., 1] << 4
    else:
        u = jnp.transpose(u, (tile, chunk, b, g, c, s, h, e, r))
    return u.reshape(tiles, pieces, PIECE_BYTES)


def _packed_factors(x):
    """Of groups of columns: those of columns g and g + 8 side by side."""
    groups, n = x.shape
    tiles = -(-n // TILE)
    if x.dtype.itemsize == 1:  # Padded as bytes: float8_e8m0fnu has no zero.
        x = lax.bitcast_convert_type(x, jnp.uint8)
    x = jnp.pad(x, ((0, 0), (0, tiles * TILE - n))).reshape(groups, tiles, 2, 8)
    x = jnp.transpose(x, (1, 0, 3, 2))
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(tiles, groups, -1)


# --- unpacking ----------------------------------------------------------------------------------


@functools.partial(jax.jit, inline=True)
def _unpack(w: PackedWeight) -> Unpacked:
    return _mapped(_unpacked, w)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def _dequantize(w: PackedWeight, dtype) -> jax.Array:
    return _mapped(lambda w: _in_order(dequantized(w, dtype), w).reshape(w.format.shape), w)


def integers(values, form: PackedFormat) -> jax.Array:
    """The unsigned integers, of shape (k, tiles * 16)."""
    tiles, chunks = values.shape[0], -(-form.k // CHUNK)
    if form.coding.bits == 4:
        u = jnp.stack((values & 15, values >> 4), -1).reshape(tiles, chunks, 8, 4, 2, 2, 2, 2, 2)
        tile, chunk, g, c, b, s, *nibbles = range(9)
        h, r, e = nibbles if form.has_lookup else (*nibbles[1:], nibbles[0])
    else:
        u = values.reshape(tiles, chunks, 2, 8, 4, 2, 2, 2, 2)
        tile, chunk, b, g, c, s, h, e, r = range(9)
    u = jnp.transpose(u, (chunk, b, c, s, h, e, tile, r, g))
    # Tiles may be divided over devices: one reshape for each dimension.
    u = u.reshape(chunks * CHUNK, tiles, 2, 8)[: form.k]
    return u.reshape(form.k, tiles * TILE)


def factors(x, dtype) -> jax.Array:
    """Scales or zero points, of shape (groups, tiles * 16)."""
    tiles, groups, num_bytes = x.shape
    size = num_bytes // TILE
    x = x.reshape(tiles, groups, 8, 2, *([size] if size > 1 else []))
    x = lax.bitcast_convert_type(x, dtype)
    return jnp.transpose(x, (1, 0, 3, 2)).reshape(groups, tiles * TILE)


def scale_as_float32(scale) -> jax.Array:
    """Scales in float32, exactly."""
    if scale.dtype != jnp.float8_e8m0fnu:
        return scale.astype(jnp.float32)
    # By bits: a conversion by way of a narrower dtype would overflow.
    exponent = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    bits = jnp.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal.
    bits = jnp.where(exponent == 255, 255 << 23 | 1 << 22, bits)  # NaN
    return lax.bitcast_convert_type(bits, jnp.float32)


def dequantized(w: PackedWeight, dtype) -> jax.Array:
    """The array of shape (k, tiles * 16), its rows as they are packed."""
    form = w.format
    u = integers(w.values, form)
    scale = scale_as_float32(factors(w.scales, form.scale_dtype))
    if form.table is not None:
        value = jnp.asarray(np.array(form.table, np.float32))[u]
    elif form.qtype in FLOAT8_NAMES:
        value = lax.bitcast_convert_type(u.astype(jnp.uint8), form.qtype).astype(jnp.float32)
    else:
        value = u.astype(jnp.float32)
    groups, n = scale.shape
    value = value.reshape(groups, -1, n)
    if w.zero_points is not None:
        value -= factors(w.zero_points, jnp.int16).astype(jnp.float32)[:, None]
    elif form.code == "integer":
        value -= form.coding.offset
    value = value * scale[:, None]
    if w.column_scales is not None:
        value = value * factors(w.column_scales, jnp.float32)
    return value.astype(dtype).reshape(form.k, n)


def stacked_dequantized(w: PackedWeight, dtype) -> jax.Array:
    """The same of weights that may be stacked, of shape (*stacked, k, tiles * 16)."""
    return _mapped(lambda w: dequantized(w, dtype), w)


def _in_order(rows, w: PackedWeight):
    """Rows as they were, without columns that fill up."""
    rows = rows[:, : w.format.n]
    return rows if w.order is None else jnp.zeros_like(rows).at[w.order].set(rows)


def _unpacked(w: PackedWeight) -> Unpacked:
    form = w.format
    q = integers(w.values, form)
    if form.qtype in FLOAT8_NAMES:
        q = lax.bitcast_convert_type(q, form.qtype)
    else:
        q = q.astype(jnp.int32) - form.coding.offset
        q = q.astype(jnp.int8 if form.qtype in ("int4", "int8") else jnp.uint8)
    q = _in_order(q, w).reshape(form.shape)
    shape, n = (form.groups, *form.shape[1:]), form.n
    scale = factors(w.scales, form.scale_dtype)[:, :n].reshape(shape)
    zero_point = g_idx = column_scale = None
    if w.zero_points is not None:
        zero_point = factors(w.zero_points, jnp.int16)[:, :n] - np.int16(form.coding.offset)
        zero_point = zero_point.reshape(shape)
    if w.order is not None:
        own = jnp.arange(form.k, dtype=jnp.int32) // form.group_size
        g_idx = jnp.zeros_like(own).at[w.order].set(own)
    if w.column_scales is not None:
        column_scale = factors(w.column_scales, jnp.float32)[0, :n].reshape(form.shape[1:])
    return Unpacked(q, scale, zero_point, g_idx, column_scale)
