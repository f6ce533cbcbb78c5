"""Formats of the weights that the workloads `packed` and `packed_grouped` multiply by.

A group of such a suite has these keys::

    format         "int", the default, "mxfp4", "mxfp8" or "nvfp4"; may be a list
    bits, group    of integers; group 0 is one scale per column; each may be a list. Block formats
                   have sizes of their own
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.workload import check_value, listed

_FLOAT4 = "float4_e2m1fn"
# Dtype of the elements, their bits, and rows that share a scale.
_BLOCKS = {"mxfp4": (_FLOAT4, 4, 32), "mxfp8": ("float8_e4m3fn", 8, 32), "nvfp4": (_FLOAT4, 4, 16)}
# Root mean square of the numbers of float4_e2m1fn.
_FLOAT4_SIZE = 2.93


class Drawn(NamedTuple):
    """Operands of `pack_weights`; `column_scale` is None except for NVFP4."""

    q: jax.Array
    scale: jax.Array
    column_scale: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """The format of a weight: its name, bits of an element, rows that share a scale."""

    name: str
    bits: int
    group: int

    @property
    def qtype(self) -> str:
        """Name of the elements' type for `pack_weights`."""
        return _BLOCKS[self.name][0] if self.name in _BLOCKS else self.name

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype) -> Drawn:
        """Random elements of a weight [k, ...], and scales by which products are of order 1."""
        k, *columns = shape
        if self.name not in _BLOCKS:
            return Drawn(*reference.random_quantized(key, shape, self.bits, self.group, dtype))
        of_q, of_scale = jax.random.split(key)
        if self.qtype == _FLOAT4:
            q, size = jax.random.bits(of_q, shape, jnp.uint8) >> 4, k**-0.5 / _FLOAT4_SIZE
        else:
            q, size = jax.random.normal(of_q, shape).astype(self.qtype), k**-0.5
        shape = (k // self.group, *columns)
        if self.name != "nvfp4":
            exponent = 127 + int(np.floor(np.log2(size)))
            scale = jax.random.randint(of_scale, shape, exponent, exponent + 2).astype(jnp.uint8)
            return Drawn(q, lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu))
        scale = jax.random.uniform(of_scale, shape, jnp.float32, 64, 192)
        return Drawn(q, scale.astype(jnp.float8_e4m3fn), jnp.float32(size / 128))

    def pack(self, drawn: Drawn) -> jax_tcgemm.PackedWeight:
        """Return the packed weight."""
        how = {"group_size": self.group, "dtype": self.qtype, "column_scale": drawn.column_scale}
        return jax_tcgemm.pack_weights(drawn.q, drawn.scale, **how)

    def typed(self, drawn: Drawn) -> Drawn:
        """Convert the elements to a dtype that XLA multiplies."""
        if self.qtype != _FLOAT4:
            return drawn._replace(q=drawn.q.astype(self.qtype))  # float8 stays as it is
        codes = drawn.q.astype(jnp.uint4)
        return drawn._replace(q=lax.bitcast_convert_type(codes, jnp.float4_e2m1fn))

    def dequantize(self, typed: Drawn, dtype) -> jax.Array:
        """The weight of shape (k, n) in a dtype, as one writes it."""
        q, scale = typed.q.astype(dtype), typed.scale.astype(dtype)
        w = q.reshape(len(scale), -1, *scale.shape[1:]) * scale[:, None]
        if typed.column_scale is not None:
            w = (w * typed.column_scale).astype(dtype)
        return w.reshape(q.shape)


def weight_formats(group: dict, k: int) -> list[WeightFormat]:
    """The formats of weights of k rows that a suite's group names.

    Raises:
      ValueError: for an unknown format, number of bits or group size.
    """
    found = []
    for name in listed(group.get("format", "int")):
        check_value("format", name, ("int", *_BLOCKS))
        if name in _BLOCKS:
            _, own_bits, own_group = _BLOCKS[name]
            for key, own in (("bits", own_bits), ("group", own_group)):
                check_value(key, group.get(key, own), (own,))
            found.append(WeightFormat(name, own_bits, own_group))
            continue
        for bits, size in itertools.product(listed(group["bits"]), listed(group["group"])):
            check_value("bits", bits, (4, 8))
            found.append(WeightFormat(f"int{bits}", bits, size or k))
    return found
