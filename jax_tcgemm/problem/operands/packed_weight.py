"""Packed weights: 4-bit or 8-bit integers in the kernels' prepacked layout.

A weight of shape (k, n) has the elements (u - zero) * scale * column_scale with unsigned u. It is
stored as arrays of bytes:

    values         (tiles, chunks, 512)    16 columns, and 64 rows of 4 bits or 32 rows of 8 bits
    scales         (tiles, groups, 16 * bytes)
    zero_points    (tiles, groups, 32)     int16
    column_scales  (tiles, 1, 64)          float32, in the layout of the scales of one group

Stacked weights have leading dimensions: (*stacked, tiles, ...). The 512 bytes of `values` are the
fragment of one warp, 16 bytes for each lane: the lane's elements of A in `mma.m16n8k16` of the
transposed product. In a block of 32 rows, lane 4g + c has rows 8c to 8c + 7 of columns g and g + 8,
so that it reads 16 consecutive bytes of a 16-bit x:

    row     64 period + 32 b + 8 c + 4 s + 2 h + e     MMA s of block b, K half h of A, element e
    column  16 tile + 8 r + g                          r selects row g or g + 8 of A

The bits of float4_e2m1fn are elsewhere in the words (`_words_of_float4`). csrc/kernels/packed reads
this layout.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

VERSION = 2
TILE = 16
CHUNK_BYTES = 512
# Rows are padded to a multiple of this.
K_MULTIPLE = 64
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
    """Storage of integers: the number of bits, and the offset added to make them unsigned."""

    bits: int
    offset: int

    @property
    def least(self) -> int:
        """Smallest integer."""
        return -self.offset

    @property
    def largest(self) -> int:
        """Largest integer."""
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
# Dtypes of elements that stand for themselves, not for entries of a table.
ELEMENT_DTYPES = tuple(name for name in CODINGS if name != "table")


@dataclasses.dataclass(frozen=True)
class PackedFormat:
    """Static properties of a packed weight.

    Attributes:
      shape: shape (k, ...) of the weight.
      group_size: rows that share a scale; k for per-column scales.
      qtype: "int4", "uint4", "int8", "uint8", "table", "float8_e4m3fn" or "float8_e5m2".
      scale_dtype: name of the scales' dtype.
      table: the 16 values of a lookup table; None for other types.
      version: version of the prepacked layout.
      has_zero_points: whether each group and column has a zero point.
      has_column_scales: whether each column has a float32 scale besides the block scales.
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
        """Storage of the integers."""
        return CODINGS[self.qtype]

    @property
    def k(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def n(self) -> int:
        """Number of columns."""
        return math.prod(self.shape[1:])

    @property
    def groups(self) -> int:
        """Number of scales of a column."""
        return max(self.k // max(self.group_size, 1), 1)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the byte arrays by name, in the order of a kernel's operands."""
        tiles = -(-self.n // TILE)
        chunks = -(-self.k // K_MULTIPLE) * (self.coding.bits // 4)
        scale_bytes = TILE * jnp.dtype(self.scale_dtype).itemsize
        shapes = {
            "values": (tiles, chunks, CHUNK_BYTES),
            "scales": (tiles, self.groups, scale_bytes),
        }
        if self.has_zero_points:
            shapes["zero_points"] = (tiles, self.groups, 2 * TILE)
        if self.has_column_scales:
            shapes["column_scales"] = (tiles, 1, 4 * TILE)
        return shapes


def group_size_within(size: int, least: int = GROUP_SIZES[0]) -> int | None:
    """Return the largest supported group size, at least `least`, that divides `size`; or None."""
    return next((own for own in reversed(GROUP_SIZES) if own >= least and size % own == 0), None)


class Unpacked(NamedTuple):
    """Arguments of `pack_weights`, recovered from a packed weight.

    Integers are int8 or uint8; column scales are float32, one per column.
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
    """Weight of 4 or 8 bits in the kernels' prepacked layout, as `pack_weights` returns it.

    A packed weight is a pytree of bytes, so that no cast converts it by mistake. It has no
    derivative: `jax.grad(..., allow_int=True)` returns float0 for it. Weights of one format can be
    stacked (as experts' weights for `ragged_dot`), mapped by `jax.vmap`, or scanned by
    `jax.lax.scan`.

    Attributes:
      values: the integers; jax_tcgemm/problem/operands/packed_weight.py describes the layout.
      scales: bytes of the scales.
      zero_points: bytes of the zero points, or None.
      order: None, or for each packed row its row in the weight, where the rows of a group are not
        adjacent.
      format: static properties.
      column_scales: bytes of the float32 per-column scales, or None.
    """

    values: jax.Array
    scales: jax.Array
    zero_points: jax.Array | None
    order: jax.Array | None
    format: PackedFormat
    column_scales: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, (*stacked, k, ...)."""
        return (*self.values.shape[:-3], *self.format.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self):
        """Dtype of the scales; bfloat16 for scales of 8-bit floats."""
        dtype = jnp.dtype(self.format.scale_dtype)
        return jnp.dtype(jnp.bfloat16) if dtype.itemsize == 1 else dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    def unpack(self) -> Unpacked:
        """Return the arguments that `pack_weights` was given."""
        return _unpack(self)

    def dequantize(self, dtype=None) -> jax.Array:
        """Dequantize the weight, in float32 with one rounding.

        Args:
          dtype: dtype of the result; None takes the dtype of the weight.
        """
        return _dequantize(self, self.dtype if dtype is None else jnp.dtype(dtype))


def _mapped(f, w: PackedWeight):
    for _ in range(w.values.ndim - 3):
        f = jax.vmap(f)
    return f(w)


# --- packing ------------------------------------------------------------------------------------

# Outside `jax.jit`, packing and unpacking are one program each; inside, their operations are
# inlined.


@functools.partial(jax.jit, static_argnames="form", inline=True)
def packed(q, scale, zero_point, order, column_scale, form: PackedFormat) -> PackedWeight:
    """Pack checked arrays of shapes (k, n) and (groups, n), and column scales of shape (n,)."""
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
    """Return the weight with column scales; missing ones are 1."""
    if w.column_scales is not None:
        return w
    ones = _packed_factors(jnp.ones((1, w.format.n), jnp.float32))
    ones = jnp.broadcast_to(ones, (*w.values.shape[:-3], *ones.shape))
    form = dataclasses.replace(w.format, has_column_scales=True)
    return dataclasses.replace(w, format=form, column_scales=ones)


def _packed_values(u, form: PackedFormat):
    tiles, chunks, _ = form.shapes["values"]
    periods = -(-form.k // K_MULTIPLE)
    u = jnp.pad(u, ((0, periods * K_MULTIPLE - form.k), (0, tiles * TILE - form.n)))
    u = u.reshape(periods, 2, 4, 2, 2, 2, tiles, 2, 8)
    period, b, c, s, h, e, tile, r, g = range(9)
    if form.code == "float4_e2m1fn":
        u = _words_of_float4(jnp.transpose(u, (tile, period, g, c, b, s, h, r, e)))
        u = lax.bitcast_convert_type(u, jnp.uint8)
    elif form.coding.bits == 4:
        # A 32-bit word is one MMA's fragment. Its nibbles are pairs of a0 to a3: 16 bits apart for
        # conversion of both at once, or adjacent for lookup of both in a table.
        nibbles = (h, r, e) if form.has_lookup else (e, h, r)
        u = jnp.transpose(u, (tile, period, g, c, b, s, *nibbles))
        u = u[..., 0] | u[..., 1] << 4
    else:
        u = jnp.transpose(u, (tile, period, b, g, c, s, h, e, r))
    return u.reshape(tiles, chunks, CHUNK_BYTES)


# Bits of a float4_e2m1fn that is expanded to bfloat16 without a change of the exponent bias, in
# each half of a word: the sign, the high bit of the exponent, and the low bit with the mantissa.
_SIGNS, _HIGH_EXPONENTS, _LOW_BITS = map(np.uint32, (0x80008000, 0x01000100, 0x00C000C0))
# For each MMA of a block, by how much the fourth pair is rotated to the left in both words.
_SPLIT_PAIRS = (5, 7), (6, 14)


def _words_of_float4(u):
    """Pack codes of shape (..., s, h, r, e) into words of shape (..., s).

    Three of a word's four pairs of codes have their bits where one rotation of the word puts them
    in place. The bits that these leave free are of the fourth pairs of both words: the sign and the
    high bit of the exponent are in the first word, the other bits in the second.
    """
    expanded = (u & 8).astype(jnp.uint32) << 12 | (u & 7).astype(jnp.uint32) << 6
    pairs = (expanded[..., 0] | expanded[..., 1] << 16).reshape(*u.shape[:-3], 4)
    a, b, c, split = (pairs[..., p] for p in range(4))
    words = a | _rotated(b, 4) | c >> 6
    first, second = words[..., 0], words[..., 1]
    for s, (left_of_first, left_of_second) in enumerate(_SPLIT_PAIRS):
        first |= _rotated(split[..., s] & (_SIGNS | _HIGH_EXPONENTS), left_of_first)
        second |= _rotated(split[..., s] & _LOW_BITS, left_of_second)
    return jnp.stack((first, second), -1)


def _float4_of_words(words):
    """Return the codes of `_words_of_float4`."""
    split = [
        _rotated(words[..., 0], 32 - left_of_first) & (_SIGNS | _HIGH_EXPONENTS)
        | _rotated(words[..., 1], 32 - left_of_second) & _LOW_BITS
        for left_of_first, left_of_second in _SPLIT_PAIRS
    ]
    pairs = jnp.stack((words, _rotated(words, 28), words << 6, jnp.stack(split, -1)), -1)
    expanded = jnp.stack((pairs, pairs >> 16), -1)
    u = (expanded >> 12 & 8 | expanded >> 6 & 7).astype(jnp.uint8)
    return u.reshape(*words.shape, 2, 2, 2)


def _rotated(word, left: int):
    return word << left | word >> (32 - left)


def _packed_factors(x):
    """Pack scales or zero points of shape (groups, n), with columns g and g + 8 adjacent."""
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
    """Return the unsigned integers, of shape (k, tiles * 16)."""
    tiles, periods = values.shape[0], -(-form.k // K_MULTIPLE)
    if form.code == "float4_e2m1fn":
        words = values.reshape(tiles, periods, 8, 4, 2, 2, 4)
        u = _float4_of_words(lax.bitcast_convert_type(words, jnp.uint32))
        tile, period, g, c, b, s, h, r, e = range(9)
    elif form.coding.bits == 4:
        u = jnp.stack((values & 15, values >> 4), -1).reshape(tiles, periods, 8, 4, 2, 2, 2, 2, 2)
        tile, period, g, c, b, s, *nibbles = range(9)
        h, r, e = nibbles if form.has_lookup else (*nibbles[1:], nibbles[0])
    else:
        u = values.reshape(tiles, periods, 2, 8, 4, 2, 2, 2, 2)
        tile, period, b, g, c, s, h, e, r = range(9)
    u = jnp.transpose(u, (period, b, c, s, h, e, tile, r, g))
    # Tiles may be sharded over devices, so that each dimension is reshaped separately.
    u = u.reshape(periods * K_MULTIPLE, tiles, 2, 8)[: form.k]
    return u.reshape(form.k, tiles * TILE)


def factors(x, dtype) -> jax.Array:
    """Return scales or zero points, of shape (groups, tiles * 16)."""
    tiles, groups, num_bytes = x.shape
    size = num_bytes // TILE
    x = x.reshape(tiles, groups, 8, 2, *([size] if size > 1 else []))
    x = lax.bitcast_convert_type(x, dtype)
    return jnp.transpose(x, (1, 0, 3, 2)).reshape(groups, tiles * TILE)


def scale_as_float32(scale) -> jax.Array:
    """Convert scales to float32, exactly."""
    if scale.dtype != jnp.float8_e8m0fnu:
        return scale.astype(jnp.float32)
    # Bitwise, since a conversion through a narrower dtype could overflow.
    exponent = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    bits = jnp.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal.
    bits = jnp.where(exponent == 255, 255 << 23 | 1 << 22, bits)  # NaN
    return lax.bitcast_convert_type(bits, jnp.float32)


def dequantized(w: PackedWeight, dtype) -> jax.Array:
    """Dequantize to shape (k, tiles * 16), with rows in packed order."""
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
    """Dequantize a possibly stacked weight to shape (*stacked, k, tiles * 16)."""
    return _mapped(lambda w: dequantized(w, dtype), w)


def _in_order(rows, w: PackedWeight):
    """Restore the original order of rows, and drop padded columns."""
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
