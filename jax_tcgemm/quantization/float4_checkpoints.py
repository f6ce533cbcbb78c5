"""Public loaders of weights in the block formats of 4-bit floats, MXFP4 and NVFP4.

Each takes a dictionary of arrays or a safetensors file, as the loaders of checkpoints.py do. Codes
of float4_e2m1fn lie two a byte, the first in the low nibble.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_tcgemm.problem.operands.packed_weight import PackedWeight
from jax_tcgemm.products.arguments import check_flag
from jax_tcgemm.quantization import formats
from jax_tcgemm.quantization.pack import pack

_FLOAT4 = "float4_e2m1fn"


@formats.eager
def from_gpt_oss(source, prefix: str = "", *, gate_up: bool = False) -> PackedWeight:
    """Load the expert weights of gpt-oss, in MXFP4.

        w[e, k, n] = float4_e2m1fn(blocks[e, n, k]) * 2^(scales[e, n, k // 32] - 127)

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: name of the weight without "_blocks" and "_scales", such as
        "model.layers.0.mlp.experts.down_proj". The names of OpenAI's own files,
        "block.0.mlp.mlp2_weight.blocks" and ".scales", are read, too.
      gate_up: whether gate and up columns are interleaved, as in gate_up_proj.

    Returns:
      A `PackedWeight` of shape (e, k, n), for `ragged_dot`. With gate_up, of shape
      (e, k, 2, n / 2), for `gated_ragged_linear`: the even columns are the gate.

    Raises:
      TypeError: if source is neither a dictionary nor a path, or arrays have other dtypes.
      ValueError: if names are missing, shapes do not match, a scale is 255, which is NaN, or n is
        odd with gate_up.

    Numerics:
      Codes and scales equal the checkpoint's.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tensors = {
      ...     "down_proj_blocks": jnp.full((2, 8, 3, 16), 0x72, jnp.uint8),
      ...     "down_proj_scales": jnp.full((2, 8, 3), 128, jnp.uint8),
      ... }
      >>> w = jax_tcgemm.from_gpt_oss(tensors, "down_proj")
      >>> w.shape, w.dequantize()[0, :2, 0].tolist()
      ((2, 96, 8), [2.0, 12.0])
    """
    op = "from_gpt_oss"
    gate_up = check_flag(op, "gate_up", gate_up)
    source = formats.Source.of(op, source, prefix)
    separator = "." if "_blocks" not in source and ".blocks" in source else "_"
    arrays, sizes = formats.read(source, formats.gpt_oss(separator))
    n = sizes["n"]
    if gate_up and n % 2:
        raise ValueError(
            f"{op}: {prefix} must have an even number of columns, got {n} with {gate_up=}; is it "
            "another weight?"
        )
    q, scale = _codes(arrays[f"{separator}blocks"]), arrays[f"{separator}scales"]
    q, scale = (_columns_last(x, gate_up) for x in (q.reshape(*q.shape[:2], -1), scale))
    return pack(op, q, scale, None, 32, _FLOAT4)


@formats.eager
def from_modelopt(source, prefix: str = "") -> PackedWeight:
    """Load a weight that NVIDIA's Model Optimizer quantized to NVFP4.

        w[n, k] = float4_e2m1fn(weight[n, k]) * weight_scale[n, k // 16] * weight_scale_2

    Args:
      source: a dictionary of arrays, or the path of a safetensors file.
      prefix: prefix of the names weight, weight_scale and weight_scale_2.

    Returns:
      A `PackedWeight` of shape (k, n), the transpose of the checkpoint's weight.

    Raises:
      TypeError: if source is neither a dictionary nor a path, or arrays have other dtypes.
      ValueError: if names are missing, shapes do not match, k is not a multiple of 16, or scales
        are not finite.

    Numerics:
      Codes and scales equal the checkpoint's. The column scales are weight_scale_2.

    Examples:
      >>> import jax.numpy as jnp, jax_tcgemm
      >>> tensors = {
      ...     "weight": jnp.full((8, 16), 0x72, jnp.uint8),
      ...     "weight_scale": jnp.full((8, 2), 2, jnp.float8_e4m3fn),
      ...     "weight_scale_2": jnp.float32(0.5),
      ... }
      >>> jax_tcgemm.from_modelopt(tensors).dequantize()[:2, 0].tolist()
      [1.0, 6.0]
    """
    source = formats.Source.of("from_modelopt", source, prefix)
    arrays, _ = formats.read(source, formats.nvfp4("weight", "weight_scale_2"))
    return _nvfp4(source.op, arrays["weight"], arrays["weight_scale"], arrays["weight_scale_2"])


def compressed_float4(source: formats.Source, bits: int) -> PackedWeight:
    """Load a weight of compressed-tensors in "nvfp4-pack-quantized" or "mxfp4-pack-quantized"."""
    op, name = source.op, source.prefix + "weight_global_scale"
    if bits != 4:
        raise ValueError(
            f"{op}: bits must be 4 for {source.prefix}weight_packed of uint8, got {bits=}; the "
            "weight is of 4-bit floats"
        )
    if "weight_zero_point" in source:
        raise ValueError(
            f"{op}: weights of 4-bit floats must have no zero points, got {source.prefix}"
            "weight_zero_point; dequantize it"
        )
    is_e4m3 = source["weight_scale"].dtype == jnp.float8_e4m3fn
    if not is_e4m3 and "weight_global_scale" not in source:
        arrays, _ = formats.read(source, formats.COMPRESSED_MXFP4)
        q, scale = _codes(arrays["weight_packed"]), arrays["weight_scale"]
        return pack(op, q.T, scale.T, None, 32, _FLOAT4)
    arrays, _ = formats.read(source, formats.nvfp4("weight_packed", "weight_global_scale"))
    divisor = np.asarray(arrays["weight_global_scale"], np.float32).reshape(())
    if abs(divisor) < np.finfo(np.float32).tiny:
        raise ValueError(
            f"{op}: {name} must be a normal number, got {float(divisor)}; scales are divided by it"
        )
    tensor_scale = np.float32(1) / divisor
    return _nvfp4(op, arrays["weight_packed"], arrays["weight_scale"], tensor_scale)


def _nvfp4(op: str, words, scale, tensor_scale) -> PackedWeight:
    column_scale = jnp.asarray(tensor_scale, jnp.float32).reshape(())
    return pack(op, _codes(words).T, scale.T, None, 16, _FLOAT4, column_scale=column_scale)


@jax.jit
def _codes(words) -> jax.Array:
    """The codes of bytes along the last dimension."""
    nibbles = jnp.stack((words & 15, words >> 4), -1)
    return nibbles.reshape(*words.shape[:-1], -1)


@functools.partial(jax.jit, static_argnames="gate_up")
def _columns_last(x, gate_up: bool) -> jax.Array:
    """(e, n, rows) as (e, rows, n), or as (e, rows, 2, n / 2) of even and odd columns."""
    experts, n, rows = x.shape
    if not gate_up:
        return jnp.swapaxes(x, 1, 2)
    return jnp.transpose(x.reshape(experts, n // 2, 2, rows), (0, 3, 2, 1))
