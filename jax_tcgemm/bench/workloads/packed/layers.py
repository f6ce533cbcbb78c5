"""Workloads of layers with packed weights, dense and of experts.

A group has these keys::

    kind       "gated", silu(x w) * (x u) of one weight of gate and up; "gelu", gelu(x w + b) + r,
               of experts gelu(x w + b) with biases by expert; may be a list
    m, n, k    rows, columns of the result and of x; may be lists
    bits       of the weights, in groups of 128
    experts    how many, with group sizes as of the workload `ragged`; dense where left out

`fused` is our layer, whose epilogue is in the kernel where that is faster. `bf16` is our layer of
the same weights in x's dtype, and `xla` JAX's, which reads packed integers as integers. `apart` is
our product with a packed weight and XLA's loop after it, where a weight has one matrix or is dense.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.suites import DTYPES
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed
from jax_tcgemm.bench.workloads.grouped import Grouped
from jax_tcgemm.bench.workloads.ragged import group_sizes

_GROUP = 128


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key, kind or number of bits.
    """
    keys = ("kind", "m", "n", "k", "bits")
    check_keys(f"a group of {suite}", group, ("name", "experts", *keys))
    for kind, m, n, k, bits in itertools.product(*(listed(group[key]) for key in keys)):
        check_value("kind", kind, ("gated", "gelu"))
        check_value("bits", bits, (4, 8))
        label, experts = group.get("name", ""), group.get("experts", 0)
        yield _workload(suite, label, dtype, kind, (m, n, k), bits, experts)


def _layer(kind: str, z, bias, residual, rows=None):
    """Apply the epilogue of a layer to the products z; `rows` repeats the biases of experts."""
    if kind == "gated":
        return jax.nn.silu(z[..., 0, :]) * z[..., 1, :]
    bias = bias.astype(z.dtype) if rows is None else rows(bias.astype(z.dtype))
    z = jax.nn.gelu(z + bias)
    return z if residual is None else z + residual.astype(z.dtype)


def _workload(suite, label, dtype, kind, extents, bits, experts) -> Workload:
    m, n, k = extents
    element_type, qtype = DTYPES[dtype][0], f"int{bits}"
    columns = (2, n) if kind == "gated" else (n,)
    sizes = group_sizes(m, experts, 4.0) if experts else ()

    def draw_one(key):
        """A weight: packed, and as an array."""
        q, scale = reference.random_quantized(key, (k, *columns), bits, _GROUP, element_type)
        w = jax_tcgemm.pack_weights(q, scale, group_size=_GROUP, dtype=qtype)
        return w, w.dequantize(element_type)

    @jax.jit
    def draw_weights(key):
        return lax.map(draw_one, jax.random.split(key, experts)) if experts else draw_one(key)

    key = jax.eval_shape(functools.partial(jax.random.key, impl="rbg"), 0)
    example, wide = jax.eval_shape(draw_weights, key)
    bias_shape = (experts, n) if experts else (n,)
    operands = (
        jax.ShapeDtypeStruct((m, k), element_type),
        jax.ShapeDtypeStruct(bias_shape, element_type),
        jax.ShapeDtypeStruct((m, n), element_type),
        *jax.tree.leaves(example),
        wide,
    )

    def draw(key):
        of_x, of_b, of_r, of_w = jax.random.split(key, 4)
        given = zip((of_x, of_b, of_r), operands, strict=False)
        small = [reference.random(own, like.shape, like.dtype) for own, like in given]
        return *small, *jax.tree.leaves(draw_weights(of_w))

    def packed_of(values, scales):
        return jax.tree.unflatten(jax.tree.structure(example), (values, scales))

    def by_expert(bias):
        return jnp.repeat(bias, np.array(sizes), axis=0, total_repeat_length=m)

    residual_of = (lambda r: None) if experts else (lambda r: r)
    own_sizes = jnp.array(sizes, jnp.int32) if experts else None

    def layer(x, bias, residual, w):
        """Our layer, by a weight of either kind."""
        if kind == "gated" and experts:
            return jax_tcgemm.gated_ragged_linear(x, w, own_sizes, "silu")
        if kind == "gated":
            return jax_tcgemm.gated_linear(x, w, activation="silu")
        if experts:
            epilogue = functools.partial(_biased, dtype=x.dtype)
            how = {"epilogue": epilogue, "epilogue_operands": (bias[:, None],)}
            return jax_tcgemm.ragged_dot(x, w, own_sizes, **how)
        return jax_tcgemm.linear(x, w, bias, activation="gelu", residual=residual)

    def fused(x, bias, residual, values, scales, w):
        return layer(x, bias, residual, packed_of(values, scales))

    def plain(x, bias, residual, values, scales, w):
        return layer(x, bias, residual, w)

    def after(z, x, bias, residual):
        rows = by_expert if experts else None
        return _layer(kind, z, bias, residual_of(residual), rows).astype(x.dtype)

    def unfused(x, bias, residual, values, scales, w):
        w = packed_of(values, scales)
        how = {"preferred_element_type": jnp.float32}
        if experts:
            z = jax_tcgemm.ragged_dot(x, w, own_sizes, **how)
        else:
            z = jax_tcgemm.linear(x, w, **how)
        return after(z.reshape(m, *columns), x, bias, residual)

    def by_xla(x, bias, residual, values, scales, w):
        how = {"preferred_element_type": jnp.float32}
        flat = w.reshape(*w.shape[: w.ndim - len(columns)], -1)
        z = lax.ragged_dot(x, flat, own_sizes, **how) if experts else jnp.matmul(x, flat, **how)
        return after(z.reshape(m, *columns), x, bias, residual)

    def exact(x, bias, residual, values, scales, w):
        def product(x, number):
            own = w[number] if experts else w
            return jnp.matmul(x, own.reshape(k, -1), precision="highest")

        if experts:
            z = reference.rows_of_groups(product, sizes, x, jnp.arange(experts))
        else:
            z = product(x, 0)
        return after(z.reshape(m, *columns), x, bias, residual)

    of = Grouped(qtype, dtype, tuple(sizes), m, experts, n * len(columns), k) if experts else None
    peers = {"bf16": plain} | ({"xla": by_xla} if of is None or of.fits_xla(k) else {})
    packed_bytes = sum(x.size for x in jax.tree.leaves(example))
    where = f", {experts} experts" if experts else ""
    return Workload(
        suite=suite,
        label=" ".join(filter(None, (label, kind))),
        dtype=dtype,
        shape=f"{m}×{n}×{k}, {qtype}{where}",
        sizes={"m": m, "n": n, "k": k, "bits": bits, "experts": experts},
        operands=operands,
        ours={"fused": fused},
        peers=peers,
        parts={} if experts and kind == "gated" else {"apart": unfused},
        reference=exact,
        tolerance=4 * float(jnp.finfo(element_type).eps),
        flops=2 * m * n * len(columns) * k,
        least_bytes=packed_bytes + 2 * m * (k + n),
        draw=draw,
    )


def _biased(acc, bias, dtype):
    return jax.nn.gelu(acc + bias).astype(dtype)
