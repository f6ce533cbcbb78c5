"""Workloads of grouped products with packed weights: mixtures of experts while decoding.

A group has these keys::

    tokens, groups, n, k     each may be a list
    format, bits, group      of the weights; see `packed_formats`
    alpha                    of the sizes of groups, as of the workload `ragged`
    configs                  of the kernel, to be measured by name, too

`auto` is `ragged_dot` by packed weights, `xla` JAX's by the same weights in x's dtype, dequantized
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
from jax_tcgemm.bench.workload import Workload, check_keys, listed
from jax_tcgemm.bench.workloads.grouped import Grouped
from jax_tcgemm.bench.workloads.packed.formats import WeightFormat, weight_formats
from jax_tcgemm.bench.workloads.ragged import group_sizes


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key, format or number of bits.
    """
    keys, optional = ("tokens", "groups", "n", "k"), ("name", "alpha", "configs")
    check_keys(f"a group of {suite}", group, (*optional, *keys, "format", "bits", "group"))
    for tokens, groups, n, k in itertools.product(*(listed(group[x]) for x in keys)):
        sizes = group_sizes(tokens, groups, group.get("alpha", 4.0))
        for form in weight_formats(group, k):
            of = Grouped(form.name, dtype, sizes, tokens, groups, n, k)
            yield _workload(suite, group.get("name", ""), of, form, group.get("configs", []))


def _workload(suite, label, of: Grouped, form: WeightFormat, configs) -> Workload:
    tokens, groups, n, k, element_type = of.tokens, of.groups, of.n, of.k, of.element_type

    def draw_one(key):
        """An expert's weight: packed, and as an array."""
        w = form.pack(form.draw(key, (k, n), element_type))
        return w, w.dequantize(element_type)

    # One after the other, for what packing takes would not fit beside all of them.
    @jax.jit
    def draw_weights(key):
        return lax.map(draw_one, jax.random.split(key, groups))

    def draw(key):
        of_x, of_w = jax.random.split(key)
        packed, w = draw_weights(of_w)
        x = reference.random(of_x, (tokens, k), element_type)
        return x, w, jnp.asarray(of.group_sizes, jnp.int32), *jax.tree.leaves(packed)

    key = jax.eval_shape(functools.partial(jax.random.key, impl="rbg"), 0)
    example, wide = jax.eval_shape(draw_weights, key)
    leaves, structure = jax.tree.flatten(example)
    operands = (
        jax.ShapeDtypeStruct((tokens, k), element_type),
        wide,
        jax.ShapeDtypeStruct((groups,), jnp.int32),
        *leaves,
    )

    def ours(x, w, sizes, *leaves, **how):
        return jax_tcgemm.ragged_dot(x, jax.tree.unflatten(structure, leaves), sizes, **how)

    def exact(x, w, sizes, *leaves):
        def product(x, group):
            own = jax.tree.unflatten(structure, [x[group] for x in leaves])
            return jnp.matmul(x, own.dequantize(x.dtype), precision="highest")

        return reference.rows_of_groups(product, of.group_sizes, x, jnp.arange(groups))

    peers = {"plain": lambda x, w, sizes, *_: jax_tcgemm.ragged_dot(x, w, sizes)}
    if of.fits_xla(k):
        peers["xla"] = lambda x, w, sizes, *_: lax.ragged_dot(x, w, sizes)
    packed_bytes = sum(x.size for x in leaves)
    return Workload(
        suite=suite,
        label=label,
        dtype=of.dtype,
        shape=f"{tokens}×{n}×{k}, {groups} groups, {of.kind} in groups of {form.group}",
        sizes={
            **{"tokens": tokens, "groups": groups, "n": n, "k": k},
            **{"bits": form.bits, "group": form.group},
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
        kept=tuple(range(1, 3 + len(leaves))),
    )
