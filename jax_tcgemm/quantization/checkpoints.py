"""Public loaders of packed weights from checkpoints, each following the definition of its format.

Each loader takes a dictionary of arrays or a safetensors file, which the package `safetensors`
opens. Checkpoints store weights as (n, k), or as (k, n) in GPTQ and AWQ; each loader returns (k,
n). jax_tcgemm/quantization/formats.py lists the arrays of each format and checks them.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.operands.packed_weight import GROUP_SIZES, PackedWeight, group_size_within
from jax_tcgemm.problem.operands.quantized import ValueKind, value_kind
from jax_tcgemm.quantization import formats
from jax_tcgemm.quantization.float4_checkpoints import compressed_float4
from jax_tcgemm.quantization.pack import pack

# Of AWQ's words: the column of each nibble.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@formats.eager
def from_gptq(source, prefix: str = "", *, bits: int = 4, zero_offset: int = 1) -> PackedWeight:
    """Load a weight that GPTQ quantized.

        w[k, n] = (qweight[k, n] - qzeros[g_idx[k], n]) * scales[g_idx[k], n]

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: prefix of the names qweight, qzeros, scales and, optionally, g_idx, such as
        "model.layers.0.mlp.down_proj.".
      bits: 4 or 8.
      zero_offset: 1 if qzeros stores zero points minus 1, where a field borrows from the next field
        of its word; 0 for checkpoint_format "gptq_v2".

    Returns:
      A `PackedWeight` of shape (k, n). Zero points that are all in the middle of the range are
      omitted.

    Raises:
      TypeError: if source is neither a dictionary nor a path, or arrays have other dtypes.
      ValueError: if names are missing, shapes do not match, bits is another number, or under the
        conditions of `pack_weights`.

    Numerics:
      Integers and scales equal the checkpoint's. Scales of groups larger than 128 rows are
      repeated.

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
    source = formats.Source.of(op, source, prefix)
    arrays, sizes = formats.read(source, formats.gptq(bits))
    # Writers subtract the offset from all fields of a word at once: a field of 0 borrows.
    ones = 0xFFFFFFFF // (2**bits - 1)
    zeros = arrays["qzeros"].astype(jnp.uint32) + jnp.uint32(zero_offset * ones)
    q, zero_point = _fields(arrays["qweight"], bits, axis=0), _fields(zeros, bits, axis=1)
    order = _order(source, "g_idx", arrays, sizes)
    return _pack(source, "scales", arrays["scales"], q, zero_point[:, : sizes["n"]], bits, order)


@formats.eager
def from_awq(source, prefix: str = "") -> PackedWeight:
    """Load a weight that AWQ quantized to 4 bits in layout "gemm".

        w[k, n] = (qweight[k, n] - qzeros[k // group, n]) * scales[k // group, n]

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: prefix of the names qweight, qzeros and scales.

    Returns:
      A `PackedWeight` of shape (k, n).

    Raises:
      TypeError: if source is neither a dictionary nor a path, or arrays have other dtypes.
      ValueError: if names are missing, shapes do not match, or under the conditions of
        `pack_weights`.

    Numerics:
      Integers and scales equal the checkpoint's. Scales of groups larger than 128 rows are
      repeated.

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
    source = formats.Source.of(op, source, prefix)
    arrays, _ = formats.read(source, formats.AWQ)

    q, zero_point = (_awq_columns(arrays[name]) for name in ("qweight", "qzeros"))
    return _pack(source, "scales", arrays["scales"], q, zero_point, 4)


@formats.eager
def from_compressed_tensors(source, prefix: str = "", *, bits: int = 4) -> PackedWeight:
    """Load a weight that compressed-tensors stores as integers or 4-bit floats.

        w[n, k] = (weight[n, k] - weight_zero_point[n, k // group]) * weight_scale[n, k // group]

    The arrays tell the format: "pack-quantized", "int-quantized", "nvfp4-pack-quantized" or
    "mxfp4-pack-quantized". Weights of the last two have no zero points, and the scales of NVFP4 are
    divided by weight_global_scale. `from_float8` loads "float-quantized" weights.

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: prefix of the names weight_packed and weight_shape (or weight, for int8), weight_scale
        and, optionally, weight_zero_point and weight_g_idx. For 4-bit floats, prefix of the names
        weight_packed, weight_scale and, for NVFP4, weight_global_scale.
      bits: 4 or 8.

    Returns:
      A `PackedWeight` of shape (k, n), the transpose of the checkpoint's weight.

    Raises:
      TypeError: if source is neither a dictionary nor a path, or arrays have other dtypes.
      ValueError: if names are missing, shapes do not match, bits is another number, or under the
        conditions of `pack_weights`.

    Numerics:
      Integers, codes of 4-bit floats and block scales equal the checkpoint's. Scales of groups
      larger than 128 rows are repeated. The column scales of NVFP4 are 1 / weight_global_scale in
      float32.

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
    source = formats.Source.of(op, source, prefix)
    is_packed = "weight_packed" in source
    if is_packed and source["weight_packed"].dtype == np.uint8:
        return compressed_float4(source, bits)
    has_one_scale = np.ndim(source["weight_scale"]) < 2
    arrays, sizes = formats.read(source, formats.compressed_tensors(bits, is_packed, has_one_scale))
    n, k, middle = sizes["n"], sizes["k"], 1 << bits - 1
    scale, zero_point = arrays["weight_scale"], arrays.get("weight_zero_point")
    if is_packed:
        q = _fields(arrays["weight_packed"], bits, axis=1)[:, :k]
    else:
        q = arrays["weight"].astype(jnp.int32) + middle
    if zero_point is not None and is_packed and not has_one_scale:
        zero_point = _fields(zero_point, bits, axis=0)[:n]
    elif zero_point is not None:
        zero_point = zero_point.astype(jnp.int32) + middle
    if has_one_scale:
        scale, zero_point = (
            None if x is None else jnp.broadcast_to(x, (n, 1)) for x in (scale, zero_point)
        )
    zero_point = None if zero_point is None else zero_point.T
    if "weight_g_idx" in arrays and bool((arrays["weight_g_idx"] == -1).all()):
        del arrays["weight_g_idx"]  # There is no order.
    order = _order(source, "weight_g_idx", arrays, {"groups": 1} | sizes)
    return _pack(source, "weight_scale", scale.T, q.T, zero_point, bits, order, is_signed=True)


@formats.eager
def from_float8(source, prefix: str = "") -> PackedWeight:
    """Load a weight of 8-bit floats, for 16-bit activations.

        w[k, n] = weight[n, k] * weight_scale[n // rows, k // columns]

    The shape of the scales tells the format: one scale, as of Model Optimizer; a scale for each
    n, or for each n and group of k, as in "float-quantized" of compressed-tensors and MXFP8; or
    for each block of 128 by 128, as of DeepSeek.

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: prefix of the names weight and weight_scale, or weight_scale_inv.

    Returns:
      A `PackedWeight` of shape (k, n), the transpose of the checkpoint's weight.

    Raises:
      TypeError: if source is neither a dictionary nor a path, or arrays have other dtypes: weight
        is of float8_e4m3fn or float8_e5m2, the scales of bfloat16, float16, float32, or powers of
        two, of float8_e8m0fnu or uint8.
      ValueError: if names are missing, shapes do not match, or under the conditions of
        `pack_weights`.

    Numerics:
      Floats and scales equal the checkpoint's. Scales of blocks, and of groups larger than 128
      rows, are repeated. weight_scale_inv is a factor, despite its name. Scales of activations
      are ignored.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tensors = {
      ...     "weight": jnp.ones((256, 128), jnp.float8_e4m3fn),
      ...     "weight_scale_inv": jnp.array([[0.5], [2.0]]),
      ... }
      >>> w = jax_tcgemm.from_float8(tensors)
      >>> w.shape, w.dequantize()[0, 127:129].tolist()
      ((128, 256), [0.5, 2.0])
    """
    op = "from_float8"
    source = formats.Source.of(op, source, prefix)
    name = "weight_scale_inv" if "weight_scale_inv" in source else "weight_scale"
    is_e8m0 = source[name].dtype.name in formats.Kind.E8M0.value
    arrays, sizes = formats.read(source, formats.float8(name, is_e8m0))
    q, scale, n, k = arrays["weight"], arrays[name], sizes["n"], sizes["k"]
    size = formats.FLOAT8_BLOCK
    if scale.ndim < 2:
        scale = jnp.broadcast_to(scale, (n, 1))
    elif "groups" in sizes:
        size = k // sizes["groups"]
    else:
        scale = jnp.repeat(scale, size, 0)[:n]
    size, (scale,), _ = _regrouped(source, name, k, size, (scale.T,))
    return pack(op, q.T, scale, None, size, q.dtype)


@formats.eager
def from_bitsandbytes(source, name: str = "weight") -> PackedWeight:
    """Load a weight that bitsandbytes quantized to 4 bits, NF4 or FP4.

        w.flat[i] = quant_map[weight.flat[i]] * absmax[i // blocksize],  w of shape (n, k)

    The scales may be quantized. The bytes may be stored as another dtype (`quant_storage`), such as
    bfloat16.

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      name: name of the weight. The names of its state start with this name and a dot.

    Returns:
      A `PackedWeight` of shape (k, n), the transpose of the checkpoint's weight.

    Raises:
      TypeError: if source is neither a dictionary nor a path, or arrays have other dtypes.
      ValueError: if names are missing, shapes do not match, the state lacks an entry, blocks do not
        split into multiples of 32 elements of a row, or under the conditions of `pack_weights`.

    Numerics:
      Integers equal the checkpoint's. Quantized scales are dequantized in float32, as in
      bitsandbytes. The scale of a block that is larger than the kernels' groups, or continues in
      the next row, is repeated.

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
    source = formats.Source.of(op, source, name)
    is_fp4 = formats.bitsandbytes_state("fp4").name in source
    state = formats.read_state(source, "fp4" if is_fp4 else "nf4")
    (n, k), size = state.shape, state.blocksize
    form = formats.bitsandbytes(source[""].dtype.itemsize, state.nested_blocksize)
    arrays, _ = formats.read(source, form, bytes=-(-n * k // 2), blocks=-(-n * k // size))
    words, absmax = arrays[""], arrays[".absmax"]
    q = _nibbles(words, n, k)
    if state.nested_blocksize is not None:
        codes, nested = (
            np.asarray(arrays[f".nested_{x}"], np.float32) for x in ("quant_map", "absmax")
        )
        nested = nested[np.arange(absmax.size) // state.nested_blocksize]
        # A product that is rounded before it is added to.
        absmax = codes[np.asarray(absmax)] * nested + np.float32(state.nested_offset)
    # Blocks continue from row to row; a group is the neighbors within a row that share a scale.
    run = k if size >= n * k else math.gcd(size, k)
    block = (np.arange(n)[:, None] * k + np.arange(0, k, run)) // size
    scale = jax.device_put(np.asarray(absmax, np.float32)[block].T)
    own, (scale,), _ = _regrouped(source, ".absmax", k, run, (scale,))
    return pack(op, q, scale, None, own, np.asarray(arrays[".quant_map"], np.float32))


@formats.eager
def from_qwix(source, prefix: str = "") -> PackedWeight:
    """Pack a weight that Qwix quantized.

        w[k, n] = (qvalue[k, n] - zero_point[k // group, n]) * scale[k // group, n]

    Args:
      source: Qwix's `QArray` of shape (k, ...), or an object with its fields, such as a
        `QuantizedArray`. Or a dictionary of arrays, or the path of a safetensors file.
      prefix: prefix of the names qvalue, scale and, optionally, zero_point.

    Returns:
      A `PackedWeight` of shape (k, ...).

    Raises:
      TypeError: if source is of another type, its qtype is unknown, or arrays have other dtypes.
      ValueError: if names are missing, scales are of blocks of columns, or under the conditions of
        `pack_weights`.

    Numerics:
      Integers and scales equal the source's. Scales of groups larger than 128 rows are repeated.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> q = jax_tcgemm.quantize(jnp.ones((256, 16)), "int8", block=(128, 1))
      >>> jax_tcgemm.from_qwix(q).dequantize()[0, :2]
      Array([1., 1.], dtype=float32)
    """
    op = "from_qwix"
    source = getattr(source, "array", source)  # As a parameter it is wrapped.
    array, known, size = None, {}, None
    if all(hasattr(source, field) for field in ("qvalue", "scale", "zero_point", "qtype")):
        array, prefix = source, ""
        fields = {name: getattr(array, name) for name in ("qvalue", "scale", "zero_point")}
        source = {name: x for name, x in fields.items() if x is not None}
    source = formats.Source.of(op, source, prefix)
    qvalue, scale = source["qvalue"], source["scale"]
    if getattr(array, "block", None) is not None and 1 < np.ndim(qvalue) == np.ndim(scale):
        size = array.tile[0]  # The last group may be short.
        known = {"groups": -(-len(qvalue) // size)}
    arrays, sizes = formats.read(source, formats.qwix(np.ndim(qvalue)), **known)
    q, k, shape = arrays["qvalue"], sizes["k"], (sizes["groups"], *qvalue.shape[1:])
    factors = [
        None if x is None else jnp.broadcast_to(x, shape)
        for x in (arrays["scale"], arrays.get("zero_point"))
    ]
    size, factors, _ = _regrouped(source, "scale", k, size or k // shape[0], factors)
    kind = value_kind(op, "source", getattr(array, "qtype", None), q.dtype)
    return pack(op, q, *factors, size, "nf4" if kind is ValueKind.NF4 else q.dtype)


# --- what formats share -------------------------------------------------------------------------


def _check_choice(op: str, name: str, value, choices: tuple[int, ...]) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value not in choices:
        raise ValueError(
            f"{op}: {name} must be {' or '.join(map(str, choices))}, got {name}={value!r}; see "
            "quantization_config of the checkpoint"
        )


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
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


@jax.jit
def _awq_columns(words) -> jax.Array:
    """The nibbles of AWQ's words in the order of columns."""
    nibbles = _fields(words, 4, axis=1)
    nibbles = nibbles.reshape(nibbles.shape[0], -1, 8)
    return nibbles[:, :, np.argsort(_AWQ_ORDER)].reshape(nibbles.shape[0], -1)


@functools.partial(jax.jit, static_argnames=("n", "k"))
def _nibbles(words, n: int, k: int) -> jax.Array:
    """The nibbles of bytes, the high ones first, of shape (k, n); those beyond n * k fill up."""
    return jnp.stack((words >> 4, words & 15), -1).reshape(-1)[: n * k].reshape(n, k).T


def _order(source: formats.Source, name: str, arrays, sizes) -> np.ndarray | None:
    """Group number of each row; None if groups are consecutive rows."""
    if name not in arrays:
        return None
    g_idx, groups = np.asarray(arrays[name]).astype(np.int64), sizes["groups"]
    size = sizes["k"] // groups
    own = np.arange(sizes["k"]) // size
    if not np.array_equal(np.sort(g_idx), own):
        raise ValueError(
            f"{source.op}: {source.prefix}{name} must name each of {groups} groups {size} times, "
            "got other numbers; groups of several sizes are dequantized"
        )
    return None if np.array_equal(g_idx, own) else g_idx


def _regrouped(source: formats.Source, name: str, k: int, size: int, factors, g_idx=None):
    """Repeat the scales of groups of any size for groups of a size that the kernels take.

    Args:
      source: for messages.
      name: of the scales, for messages.
      k: rows of the weight.
      size: rows of a group; the last one may have fewer.
      factors: scales, and zero points or None, with a row for each group.
      g_idx: None, or for each row the number of its group.

    Returns:
      The size, which is None for whole columns, the factors and g_idx.
    """
    if len(factors[0]) == 1:
        return None, factors, None
    new_size = group_size_within(math.gcd(k, size))
    if new_size is None:
        raise ValueError(
            f"{source.op}: {source.prefix}{name} must have groups of whole columns or of multiples "
            f"of {GROUP_SIZES[0]} rows, got groups of {size} of {k} rows; dequantize it"
        )
    if new_size != size:
        group = np.arange(0, k, new_size) // size
        factors = [None if x is None else x[group] for x in factors]
        if g_idx is not None:  # By the place of a row among those of its group.
            g_idx = (np.argsort(np.argsort(g_idx, kind="stable")) // new_size).astype(np.int32)
    return new_size, factors, g_idx


def _pack(source, name, scale, q, zero_point, bits, g_idx=None, is_signed=False) -> PackedWeight:
    """From unsigned integers; zero points that are all in the middle are those of signed ones."""
    middle = 1 << bits - 1
    if zero_point is not None and (np.asarray(zero_point) == middle).all():
        zero_point, is_signed = None, True
    if is_signed:
        q = q - middle
        zero_point = None if zero_point is None else zero_point - middle
    factors = scale, zero_point
    size, factors, g_idx = _regrouped(source, name, len(q), len(q) // len(scale), factors, g_idx)
    return pack(source.op, q, *factors, size, f"{'' if is_signed else 'u'}int{bits}", g_idx)
