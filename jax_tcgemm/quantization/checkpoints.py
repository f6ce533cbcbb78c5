"""The public loaders of packed weights from checkpoints, each by its own format's definition.

All of them take a dictionary of arrays or a safetensors file, which the package `safetensors`
opens. Checkpoints have weights as (n, k), or GPTQ and AWQ as (k, n): what is returned is (k, n).
"""

import functools
import json
import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.packed_weight import PackedWeight
from jax_tcgemm.products.arguments import as_array
from jax_tcgemm.quantization.pack import pack

# Of AWQ's words: the column of each nibble.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _eager(loader: Callable) -> Callable:
    """A loader that looks at values also while something else is traced."""

    @functools.wraps(loader)
    def load(*args, **kwargs):
        with jax.ensure_compile_time_eval():
            return loader(*args, **kwargs)

    return load


@_eager
def from_gptq(source, prefix: str = "", *, bits: int = 4, zero_offset: int = 1) -> PackedWeight:
    """A weight that GPTQ quantised.

        w[k, n] = (qweight[k, n] - qzeros[g_idx[k], n]) * scales[g_idx[k], n]

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: of the names, such as "model.layers.0.mlp.down_proj."; they are qweight, qzeros,
        scales and, where there is one, g_idx.
      bits: 4 or 8.
      zero_offset: 1 where the fields of qzeros were written minus 1, which borrow from the next
        one in their word; 0 for checkpoint_format "gptq_v2".

    Returns:
      A `PackedWeight` of shape (k, n). Zero points that are all in the middle are left out.

    Raises:
      TypeError: for a source that is neither, or arrays of other dtypes.
      ValueError: for names that are not there, arrays whose shapes do not go together, other bits,
        and what `pack_weights` refuses.

    Numerics:
      The same integers and scales as in the checkpoint.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tensors = {
      ...     "qweight": jnp.zeros((16, 8), jnp.int32),
      ...     "qzeros": jnp.full((1, 1), 0x77777777, jnp.int32),
      ...     "scales": jnp.ones((1, 8), jnp.float16),
      ... }
      >>> jax_tcgemm.from_gptq(tensors).dequantize()[0, :2]
      Array([-8., -8.], dtype=float16)
    """
    op = "from_gptq"
    _check_choice(op, "bits", bits, (4, 8))
    _check_choice(op, "zero_offset", zero_offset, (0, 1))
    get = _reader(op, source, prefix)
    words, scale = _words(op, get, "qweight"), get("scales")
    q = _fields(words, bits, axis=0)
    # Writers subtract the offset from all fields of a word at once: a field of 0 borrows.
    ones = 0xFFFFFFFF // (2**bits - 1)
    zeros = _words(op, get, "qzeros").astype(jnp.uint32) + jnp.uint32(zero_offset * ones)
    zero_point = _fields(zeros, bits, axis=1)
    g_idx = get("g_idx", None)
    size = _size_of_groups(op, "scales", q.shape[0], scale)
    if g_idx is not None and np.array_equal(g_idx, np.arange(q.shape[0]) // (size or len(q))):
        g_idx = None
    return _pack(op, q, scale, zero_point, bits, size, g_idx)


@_eager
def from_awq(source, prefix: str = "") -> PackedWeight:
    """A weight that AWQ quantised to 4 bits, in its layout "gemm".

        w[k, n] = (qweight[k, n] - qzeros[k // group, n]) * scales[k // group, n]

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: of the names qweight, qzeros and scales.

    Returns:
      A `PackedWeight` of shape (k, n).

    Raises:
      TypeError: for a source that is neither, or arrays of other dtypes.
      ValueError: for names that are not there, arrays whose shapes do not go together, and what
        `pack_weights` refuses.

    Numerics:
      The same integers and scales as in the checkpoint.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tensors = {
      ...     "qweight": jnp.full((128, 1), 0x10, jnp.int32),
      ...     "qzeros": jnp.zeros((1, 1), jnp.int32),
      ...     "scales": jnp.ones((1, 8), jnp.float16),
      ... }
      >>> jax_tcgemm.from_awq(tensors).dequantize()[0].astype(int).tolist()
      [0, 0, 1, 0, 0, 0, 0, 0]
    """
    op = "from_awq"
    get = _reader(op, source, prefix)
    scale = get("scales")

    def columns(name):
        nibbles = _fields(_words(op, get, name), 4, axis=1)
        nibbles = nibbles.reshape(nibbles.shape[0], -1, 8)
        return nibbles[:, :, np.argsort(_AWQ_ORDER)].reshape(nibbles.shape[0], -1)

    q = columns("qweight")
    size = _size_of_groups(op, "scales", q.shape[0], scale)
    return _pack(op, q, scale, columns("qzeros"), 4, size)


@_eager
def from_compressed_tensors(source, prefix: str = "", *, bits: int = 4) -> PackedWeight:
    """A weight of compressed-tensors, in its formats "pack-quantized" and "int-quantized".

        w[n, k] = (weight[n, k] - weight_zero_point[n, k // group]) * weight_scale[n, k // group]

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: of the names weight_packed and weight_shape, or weight of int8; weight_scale; and,
        where there are such, weight_zero_point and weight_g_idx.
      bits: 4 or 8.

    Returns:
      A `PackedWeight` of shape (k, n): the transpose of what the checkpoint has.

    Raises:
      TypeError: for a source that is neither, or arrays of other dtypes.
      ValueError: for names that are not there, arrays whose shapes do not go together, other bits,
        and what `pack_weights` refuses.

    Numerics:
      The same integers and scales as in the checkpoint.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tensors = {
      ...     "weight_packed": jnp.full((4, 16), 0x88888889, jnp.uint32).view(jnp.int32),
      ...     "weight_shape": jnp.array([4, 128]),
      ...     "weight_scale": jnp.ones((4, 1), jnp.bfloat16),
      ... }
      >>> jax_tcgemm.from_compressed_tensors(tensors).dequantize()[:3, 0].tolist()
      [1.0, 0.0, 0.0]
    """
    op = "from_compressed_tensors"
    _check_choice(op, "bits", bits, (4, 8))
    get = _reader(op, source, prefix)
    words = get("weight_packed", None)
    zero_point = get("weight_zero_point", None)
    offset = 1 << bits - 1
    if words is None:
        q = get("weight")
        if q.dtype != np.int8 or q.ndim != 2:
            raise TypeError(
                f"{op}: weight must be a matrix of int8, got {q.dtype} of shape {q.shape}; is it "
                "of another format?"
            )
    else:
        shape = tuple(np.asarray(get("weight_shape")).reshape(-1).tolist())
        q = _fields(_words(op, get, "weight_packed"), bits, axis=1)[:, : shape[-1]] - offset
        if q.shape != shape:
            raise ValueError(
                f"{op}: weight_packed must hold weight_shape={shape}, got {words.shape}; is it of "
                f"{bits=}?"
            )
        if zero_point is not None:
            zero_point = _fields(_words(op, get, "weight_zero_point"), bits, axis=0) - offset
            zero_point = zero_point[: shape[0]]
    scale = get("weight_scale")
    if scale.ndim != 2 or len(scale) != len(q):
        raise ValueError(
            f"{op}: weight_scale must have a row for each of {len(q)} outputs, got weight_scale."
            f"shape={scale.shape}; is it of another weight?"
        )
    size = _size_of_groups(op, "weight_scale", q.shape[1], scale.T)
    g_idx = get("weight_g_idx", None)
    if g_idx is not None and bool((g_idx < 0).any()):  # There is no order.
        g_idx = None
    if zero_point is not None:
        zero_point = zero_point.reshape(scale.shape).astype(jnp.int32).T + offset
    q = q.astype(jnp.int32).T + offset
    return _pack(op, q, scale.T, zero_point, bits, size, g_idx, is_signed=True)


@_eager
def from_bitsandbytes(source, name: str = "weight") -> PackedWeight:
    """A weight that bitsandbytes quantised to 4 bits, NF4 or FP4, with its scales quantised or not.

        w.flat[i] = quant_map[weight.flat[i]] * absmax[i // blocksize],  w of shape (n, k)

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      name: of the weight; its state has names that begin with it and a dot.

    Returns:
      A `PackedWeight` of shape (k, n): the transpose of what the checkpoint has.

    Raises:
      TypeError: for a source that is neither.
      ValueError: for names that are not there, blocks that do not divide rows, and what
        `pack_weights` refuses.

    Numerics:
      The same integers as in the checkpoint; quantised scales are dequantised in float32, as
      bitsandbytes does it.

    Examples:
      >>> import json
      >>> import jax.numpy as jnp, numpy as np, jax_tcgemm
      >>> state = {"quant_type": "nf4", "blocksize": 64, "shape": [4, 64], "dtype": "bfloat16"}
      >>> tensors = {
      ...     "weight": jnp.full((128, 1), 0xF7, jnp.uint8),
      ...     "weight.absmax": jnp.full(4, 2.0),
      ...     "weight.quant_map": jnp.linspace(-1, 1, 16),
      ...     "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
      ...         json.dumps(state).encode(), np.uint8
      ...     ),
      ... }
      >>> jax_tcgemm.from_bitsandbytes(tensors).dequantize()[:2, 0].round(3).tolist()
      [2.0, -0.13300000131130219]
    """
    op = "from_bitsandbytes"
    get = _reader(op, source, "")
    quant_type = next(
        (x for x in ("nf4", "fp4") if get(_state_name(name, x), None) is not None), "nf4"
    )
    words = np.asarray(get(_state_name(name, quant_type)), np.uint8)
    try:
        state = json.loads(words.tobytes())
        (n, k), size = state["shape"], state["blocksize"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{op}: the state of {name} must have shape and blocksize, got {error!r}; is it of "
            "another version?"
        ) from None
    if k % size != 0:
        raise ValueError(
            f"{op}: blocksize must divide the last dimension of {name}, got blocksize={size} for "
            f"shape {(n, k)}; blocks that begin in the middle of a row have no kernel"
        )
    flat = get(name).reshape(-1)
    q = jnp.stack((flat >> 4, flat & 15), -1).reshape(-1)[: n * k].reshape(n, k)
    absmax = get(f"{name}.absmax").reshape(-1)
    if absmax.dtype == np.uint8:
        codes = get(f"{name}.nested_quant_map").astype(jnp.float32)
        nested = get(f"{name}.nested_absmax").astype(jnp.float32)
        nested = jnp.repeat(nested, state["nested_blocksize"])[: absmax.size]
        # A product that is rounded before it is added to.
        absmax = np.asarray(codes[absmax] * nested) + np.float32(state["nested_offset"])
    scale = jnp.asarray(absmax, jnp.float32).reshape(n, k // size)
    table = np.asarray(get(f"{name}.quant_map"), np.float32)
    # Larger blocks, which repeat their scales, are of so many.
    own = size if size <= 128 else 128
    scale = jnp.repeat(scale, size // own, 1)
    return pack(op, q.T, scale.T, None, own, table)


@_eager
def from_qwix(source, prefix: str = "") -> PackedWeight:
    """A weight that Qwix quantised.

        w[k, n] = (qvalue[k, n] - zero_point[k // group, n]) * scale[k // group, n]

    Args:
      source: Qwix's `QArray`, or anything with its fields, of shape (k, ...), such as a
        `QuantizedArray`; a dictionary of arrays, or the path of a safetensors file.
      prefix: of the names qvalue, scale and, where there is one, zero_point.

    Returns:
      A `PackedWeight` of shape (k, ...).

    Raises:
      TypeError: for a source that is neither, or arrays of other dtypes.
      ValueError: for names that are not there, scales of blocks of columns, and what
        `pack_weights` refuses.

    Numerics:
      The same integers and scales.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> q = jax_tcgemm.quantize(jnp.ones((256, 16)), "int8", block=(128, 1))
      >>> jax_tcgemm.from_qwix(q).dequantize()[0, :2]
      Array([1., 1.], dtype=float32)
    """
    op = "from_qwix"
    source = getattr(source, "array", source)  # As a parameter it is wrapped.
    if all(hasattr(source, field) for field in ("qvalue", "scale", "zero_point", "qtype")):
        qvalue, scale, zero_point = source.qvalue, source.scale, source.zero_point
        qtype = source.qtype
    else:
        get = _reader(op, source, prefix)
        qvalue, scale, zero_point = get("qvalue"), get("scale"), get("zero_point", None)
        qtype = qvalue.dtype
    qvalue, scale = as_array(op, "qvalue", qvalue), as_array(op, "scale", scale)
    dtype = qtype if isinstance(qtype, str) and qtype == "nf4" else qvalue.dtype
    if scale.ndim != qvalue.ndim or any(
        own not in (1, extent)
        for own, extent in zip(scale.shape[1:], qvalue.shape[1:], strict=False)
    ):
        raise ValueError(
            f"{op}: scale must be of groups of rows, for each column or for all, got scale.shape="
            f"{scale.shape} for {qvalue.shape}; dequantize it"
        )
    size = _size_of_groups(op, "scale", qvalue.shape[0], scale)
    shape = (scale.shape[0], *qvalue.shape[1:])
    scale = jnp.broadcast_to(scale, shape)
    if zero_point is not None:
        zero_point = jnp.broadcast_to(jnp.asarray(zero_point), shape)
    return pack(op, qvalue, scale, zero_point, size, dtype)


# --- what formats share -------------------------------------------------------------------------

_REQUIRED = object()


def _reader(op: str, source, prefix: str) -> Callable[..., jax.Array]:
    """get(name) of a source, or a default where it has none."""
    if not isinstance(prefix, str):
        raise TypeError(
            f"{op}: names must begin with a string, got {prefix!r}; '' where they begin with "
            "nothing"
        )
    if isinstance(source, str | os.PathLike):
        source = _File(op, source)
    elif not isinstance(source, Mapping):
        raise TypeError(
            f"{op}: source must be a dictionary of arrays or a path, got source of type "
            f"{type(source).__name__}; see the formats"
        )

    def get(name: str, default=_REQUIRED):
        name = prefix + name
        if name in source:
            return as_array(op, name, source[name])
        if default is _REQUIRED:
            raise ValueError(
                f"{op}: source must have {name}, got {', '.join(list(source)[:8])}; give the "
                "prefix of the names"
            )
        return default

    return get


class _File(Mapping):
    """A safetensors file, of which only what is asked for is read."""

    def __init__(self, op: str, path):
        try:
            import safetensors
        except ImportError:
            raise ImportError(
                f"{op}: source must be a dictionary where safetensors is missing, got a path; "
                "pip install 'jax_tcgemm[checkpoints]'"
            ) from None
        try:
            self._file = safetensors.safe_open(os.fspath(path), framework="flax")
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{op}: source must be a safetensors file, got source={os.fspath(path)!r}: "
                f"{error}; see the package safetensors"
            ) from None
        self._names = tuple(self._file.keys())

    def __getitem__(self, name):
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)


def _state_name(name: str, quant_type: str) -> str:
    return f"{name}.quant_state.bitsandbytes__{quant_type}"


def _check_choice(op: str, name: str, value, choices: tuple[int, ...]) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value not in choices:
        raise ValueError(
            f"{op}: {name} must be {' or '.join(map(str, choices))}, got {name}={value!r}; see "
            "quantization_config of the checkpoint"
        )


def _words(op: str, get, name: str) -> jax.Array:
    words = get(name)
    if words.dtype not in (np.int32, np.uint32) or words.ndim != 2:
        raise TypeError(
            f"{op}: {name} must be a matrix of int32, got {words.dtype} of shape {words.shape}; "
            "is it of another format?"
        )
    return words


def _fields(words, bits: int, axis: int) -> jax.Array:
    """The unsigned integers in words, the lowest bits first, along an axis."""
    shifts = jnp.arange(0, 32, bits, dtype=jnp.uint32)
    words = jnp.expand_dims(words.astype(jnp.uint32), axis + 1)
    shape = [1] * words.ndim
    shape[axis + 1] = -1
    fields = words >> shifts.reshape(shape) & (2**bits - 1)
    shape = [*words.shape]
    shape[axis : axis + 2] = [shape[axis] * len(shifts)]
    return fields.reshape(shape).astype(jnp.int32)


def _size_of_groups(op: str, name: str, k: int, scale) -> int | None:
    groups = scale.shape[0] if scale.ndim > 1 else 0
    if groups == 0 or k % groups != 0:
        raise ValueError(
            f"{op}: {name} must have groups of equal sizes, got {groups} of {k} rows and {name}."
            f"shape={scale.shape}; is it of another weight?"
        )
    return None if groups == 1 else k // groups


def _pack(op, q, scale, zero_point, bits, size, g_idx=None, is_signed=False) -> PackedWeight:
    """From unsigned integers; zero points that are all in the middle are those of signed ones."""
    middle = 1 << bits - 1
    if zero_point is not None and bool((zero_point == middle).all()):
        zero_point, is_signed = None, True
    if zero_point is not None and zero_point.shape[0] == 1 != scale.shape[0]:
        zero_point = jnp.broadcast_to(zero_point, scale.shape)
    if is_signed:
        q = q - middle
        zero_point = None if zero_point is None else zero_point - middle
    dtype = f"{'' if is_signed else 'u'}int{bits}"
    return pack(op, q, scale, zero_point, size, dtype, g_idx)
