"""Workloads of training steps of experts' feed-forward blocks, in 8 bits.

A group has these keys, each of which may be a list::

    tokens, groups, k, j      k: width of the model, j: of the hidden layer
    alpha                     as of the suites of grouped products

`current` and `block128` are the result and all gradients of `Fp8RaggedMlp` of those recipes, for
arrays of bfloat16. Peers are the same blocks in bfloat16: `layers`, of `gated_ragged_linear` and
`ragged_dot`, and `xla`, of `lax.ragged_dot`, where its masks fit the memory.
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
from jax_tcgemm.bench.reference import random
from jax_tcgemm.bench.workload import Workload, check_keys, listed
from jax_tcgemm.bench.workloads.grouped import Grouped
from jax_tcgemm.bench.workloads.ragged import group_sizes

_KEYS = ("tokens", "groups", "k", "j")
_RECIPES = ("current", "block128")


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown key.
    """
    check_keys(f"a group of {suite}", group, ("name", "alpha", *_KEYS))
    for tokens, groups, k, j in itertools.product(*(listed(group[key]) for key in _KEYS)):
        sizes = group_sizes(tokens, groups, group.get("alpha", 4.0))
        of = Grouped("experts", dtype, sizes, tokens, groups, j, k)
        yield _workload(suite, group.get("name", ""), of)


def _in_8_bits(recipe, x, up, down, sizes):
    block = jax_tcgemm.Fp8RaggedMlp(recipe)
    return block(x, {"up": up, "down": down}, sizes, activation="silu")


def _layers(x, up, down, sizes):
    return jax_tcgemm.ragged_dot(jax_tcgemm.gated_ragged_linear(x, up, sizes), down, sizes)


def _xla(x, up, down, sizes, product=lax.ragged_dot):
    gate, up = (product(x, own, sizes) for own in (up[:, :, 0], up[:, :, 1]))
    return product(jax.nn.silu(gate) * up, down, sizes)


def _reference(group_sizes, x, up, down, sizes, g):
    """Each expert's rows by themselves: a loop would keep all results for each turn."""

    def product(rows, matrices, sizes):
        own = zip(jnp.split(rows, np.cumsum(group_sizes)[:-1]), matrices, strict=True)
        return jnp.concatenate([jnp.matmul(x, w, precision="highest") for x, w in own])

    return _step(functools.partial(_xla, product=product), x, up, down, sizes, g)


def _step(f, x, up, down, sizes, g):
    out, pullback = jax.vjp(lambda *moving: f(*moving, sizes), x, up, down)
    return out, *pullback(g)


def _workload(suite: str, label: str, of: Grouped) -> Workload:
    tokens, groups, k, j = of.tokens, of.groups, of.k, of.n
    shapes = (tokens, k), (groups, k, 2, j), (groups, j, k)
    like = [jax.ShapeDtypeStruct(shape, of.element_type) for shape in (*shapes, (tokens, k))]
    operands = (*like[:3], jax.ShapeDtypeStruct((groups,), jnp.int32), like[3])

    def draw(key):
        x, up, down, g = (
            random(own, x.shape, x.dtype)
            for own, x in zip(jax.random.split(key, 4), like, strict=True)
        )
        # So that what lies between the products is of size 1.
        up, down = (w * jnp.asarray(w.shape[1] ** -0.5, w.dtype) for w in (up, down))
        return x, up, down, jnp.asarray(of.group_sizes, jnp.int32), g

    peers = {"layers": _layers} | ({"xla": _xla} if of.fits_xla(2 * (3 * j + k)) else {})
    itemsize = jnp.dtype(of.element_type).itemsize
    return Workload(
        suite=suite,
        label=label,
        dtype=of.dtype,
        shape=f"{tokens}×{k}, {groups} experts of {j}",
        sizes={"tokens": tokens, "groups": groups, "k": k, "j": j},
        operands=operands,
        ours={
            recipe: functools.partial(_step, functools.partial(_in_8_bits, recipe))
            for recipe in _RECIPES
        },
        peers={name: functools.partial(_step, f) for name, f in peers.items()},
        reference=functools.partial(_reference, of.group_sizes),
        # Relative to the largest accumulator, of products of numbers with 4 bits of mantissa.
        tolerance=0.1,
        flops=2 * 3 * 3 * tokens * k * j,
        least_bytes=itemsize * (4 * tokens * k + 2 * 3 * of.used * k * j),
        draw=draw,
    )
