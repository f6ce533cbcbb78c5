"""Workloads of grouped products of 8-bit floats with scales.

A group has these keys::

    kind                   "forward", "gated", or "weights", whose result is the gradient of the
                           matrices
    tokens, groups, n, k   each may be a list
    scaling                "rows", of tokens and of columns of each group's matrix; "blocks", of 1
                           by 128 of tokens and 128 by 128 of matrices; may be a list
    alpha                  as of the suites of grouped products

`quantized` is `ragged_dot` of `QuantizedArray`s to bfloat16, matrices lying as (groups, n, k), or
`ragged_dot_general` of (k, tokens) and (n, tokens), whose scales are of rows or of 1 by 128. `xla`
is what XLA makes of the same by `lax` of the dequantized operands, where its masks fit the memory.
`bf16`, our product of operands that have been bfloat16 all along, with tokens first, is timed
beside them. Of kind "gated" it is `gated_ragged_linear` of matrices that lie as (groups, 2, n, k),
n being a multiple of 128, and `steps`, the product of both matrices with what XLA makes of the
rest, is timed, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench.reference import random, rows_of_groups, sums_of_groups
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed
from jax_tcgemm.bench.workloads.grouped import Grouped
from jax_tcgemm.bench.workloads.ragged import group_sizes

_KEYS = ("tokens", "groups", "n", "k", "scaling")
_DEPTH = {"rows": None, "blocks": 128}


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key or scaling.
    """
    check_keys(f"a group of {suite}", group, ("name", "alpha", "kind", *_KEYS))
    kind = group.get("kind", "forward")
    kinds = {"forward": _workload, "gated": _of_gated, "weights": _of_weights}
    check_value("kind", kind, kinds)
    for tokens, groups, n, k, scaling in itertools.product(*(listed(group[key]) for key in _KEYS)):
        check_value("scaling", scaling, _DEPTH)
        sizes = group_sizes(tokens, groups, group.get("alpha", 4.0))
        of = Grouped(kind, dtype, sizes, tokens, groups, n, k)
        label = f"{group.get('name', '')} {scaling}".strip()
        yield kinds[kind](suite, label, of, _DEPTH[scaling])


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
    return rows_of_groups(lambda x, w: product(x, w.T), sizes, x, w)


def _made(
    suite,
    label,
    of: Grouped,
    operands,
    *,
    shape,
    ours,
    xla,
    parts,
    reference,
    wide,
    least_bytes,
    num_b=1,
) -> Workload:
    """A workload; `wide` has both operands as those of bfloat16 lie, `num_b` matrices each."""

    def draw(key):
        keys = iter(jax.random.split(key, 4))
        x, y = (random(next(keys), like.shape, like.dtype) for like in operands[:2])
        scales = [jnp.exp(random(next(keys), like.shape, like.dtype) / 4) for like in operands[3:5]]
        sizes = jnp.asarray(of.group_sizes, jnp.int32)
        return x, y, sizes, *scales, *(a.astype(jnp.bfloat16) for a in wide(x, y))

    return Workload(
        suite=suite,
        label=label,
        dtype=of.dtype,
        shape=shape,
        sizes={"tokens": of.tokens, "groups": of.groups, "n": of.n, "k": of.k},
        operands=operands,
        ours={"quantized": ours},
        peers={"xla": xla} if of.fits_xla(2 * (num_b * of.n + of.k)) else {},
        parts=parts,
        reference=functools.partial(reference, of.group_sizes),
        # Operands that XLA dequantizes are rounded to bfloat16, and so is the result.
        tolerance=num_b * (2 * float(jnp.finfo(jnp.bfloat16).eps) + 1e-3),
        flops=2 * num_b * of.tokens * of.n * of.k,
        least_bytes=least_bytes,
        draw=draw,
    )


def _workload(suite: str, label: str, of: Grouped, depth: int | None) -> Workload:
    tokens, groups, n, k = of.tokens, of.groups, of.n, of.k
    rows = 1 if depth is None else depth
    tiles = ((1, depth or k), (rows, depth or k))
    blocks = 1 if depth is None else -(-k // depth)
    sizes = of.group_sizes
    f8, f32, bf16 = of.element_type, jnp.float32, jnp.bfloat16
    shapes = ((tokens, k), f8), ((groups, n, k), f8), (sizes.shape, jnp.int32)
    shapes += ((tokens, blocks), f32), ((groups, -(-n // rows), blocks), f32)
    shapes += ((tokens, k), bf16), ((groups, k, n), bf16)
    operands = tuple(jax.ShapeDtypeStruct(*each) for each in shapes)

    return _made(
        *(suite, label, of, operands),
        shape=f"{tokens}×{n}×{k}, {groups} groups",
        ours=functools.partial(_quantized, tiles),
        xla=_xla,
        parts={"bf16": _bf16},
        reference=_reference,
        wide=lambda x, w: (x, w.mT),
        least_bytes=tokens * k + of.used * n * k + 2 * tokens * n,
    )


def _activated(both):
    """Return silu(gate) * up of gate and up stacked along the last dimension."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _gated_quantized(blocks, x, w, sizes, x_scales, w_scales, *_):
    lhs = jax_tcgemm.QuantizedArray(x, x_scales, block=blocks[0])
    rows, depth = blocks[1]
    w, w_scales = (jnp.moveaxis(a, -1, 1) for a in (w, w_scales))
    rhs = jax_tcgemm.QuantizedArray(w, w_scales, block=(1, depth, 1, rows))
    return jax_tcgemm.gated_ragged_linear(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16)


def _as_one(operands):
    """Return operands with the gate and up matrices, and their scales, stacked as one matrix."""
    x, w, sizes, x_scales, w_scales, *_ = operands
    w, w_scales = (a.reshape(a.shape[0], -1, a.shape[3]) for a in (w, w_scales))
    return x, w, sizes, x_scales, w_scales


def _gated_steps(blocks, *operands):
    return _activated(_quantized(blocks, *_as_one(operands)))


def _gated_bf16(x, w, sizes, x_scales, w_scales, x_wide, w_wide):
    del x, w, x_scales, w_scales
    return jax_tcgemm.gated_ragged_linear(x_wide, w_wide, sizes)


def _gated_xla(*operands):
    return _activated(_xla(*_as_one(operands)))


def _gated_reference(sizes, *operands):
    return _activated(_reference(sizes, *_as_one(operands)))


def _of_gated(suite: str, label: str, of: Grouped, depth: int | None) -> Workload:
    """silu(x gate) * (x up)."""
    tokens, groups, n, k = of.tokens, of.groups, of.n, of.k
    rows, blocks = (1, 1) if depth is None else (depth, -(-k // depth))
    tiles, sizes = ((1, depth or k), (rows, depth or k)), of.group_sizes
    f8, f32, bf16 = of.element_type, jnp.float32, jnp.bfloat16
    shapes = ((tokens, k), f8), ((groups, 2, n, k), f8), (sizes.shape, jnp.int32)
    shapes += ((tokens, blocks), f32), ((groups, 2, n // rows, blocks), f32)
    shapes += ((tokens, k), bf16), ((groups, k, 2, n), bf16)
    return _made(
        *(suite, label, of, tuple(jax.ShapeDtypeStruct(*each) for each in shapes)),
        shape=f"{tokens}×{n}×{k}, {groups} groups",
        ours=functools.partial(_gated_quantized, tiles),
        xla=_gated_xla,
        parts={"bf16": _gated_bf16, "steps": functools.partial(_gated_steps, tiles)},
        reference=_gated_reference,
        wide=lambda x, w: (x, jnp.moveaxis(w, -1, 1)),
        least_bytes=tokens * k + 2 * of.used * n * k + 2 * tokens * n,
        num_b=2,
    )


_LAST, _FIRST = (
    lax.RaggedDotDimensionNumbers((((axis,), (axis,)), ((), ())), (axis,), ()) for axis in (1, 0)
)


def _sums_quantized(depth, x, y, sizes, x_scales, y_scales, *_):
    lhs, rhs = (
        jax_tcgemm.QuantizedArray(a, s, block=(1, depth)) for a, s in ((x, x_scales), (y, y_scales))
    )
    return jax_tcgemm.ragged_dot_general(
        lhs, rhs, sizes, _LAST, preferred_element_type=jnp.bfloat16
    )


def _sums_bf16(x, y, sizes, x_scales, y_scales, x_wide, y_wide):
    del x, y, x_scales, y_scales
    return jax_tcgemm.ragged_dot_general(x_wide, y_wide, sizes, _FIRST)


def _sums_xla(x, y, sizes, x_scales, y_scales, *_):
    x, y = (a.astype(jnp.bfloat16) for a in _dequantized(x, y, x_scales, y_scales))
    return lax.ragged_dot_general(x, y, sizes, _LAST)


def _sums_reference(sizes, x, y, _, x_scales, y_scales, *__):
    product = functools.partial(jnp.matmul, precision="highest")
    x, y = _dequantized(x, y, x_scales.astype(x.dtype), y_scales.astype(x.dtype))
    return sums_of_groups(lambda x, y: product(x.T, y), sizes, x.T, y.T)


def _of_weights(suite: str, label: str, of: Grouped, depth: int | None) -> Workload:
    """The gradient of the matrices, (groups, k, n)."""
    tokens, groups, n, k = of.tokens, of.groups, of.n, of.k
    depth = depth or tokens
    sizes = of.group_sizes
    f8, f32, bf16 = of.element_type, jnp.float32, jnp.bfloat16
    shapes = ((k, tokens), f8), ((n, tokens), f8), (sizes.shape, jnp.int32)
    shapes += tuple(((rows, -(-tokens // depth)), f32) for rows in (k, n))
    shapes += ((tokens, k), bf16), ((tokens, n), bf16)
    operands = tuple(jax.ShapeDtypeStruct(*each) for each in shapes)

    return _made(
        *(suite, label, of, operands),
        shape=f"{groups} groups of {tokens}: {k}×{n}",
        ours=functools.partial(_sums_quantized, depth),
        xla=_sums_xla,
        parts={"bf16": _sums_bf16},
        reference=_sums_reference,
        wide=lambda x, y: (x.T, y.T),
        least_bytes=tokens * (n + k) + 2 * groups * n * k,
    )
