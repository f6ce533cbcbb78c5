"""Formats of checkpoints: names, dtypes and shapes of arrays, and a reader that checks them.

A format is a tuple of `Array`s, whose shapes are in terms of sizes such as k, n and groups. `read`
takes the arrays from a source in this order: a size is bound by the first array that has it, and
an array that does not fit what is bound is refused.
"""

import dataclasses
import enum
import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.dtypes import MAX_EXTENT
from jax_tcgemm.problem.operands.packed_weight import (
    ELEMENT_DTYPES,
    FLOAT8_NAMES,
    WIDE_SCALE_DTYPES,
)
from jax_tcgemm.products.arguments import as_array
from jax_tcgemm.quantization.safetensors_file import SafetensorsFile

# --- arrays -------------------------------------------------------------------------------------


class Kind(enum.Enum):
    """Dtypes that arrays may have, by name."""

    WORDS = ("int32", "uint32")
    FLOATS = WIDE_SCALE_DTYPES
    INT8 = ("int8",)
    UINT8 = ("uint8",)
    E4M3 = ("float8_e4m3fn",)
    FLOAT8 = FLOAT8_NAMES
    # Exponents of two plus 127.
    E8M0 = ("uint8", "float8_e8m0fnu")
    NARROW = ELEMENT_DTYPES
    INTEGERS = tuple(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("u", ""))
    INTEGERS_AND_NARROW = (*INTEGERS, "uint4", "int4")
    # Read as uint8, whichever dtype they are stored as.
    BYTES = ("uint8", "int8", "bfloat16", "float16", "float32", "float64")

    def __str__(self):
        *others, last = self.value
        return f"{', '.join(others)} or {last}" if others else last


class Blocks(NamedTuple):
    """Number of blocks or words with `per` elements of a size each; the last may be padded."""

    size: str
    per: int

    def __str__(self):
        return f"{self.size}/{self.per}"


class OneOr(NamedTuple):
    """Size, or 1 where one element is for all of a dimension."""

    size: str

    def __str__(self):
        return f"1 or {self.size}"


class Divisor(NamedTuple):
    """Divisor of another size, such as a number of groups."""

    size: str
    of: str

    def __str__(self):
        return self.size


Dim = int | str | Blocks | OneOr | Divisor


class Array(NamedTuple):
    """An array of a format.

    Attributes:
      name: as checkpoints have it, after the prefix.
      kind: the dtypes that it may have.
      shapes: alternatives for its shape.
      is_optional: whether a checkpoint may lack it.
      least: the smallest of its integers.
      largest: the largest of its integers.
      holds: sizes that its integers are.
    """

    name: str
    kind: Kind
    shapes: tuple[tuple[Dim, ...], ...]
    is_optional: bool = False
    least: int = -(2**31)
    largest: int = 2**31 - 1
    holds: tuple[str, ...] = ()


# --- formats ------------------------------------------------------------------------------------

_GROUPS = Divisor("groups", "k")
# Rows and columns of a block that shares a scale.
FLOAT8_BLOCK = 128


def gptq(bits: int) -> tuple[Array, ...]:
    """The format of GPTQ."""
    per = 32 // bits
    return (
        Array("qweight", Kind.WORDS, ((Blocks("k", per), "n"),)),
        Array("scales", Kind.FLOATS, ((_GROUPS, "n"),)),
        Array("qzeros", Kind.WORDS, (("groups", Blocks("n", per)),)),
        Array("g_idx", Kind.INTEGERS, (("k",),), is_optional=True),
    )


AWQ = (
    Array("qweight", Kind.WORDS, (("k", Blocks("n", 8)),)),
    Array("scales", Kind.FLOATS, ((_GROUPS, "n"),)),
    Array("qzeros", Kind.WORDS, (("groups", Blocks("n", 8)),)),
)


def compressed_tensors(bits: int, is_packed: bool, has_one_scale: bool) -> tuple[Array, ...]:
    """Formats "pack-quantized" and "int-quantized", with one scale for the whole weight or more."""
    per, middle = 32 // bits, 1 << bits - 1
    in_range = {"least": -middle, "largest": middle - 1}
    scales = ((1,), ()) if has_one_scale else (("n", _GROUPS),)
    zero_point = Array("weight_zero_point", Kind.INTEGERS, scales, True, **in_range)
    if is_packed:
        sizes = {"least": 1, "largest": MAX_EXTENT, "holds": ("n", "k")}
        weight = (
            Array("weight_shape", Kind.INTEGERS, ((2,),), **sizes),
            Array("weight_packed", Kind.WORDS, (("n", Blocks("k", per)),)),
        )
        if not has_one_scale:
            shapes = ((Blocks("n", per), "groups"),)
            zero_point = Array("weight_zero_point", Kind.WORDS, shapes, is_optional=True)
    else:
        weight = (Array("weight", Kind.INT8, (("n", "k"),), **in_range),)
    return (
        *weight,
        Array("weight_scale", Kind.FLOATS, scales),
        zero_point,
        Array("weight_g_idx", Kind.INTEGERS, (("k",),), is_optional=True),
    )


def nvfp4(values: str, tensor_scale: str) -> tuple[Array, ...]:
    """NVFP4: two codes of float4_e2m1fn a byte, a scale of 16, and one of the whole weight.

    Args:
      values: name of the codes.
      tensor_scale: name of the scale of the whole weight.
    """
    return (
        Array(values, Kind.UINT8, (("n", Blocks("k", 2)),)),
        Array("weight_scale", Kind.E4M3, (("n", Blocks("k", 16)),)),
        Array(tensor_scale, Kind.FLOATS, ((1,), ())),
    )


def float8(scale: str, is_e8m0: bool) -> tuple[Array, ...]:
    """Weights of 8-bit floats, with one scale, or scales of rows, groups or blocks of 128 by 128.

    Args:
      scale: name of the scales.
      is_e8m0: whether the scales are powers of two.
    """
    kind = Kind.E8M0 if is_e8m0 else Kind.FLOATS
    shapes = (1,), (), ("n", _GROUPS), (Blocks("n", FLOAT8_BLOCK), Blocks("k", FLOAT8_BLOCK))
    return Array("weight", Kind.FLOAT8, (("n", "k"),)), Array(scale, kind, shapes)


# MXFP4 of compressed-tensors: two codes of float4_e2m1fn a byte, and a power of two of 32.
COMPRESSED_MXFP4 = (
    Array("weight_packed", Kind.UINT8, (("n", Blocks("k", 2)),)),
    Array("weight_scale", Kind.E8M0, (("n", Blocks("k", 32)),)),
)


def gpt_oss(separator: str) -> tuple[Array, ...]:
    """MXFP4 of experts: blocks of 32 codes of float4_e2m1fn in 16 bytes, and their scales."""
    sizes = ("experts", "n", Blocks("k", 32))
    return (
        Array(f"{separator}blocks", Kind.UINT8, ((*sizes, 16),)),
        Array(f"{separator}scales", Kind.E8M0, (sizes,)),
    )


def bitsandbytes(itemsize: int, nested_blocksize: int | None) -> tuple[Array, ...]:
    """Arrays of NF4 and FP4 beside their state, of a number of bytes and of blocks.

    Args:
      itemsize: of the dtype in which the bytes are stored.
      nested_blocksize: of quantized scales, else None.
    """
    stored = Blocks("bytes", itemsize)
    weight = Array("", Kind.BYTES, ((stored, 1), (1, stored), (stored,)))
    table = Array(".quant_map", Kind.FLOATS, ((16,),))
    if nested_blocksize is None:
        return weight, table, Array(".absmax", Kind.FLOATS, (("blocks",),))
    return (
        weight,
        table,
        Array(".absmax", Kind.UINT8, (("blocks",),)),
        Array(".nested_absmax", Kind.FLOATS, ((Blocks("blocks", nested_blocksize),),)),
        Array(".nested_quant_map", Kind.FLOATS, ((256,),)),
    )


def bitsandbytes_state(quant_type: str) -> Array:
    """The array that has the state of a weight as text."""
    return Array(f".quant_state.bitsandbytes__{quant_type}", Kind.UINT8, (("characters",),))


def qwix(ndim: int) -> tuple[Array, ...]:
    """The fields of Qwix's arrays of a number of dimensions."""
    columns = ("n",) if ndim <= 2 else tuple(f"n{i}" for i in range(1, ndim))
    scale_columns = tuple(map(OneOr, columns))
    return (
        Array("qvalue", Kind.NARROW, (("k", *columns),)),
        Array("scale", Kind.FLOATS, ((_GROUPS, *scale_columns),)),
        Array(
            "zero_point",
            Kind.INTEGERS_AND_NARROW,
            ((OneOr("groups"), *scale_columns),),
            is_optional=True,
        ),
    )


# --- reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """Arrays by their names.

    Attributes:
      op: the public loader, for messages.
      arrays: by their whole names.
      prefix: of the names.
    """

    op: str
    arrays: Mapping
    prefix: str

    @classmethod
    def of(cls, op: str, source, prefix) -> "Source":
        """Source of a dictionary of arrays or of the path of a safetensors file."""
        if not isinstance(prefix, str):
            raise TypeError(
                f"{op}: names must begin with a string, got {prefix!r}; '' where they begin with "
                "nothing"
            )
        if isinstance(source, str | os.PathLike):
            source = SafetensorsFile(op, source)
        elif not isinstance(source, Mapping):
            raise TypeError(
                f"{op}: source must be a dictionary of arrays or a path, got source of type "
                f"{type(source).__name__}; see the formats"
            )
        return cls(op, source, prefix)

    def __contains__(self, name: str):
        return self.prefix + name in self.arrays

    def __getitem__(self, name: str):
        """An array as it is given: JAX narrows 64 bits."""
        name = self.prefix + name
        if name not in self.arrays:
            raise ValueError(
                f"{self.op}: source must have {name}, got "
                f"{', '.join(map(str, list(self.arrays)[:8])) or 'nothing'}; give the prefix of "
                "the names"
            )
        given = self.arrays[name]
        if type(given) is np.ndarray:
            return given
        x = as_array(self.op, name, given)
        is_own = isinstance(given, jax.Array) or hasattr(given, "__jax_array__")
        return np.asarray(given) if not is_own and hasattr(given, "__array__") else x


def eager(loader: Callable) -> Callable:
    """Return a loader that looks at values also while something else is traced."""

    @functools.wraps(loader)
    def load(*args, **kwargs):
        with jax.ensure_compile_time_eval():
            return loader(*args, **kwargs)

    return load


def read(
    source: Source, form: tuple[Array, ...], **sizes: int
) -> tuple[dict[str, jax.Array], dict[str, int]]:
    """Read the arrays of a format.

    Args:
      source: of the arrays.
      form: what they are to be; of `Kind.BYTES`, uint8 along one dimension is returned.
      **sizes: those that are known.

    Returns:
      The arrays by their names, without optional ones that are not there, and all sizes.

    Raises:
      TypeError: for arrays of other dtypes.
      ValueError: for arrays that are not there, do not fit together, or hold integers out of range
        or floating-point numbers that are not finite.
    """
    op, found = source.op, {}
    for array in form:
        if array.is_optional and array.name not in source:
            continue
        name, x = source.prefix + array.name, source[array.name]
        if x.dtype.name not in array.kind.value:
            raise TypeError(
                f"{op}: {name} must be of {array.kind}, got {name}.dtype="
                f"{x.dtype.name}; is it of another format?"
            )
        bound = (_bound(dims, x.shape, sizes) for dims in array.shapes)
        known = next((x for x in bound if x is not None), None)
        if known is None:
            raise ValueError(
                f"{op}: {name} must be of shape {_described(array.shapes, sizes)}, got {name}."
                f"shape={x.shape}; is it of another weight or number of bits?"
            )
        sizes = known
        if not isinstance(x, jax.core.Tracer):
            x = _checked(op, name, x, array)
        if array.holds:
            sizes |= dict(zip(array.holds, x.tolist(), strict=True))
        # jnp.asarray would compile a program for the shape.
        found[array.name] = x if isinstance(x, jax.core.Tracer) else jax.device_put(x)
    return found, sizes


def _checked(op: str, name: str, x, array: Array) -> np.ndarray:
    """Values in range, 64 bits of integers as 32, and exponents as float8_e8m0fnu."""
    x = np.asarray(x)
    if array.kind is Kind.BYTES:
        return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    if array.kind is Kind.E8M0:
        x = x.view(jnp.float8_e8m0fnu)
    if array.kind in (Kind.FLOATS, Kind.E4M3, Kind.E8M0):
        if not np.isfinite(x.astype(np.float32)).all():
            raise ValueError(
                f"{op}: {name} must be finite, got {name} with NaN or infinity; is it damaged?"
            )
    elif array.kind is not Kind.WORDS:
        wide = x if x.dtype.itemsize > 1 else x.astype(np.int32)  # Those of 4 bits have no order.
        least, largest = int(wide.min()), int(wide.max())
        if least < array.least or largest > array.largest:
            raise ValueError(
                f"{op}: {name} must be from {array.least} to {array.largest}, got {name} from "
                f"{least} to {largest}; is it of another number of bits?"
            )
        x = wide.astype(np.int32) if x.dtype.itemsize == 8 else x
    return x


def _bound(dims, shape, sizes: dict[str, int]) -> dict[str, int] | None:
    """Sizes with those that a shape binds, None where it does not fit."""
    if len(dims) != len(shape):
        return None
    sizes = dict(sizes)
    for dim, actual in zip(dims, shape, strict=True):
        if actual == 0:
            return None
        if isinstance(dim, int):
            fits = actual == dim
        elif isinstance(dim, OneOr):
            fits = actual in (1, sizes[dim.size])
        elif isinstance(dim, Divisor):
            fits = dim.size in sizes or sizes[dim.of] % actual == 0
            fits &= sizes.setdefault(dim.size, actual) == actual
        else:
            dim = dim if isinstance(dim, Blocks) else Blocks(dim, 1)
            size = sizes.setdefault(dim.size, actual * dim.per)
            fits = actual == -(-size // dim.per)
        if not fits:
            return None
    return sizes


def _described(shapes, sizes: dict[str, int]) -> str:
    """Shapes by their sizes and, as far as these are known, by numbers."""

    def number(dim: Dim) -> str:
        if isinstance(dim, Blocks) and dim.size in sizes:
            return str(-(-sizes[dim.size] // dim.per))
        if isinstance(dim, OneOr):
            return str(dim).replace(dim.size, str(sizes[dim.size]))
        if isinstance(dim, Divisor) and dim.size not in sizes:
            return f"a divisor of {sizes[dim.of]}"
        return str(sizes.get(getattr(dim, "size", dim), dim))

    def text(dims) -> str:
        names, numbers = (", ".join(map(of, dims)) for of in (str, number))
        return f"({names})" + (f" = ({numbers})" if names != numbers else "")

    return " or ".join(map(text, shapes))


# --- the state of bitsandbytes ------------------------------------------------------------------


class State(NamedTuple):
    """Entries of the text that bitsandbytes keeps beside a weight."""

    shape: list[int]
    blocksize: int
    nested_blocksize: int | None = None
    nested_offset: float | None = None


def _is_size(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_EXTENT


def _is_shape(value) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_size, value))


def _is_float32(value) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= float(np.finfo(np.float32).max)  # NaN is not.


# The rule of each entry.
_ENTRIES = {
    "shape": ("two sizes", _is_shape),
    "blocksize": ("a size", _is_size),
}
_NESTED_ENTRIES = {
    "nested_blocksize": ("a size", _is_size),
    "nested_offset": ("a finite number of float32", _is_float32),
}


def read_state(source: Source, quant_type: str) -> State:
    """Read the state of a weight of bitsandbytes.

    Raises:
      TypeError: as `read`.
      ValueError: as `read`, for other text than JSON, and entries that are missing or malformed.
    """
    array = bitsandbytes_state(quant_type)
    text = np.asarray(read(source, (array,))[0][array.name]).tobytes()
    what = f"{source.op}: {source.prefix + array.name}"
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON, got {error!r}; is it of another version?") from None
    if not isinstance(state, dict):
        raise ValueError(
            f"{what} must be an object of JSON, got {type(state).__name__}; is it of another "
            "version?"
        )
    is_nested = any(key in state for key in _NESTED_ENTRIES)
    entries = _ENTRIES | (_NESTED_ENTRIES if is_nested else {})
    for key, (rule, is_valid) in entries.items():
        if not is_valid(state.get(key)):
            raise ValueError(
                f"{what} must have {rule} as {key}, got {key}={state.get(key)!r}; is it of another "
                "version?"
            )
    return State(**{key: state[key] for key in entries})
