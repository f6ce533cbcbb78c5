"""Workloads of products of 8-bit floats with scales, NT.

A group has these keys::

    m, n, k      each may be a list
    scaling      "rows", of rows of both operands; "blocks", of 1 by 128 of lhs and 128 by 128 of
                 rhs; may be a list

`scaled` is `scaled_matmul` to bfloat16. `xla` is what XLA makes of the same: scales of rows after
its own product of 8-bit floats, those of blocks before one of the dequantized operands in bfloat16.
`unscaled`, our product without scales, is timed beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed

_NT = (((1,), (1,)), ((), ()))
# Of lhs and rhs, whether a scale is for blocks of 128 rows, and of 128 of K.
_SCALINGS = {"rows": ((1, None), (1, None)), "blocks": ((1, 128), (128, 128))}


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


def _repeated(scales, shape):
    for axis, extent in enumerate(shape):
        if scales.shape[axis] not in (1, extent):
            scales = jnp.repeat(scales, 128, axis)
    return scales[: shape[0], : shape[1]]


def _reference(x, w, x_scales, w_scales):
    x, w = (a * _repeated(s.astype(a.dtype), a.shape) for a, s in ((x, x_scales), (w, w_scales)))
    return lax.dot_general(x, w, _NT, precision="highest")


def _after(x, w, x_scales, w_scales):
    acc = lax.dot_general(x, w, _NT, preferred_element_type=jnp.float32)
    return (acc * x_scales * w_scales.T).astype(jnp.bfloat16)


def _before(x, w, x_scales, w_scales):
    x, w = (
        (a.astype(jnp.float32) * _repeated(s, a.shape)).astype(jnp.bfloat16)
        for a, s in ((x, x_scales), (w, w_scales))
    )
    return lax.dot_general(x, w, _NT)


def _workload(suite, label, dtype, m, n, k, scaling) -> Workload:
    element_type = DTYPES[dtype][0]
    shapes = [(m, k), (n, k)]
    blocks = [(rows, depth or k) for rows, depth in _SCALINGS[scaling]]
    for (rows, depth), block in zip(shapes[:2], blocks, strict=True):
        shapes.append((-(-rows // block[0]), -(-depth // block[1])))
    dtypes = [element_type] * 2 + [jnp.float32] * 2
    operands = tuple(jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True))

    def draw(key):
        values = [
            reference.random(each, like.shape, like.dtype)
            for each, like in zip(jax.random.split(key, 4), operands, strict=True)
        ]
        return *values[:2], *(jnp.exp(x / 4) for x in values[2:])

    def scaled(*given):
        how = {"lhs_block": blocks[0], "rhs_block": blocks[1]}
        return jax_tcgemm.scaled_matmul(*given, **how, preferred_element_type=jnp.bfloat16)

    def unscaled(x, w, *_):
        return jax_tcgemm.dot_general(x, w, _NT, preferred_element_type=jnp.bfloat16)

    return Workload(
        suite=suite,
        label=" ".join(filter(None, (label, scaling))),
        dtype=dtype,
        shape=f"{m}×{n}×{k}",
        sizes={"m": m, "n": n, "k": k},
        operands=operands,
        ours={"scaled": scaled},
        peers={"xla": _after if scaling == "rows" else _before},
        parts={"unscaled": unscaled},
        reference=_reference,
        # Operands that XLA dequantizes are rounded to bfloat16, and so is the result.
        tolerance=2 * float(jnp.finfo(jnp.bfloat16).eps) + 1e-3,
        flops=2 * m * n * k,
        least_bytes=m * k + n * k + 2 * m * n,
        draw=draw,
    )
