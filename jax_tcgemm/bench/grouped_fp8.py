"""Workloads of grouped products of 8-bit floats with scales.

A group has these keys::

    tokens, groups, n, k   each may be a list
    scaling                "rows", of tokens and of columns of each group's matrix; "blocks", of 1
                           by 128 of tokens and 128 by 128 of matrices; may be a list
    alpha                  as of the suites of grouped products

`quantized` is `ragged_dot` of `QuantizedArray`s to bfloat16, matrices lying as (groups, n, k).
`xla` is what XLA makes of `lax.ragged_dot` of the dequantised operands, where its masks fit the
memory. `bf16`, our product of operands that have been bfloat16 all along, is timed beside them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.grouped import Grouped
from jax_tcgemm.bench.ragged import group_sizes
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed

_KEYS = ("tokens", "groups", "n", "k", "scaling")
_DEPTH = {"rows": None, "blocks": 128}


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key or scaling.
    """
    check_keys(f"a group of {suite}", group, ("name", "alpha", *_KEYS))
    for tokens, groups, n, k, scaling in itertools.product(*(listed(group[key]) for key in _KEYS)):
        check_value("scaling", scaling, _DEPTH)
        sizes = group_sizes(tokens, groups, group.get("alpha", 4.0))
        of = Grouped("forward", dtype, sizes, tokens, groups, n, k)
        yield _workload(suite, f"{group.get('name', '')} {scaling}".strip(), of, _DEPTH[scaling])


def _spread(scales, shape):
    for axis, extent in enumerate(shape):
        if scales.shape[axis] not in (1, extent):
            scales = jnp.repeat(scales, 128, axis)
    return scales[tuple(map(slice, shape))]


def _dequantized(x, w, x_scales, w_scales):
    return (a.astype(s.dtype) * _spread(s, a.shape) for a, s in ((x, x_scales), (w, w_scales)))


def _quantized(blocks, x, w, sizes, x_scales, w_scales, *_):
    lhs = jax_tcgemm.QuantizedArray(x, x_scales, block=blocks[0])
    rhs = jax_tcgemm.QuantizedArray(w, w_scales, block=blocks[1]).mT
    return jax_tcgemm.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16)


def _bf16(x, w, sizes, x_scales, w_scales, x_wide, w_wide):
    del x, w, x_scales, w_scales
    return jax_tcgemm.ragged_dot(x_wide, w_wide, sizes)


def _xla(x, w, sizes, x_scales, w_scales, *_):
    x, w = (a.astype(jnp.bfloat16) for a in _dequantized(x, w, x_scales, w_scales))
    return lax.ragged_dot(x, w.mT, sizes)


def _reference(sizes, x, w, _, x_scales, w_scales, *__):
    product = functools.partial(jnp.matmul, precision="highest")
    x, w = _dequantized(x, w, x_scales.astype(x.dtype), w_scales.astype(x.dtype))
    return reference.rows_of_groups(lambda x, w: product(x, w.T), sizes, x, w)


def _workload(suite: str, label: str, of: Grouped, depth: int | None) -> Workload:
    tokens, groups, n, k = of.tokens, of.groups, of.n, of.k
    rows = 1 if depth is None else depth
    tiles = ((1, depth or k), (rows, depth or k))
    blocks = 1 if depth is None else -(-k // depth)
    sizes = jnp.asarray(of.group_sizes, jnp.int32)
    f8, f32, bf16 = of.element_type, jnp.float32, jnp.bfloat16
    shapes = ((tokens, k), f8), ((groups, n, k), f8), (sizes.shape, sizes.dtype)
    shapes += ((tokens, blocks), f32), ((groups, -(-n // rows), blocks), f32)
    shapes += ((tokens, k), bf16), ((groups, k, n), bf16)
    operands = tuple(jax.ShapeDtypeStruct(*each) for each in shapes)

    def draw(key):
        keys = iter(jax.random.split(key, 4))
        x, w = (reference.random(next(keys), like.shape, like.dtype) for like in operands[:2])
        scales = (
            jnp.exp(reference.random(next(keys), like.shape, like.dtype) / 4)
            for like in operands[3:5]
        )
        return x, w, sizes, *scales, x.astype(bf16), w.mT.astype(bf16)

    return Workload(
        suite=suite,
        label=label,
        dtype=of.dtype,
        shape=f"{tokens}×{n}×{k}, {groups} groups",
        sizes={"tokens": tokens, "groups": groups, "n": n, "k": k},
        operands=operands,
        ours={"quantized": functools.partial(_quantized, tiles)},
        peers={"xla": _xla} if of.fits_xla(2 * (n + k)) else {},
        parts={"bf16": _bf16},
        reference=functools.partial(_reference, of.group_sizes),
        # Operands that XLA dequantises are rounded to bfloat16, and so is the result.
        tolerance=2 * float(jnp.finfo(bf16).eps) + 1e-3,
        flops=2 * tokens * n * k,
        bytes=tokens * k + of.used * n * k + 2 * tokens * n,
        draw=draw,
    )
