"""Workloads of products of 8-bit floats with scales, NT.

A group has these keys::

    m, n, k      each may be a list
    scaling      "rows", of rows of both operands; "blocks", of 1 by 128 of lhs and 128 by 128 of
                 rhs; "mxfp8", "mxfp4" and "nvfp4", of 32 or 16 elements of K; may be a list

`scaled` is `scaled_matmul` to bfloat16. `xla` is what XLA makes of the same: scales of rows after
its own product of 8-bit floats, those of blocks before one of the dequantized operands in bfloat16.
`nn` is `jax.nn.scaled_matmul`, which has block formats alone. `unscaled`, our product without
scales in 8 bits, or of block formats in bfloat16, is timed beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed

_NT = (((1,), (1,)), ((), ()))
# Blocks of lhs and of rhs along their rows and along K.
_SCALINGS = {
    "rows": ((1, None), (1, None)),
    "blocks": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (1, 32)),
    "mxfp4": ((1, 32), (1, 32)),
    "nvfp4": ((1, 16), (1, 16)),
}
# Dtypes of elements and of scales, where they are not those of the suite and float32.
_FORMATS = {
    "mxfp8": (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
    "mxfp4": (jnp.float4_e2m1fn, jnp.float8_e8m0fnu),
    "nvfp4": (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
}


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key or scaling.
    """
    keys = ("m", "n", "k", "scaling")
    check_keys(f"a group of {suite}", group, ("name", *keys))
    for m, n, k, scaling in itertools.product(*(listed(group[key]) for key in keys)):
        check_value("scaling", scaling, _SCALINGS)
        yield _workload(suite, group.get("name", ""), dtype, m, n, k, scaling)


def _dequantized(a, scales, block, dtype):
    scales = scales.astype(dtype)
    for axis, extent in enumerate(a.shape):
        if scales.shape[axis] not in (1, extent):
            scales = jnp.repeat(scales, block[axis], axis)
    return a.astype(dtype) * scales[: a.shape[0], : a.shape[1]]


def _after(x, w, x_scales, w_scales):
    acc = lax.dot_general(x, w, _NT, preferred_element_type=jnp.float32)
    return (acc * x_scales * w_scales.T).astype(jnp.bfloat16)


def _nn(*operands):
    x, w, x_scales, w_scales = (x[None] for x in operands)
    how = {"preferred_element_type": jnp.bfloat16}
    return jax.nn.scaled_matmul(x, w, x_scales, w_scales, **how)[0]


def _workload(suite, label, dtype, m, n, k, scaling) -> Workload:
    element_type, scale_type = _FORMATS.get(scaling, (DTYPES[dtype][0], jnp.float32))
    shapes = [(m, k), (n, k)]
    blocks = [(rows, depth or k) for rows, depth in _SCALINGS[scaling]]
    for (rows, depth), block in zip(shapes[:2], blocks, strict=True):
        shapes.append((-(-rows // block[0]), -(-depth // block[1])))
    dtypes = [element_type] * 2 + [scale_type] * 2
    operands = tuple(jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True))

    def draw(key):
        keys = jax.random.split(key, 4)
        values = [jax.random.normal(*each) for each in zip(keys, shapes, strict=True)]
        values[2:] = (jnp.exp(x / 4) for x in values[2:])
        return tuple(x.astype(like.dtype) for x, like in zip(values, operands, strict=True))

    def before(x, w, x_scales, w_scales):
        pairs = zip((x, w), (x_scales, w_scales), blocks, strict=True)
        x, w = (_dequantized(*each, jnp.float32).astype(jnp.bfloat16) for each in pairs)
        return lax.dot_general(x, w, _NT)

    def exactly(x, w, x_scales, w_scales):
        pairs = zip((x, w), (x_scales, w_scales), blocks, strict=True)
        x, w = (_dequantized(*each, jnp.float32) for each in pairs)
        return lax.dot_general(x, w, _NT, precision="highest")

    def scaled(*given):
        how = {"lhs_block": blocks[0], "rhs_block": blocks[1]}
        return jax_tcgemm.scaled_matmul(*given, **how, preferred_element_type=jnp.bfloat16)

    def unscaled(x, w, *_):
        if scaling in _FORMATS:
            x, w = (x.astype(jnp.bfloat16) for x in (x, w))
        return jax_tcgemm.dot_general(x, w, _NT, preferred_element_type=jnp.bfloat16)

    return Workload(
        suite=suite,
        label=" ".join(filter(None, (label, scaling))),
        dtype=dtype,
        shape=f"{m}×{n}×{k}",
        sizes={"m": m, "n": n, "k": k},
        operands=operands,
        ours={"scaled": scaled},
        peers={"xla": _after if scaling == "rows" else before}
        | ({"nn": _nn} if scaling in _FORMATS else {}),
        parts={"unscaled": unscaled},
        reference=exactly,
        # Operands that XLA dequantizes are rounded to bfloat16, and so is the result.
        tolerance=2 * float(jnp.finfo(jnp.bfloat16).eps) + 1e-3,
        flops=2 * m * n * k,
        least_bytes=(m + n) * k * jax.dtypes.itemsize_bits(element_type) // 8 + 2 * m * n,
        draw=draw,
    )
