"""Workloads of grouped products with packed weights: mixtures of experts while decoding.

A group has these keys::

    tokens, groups, n, k, bits, group    0: scales of whole columns; each may be a list
    alpha                                of the sizes of groups, as of the workload `ragged`
    configs                              of the kernel, to be measured by name, too

`auto` is `ragged_dot` by packed weights, `xla` JAX's by the same weights in x's dtype, dequantised
before, and `plain` ours by those. The least time is that of the bytes: of x, of the packed weights
of groups that have rows, and of the result.
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


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key or number of bits.
    """
    keys = ("tokens", "groups", "n", "k", "bits", "group")
    check_keys(f"a group of {suite}", group, ("name", "alpha", "configs", *keys))
    for tokens, groups, n, k, bits, size in itertools.product(*(listed(group[x]) for x in keys)):
        check_value("bits", bits, (4, 8))
        sizes = group_sizes(tokens, groups, group.get("alpha", 4.0))
        of = Grouped(f"int{bits}", dtype, sizes, tokens, groups, n, k)
        label, configs = group.get("name", ""), group.get("configs", [])
        yield _workload(suite, label, of, bits, size or k, configs)


def _workload(suite, label, of: Grouped, bits: int, size: int, configs) -> Workload:
    tokens, groups, n, k, element_type = of.tokens, of.groups, of.n, of.k, of.element_type

    def draw_one(key):
        """An expert's weight: packed, and as an array."""
        q, scale = reference.random_quantized(key, (k, n), bits, size, element_type)
        w = jax_tcgemm.pack_weights(q, scale, group_size=size, dtype=of.kind)
        return w, w.dequantize(element_type)

    # One after the other, for what packing takes would not fit beside all of them.
    @jax.jit
    def draw_weights(key):
        return lax.map(draw_one, jax.random.split(key, groups))

    def draw(key):
        of_x, of_w = jax.random.split(key)
        weights = jax.tree.leaves(draw_weights(of_w))
        x = reference.random(of_x, (tokens, k), element_type)
        return x, *weights, jnp.asarray(of.group_sizes, jnp.int32)

    key = jax.eval_shape(functools.partial(jax.random.key, impl="rbg"), 0)
    example, wide = jax.eval_shape(draw_weights, key)
    sizes_type = jax.ShapeDtypeStruct((groups,), jnp.int32)
    operands = (
        jax.ShapeDtypeStruct((tokens, k), element_type),
        *jax.tree.leaves(example),
        wide,
        sizes_type,
    )

    def packed_of(values, scales):
        return jax.tree.unflatten(jax.tree.structure(example), (values, scales))

    def ours(x, values, scales, w, sizes, **how):
        return jax_tcgemm.ragged_dot(x, packed_of(values, scales), sizes, **how)

    def exact(x, values, scales, w, sizes):
        def product(x, group):
            own = packed_of(values[group], scales[group])
            return jnp.matmul(x, own.dequantize(x.dtype), precision="highest")

        return reference.rows_of_groups(product, of.group_sizes, x, jnp.arange(groups))

    peers = {"plain": lambda x, values, scales, w, sizes: jax_tcgemm.ragged_dot(x, w, sizes)}
    if of.fits_xla(k):
        peers["xla"] = lambda x, values, scales, w, sizes: lax.ragged_dot(x, w, sizes)
    packed_bytes = sum(x.size for x in jax.tree.leaves(example))
    return Workload(
        suite=suite,
        label=label,
        dtype=of.dtype,
        shape=f"{tokens}×{n}×{k}, {groups} groups, {of.kind} in groups of {size}",
        sizes={
            **{"tokens": tokens, "groups": groups, "n": n, "k": k},
            **{"bits": bits, "group": size},
        },
        operands=operands,
        ours={"auto": ours}
        | {
            config: functools.partial(ours, implementation="packed", config=config)
            for config in configs
        },
        peers=peers,
        reference=exact,
        # The weight is rounded, at most, and the result.
        tolerance=2 * float(jnp.finfo(element_type).eps) + 1e-4,
        flops=2 * tokens * n * k,
        least_bytes=packed_bytes // groups * of.used + 2 * tokens * (k + n),
        draw=draw,
        kept=(1, 2, 3),
    )
