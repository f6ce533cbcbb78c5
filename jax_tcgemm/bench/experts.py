"""Workloads of what an expert layer does besides bare grouped products; see bench/ragged.py.

Gated products are run by default, which on a GPU is XLA's work around our bare grouped product, and
on Hopper by the kernel that must be asked for by name. The peer is the same expression by XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.workload import Workload
from jax_tcgemm.selection import target_device

KINDS = ("gated", "gathered_gated", "combine")
_PER_TOKEN = 2
# Not selected before it has been measured.
_FUSED = "256x128x64_c1x2x1_co_t"

# XLA multiplies masked copies of all rows for every group; where larger, it is not asked to.
XLA_LIMIT_BYTES = 2e10


def workload(suite, label, dtype, element_type, kind, sizes, tokens, groups, n, k) -> Workload:
    """One of KINDS: `tokens` rows, `sizes` of them for each group."""
    build = _combine if kind == "combine" else _gated
    itemsize = jnp.dtype(element_type).itemsize
    return Workload(
        suite=suite,
        label=label,
        dtype=dtype,
        shape=f"{tokens}×{n}×{k}, {groups} groups",
        sizes={"tokens": tokens, "groups": groups, "n": n, "k": k},
        tolerance=4 * float(jnp.finfo(element_type).eps) + 2.0**-9 * (itemsize == 4) + 1e-4,
        **build(kind, element_type, sizes, tokens, groups, n, k),
    )


def _gated(kind, element_type, sizes, tokens, groups, n, k) -> dict:
    """silu(x W_gate) * (x W_up), of rows as they lie or gathered from half as many."""
    gathered = kind == "gathered_gated"
    rows = tokens // _PER_TOKEN if gathered else tokens
    indices = np.random.default_rng([tokens, groups, 1]).permutation(tokens) // _PER_TOKEN
    indices = np.minimum(indices, rows - 1)
    ours: dict[str, Callable] = {"gated_ragged_linear": _run_gated(gathered)}
    if jax.default_backend() == "gpu" and target_device("cuda").compute_capability == 90:
        ours[_FUSED] = _run_gated(gathered, "wgmma", _FUSED)
    shapes = [(rows, k), (groups, k, 2, n)]
    integers = [jnp.asarray(sizes, jnp.int32), jnp.asarray(indices, jnp.int32)][: 1 + gathered]

    def draw(key):
        for each, shape in zip(jax.random.split(key, 2), shapes, strict=True):
            yield reference.random(each, shape, jnp.dtype(element_type))
        yield from integers

    def expected(x, weights, _, *indices):
        def product(rows, weights):
            both = jnp.matmul(rows, weights.reshape(k, 2 * n), precision="highest")
            return jax.nn.silu(both[:, :n]) * both[:, n:]

        x = x[indices[0]] if gathered else x
        return reference.rows_of_groups(product, sizes, x, weights)

    def by_xla(x, weights, sizes, *indices):
        x = x[indices[0]] if gathered else x
        both = lax.ragged_dot(x, weights.reshape(groups, k, 2 * n), sizes)
        return jax.nn.silu(both[:, :n]) * both[:, n:]

    used = int(np.count_nonzero(sizes))
    masked = tokens * (k + 2 * n) * groups * jnp.dtype(element_type).itemsize
    return {
        "operands": (
            *(jax.ShapeDtypeStruct(shape, element_type) for shape in shapes),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in integers),
        ),
        "draw": draw,
        "ours": ours,
        "peers": {"xla": by_xla} if masked <= XLA_LIMIT_BYTES else {},
        "reference": expected,
        "flops": 4 * tokens * n * k,
        "bytes": (tokens * (n + k) + used * 2 * n * k) * jnp.dtype(element_type).itemsize,
    }


def _run_gated(gathered, implementation=None, config=None) -> Callable:
    def run(x, weights, sizes, *indices):
        return jax_tcgemm.gated_ragged_linear(
            x,
            weights,
            sizes,
            gather_indices=indices[0] if gathered else None,
            implementation=implementation,
            config=config,
        )

    return run


def _combine(kind, element_type, sizes, tokens, groups, n, k) -> dict:
    """The weighted sum of k rows for each token, `tokens` in all, and its gradients."""
    del kind, sizes, groups
    targets, degree = tokens // k, k
    indices = np.random.default_rng([tokens, n]).permutation(targets * degree)
    indices = jnp.asarray(indices.reshape(targets, degree), jnp.int32)

    def draw(key):
        for each, shape in zip(
            jax.random.split(key, 3), ((tokens, n), (targets, n), (targets, degree)), strict=True
        ):
            yield reference.random(each, shape, jnp.dtype(element_type))
        yield indices

    def run(implementation, rows, ct, weights, indices):
        f = functools.partial(
            jax_tcgemm.combine_rows, unique_indices=True, implementation=implementation
        )
        out, vjp = jax.vjp(lambda rows, weights: f(rows, indices, weights), rows, weights)
        return out, *vjp(ct)

    def expected(rows, ct, weights, indices):
        taken = rows[indices]
        product = functools.partial(jnp.einsum, precision="highest")
        rows_bar = jnp.zeros_like(rows).at[indices].set(weights[..., None] * ct[:, None])
        return product("tj,tjn->tn", weights, taken), rows_bar, product("tjn,tn->tj", taken, ct)

    shapes = [(tokens, n), (targets, n), (targets, degree)]
    itemsize = jnp.dtype(element_type).itemsize
    return {
        "operands": (
            *(jax.ShapeDtypeStruct(shape, element_type) for shape in shapes),
            jax.ShapeDtypeStruct(indices.shape, indices.dtype),
        ),
        "draw": draw,
        "ours": {"combine_rows": functools.partial(run, None)},
        "peers": {"xla": functools.partial(run, "xla")},
        "reference": expected,
        "flops": 6 * tokens * n,
        # Forward and for weights each row is read, for rows each is written; sums and cotangents.
        "bytes": (3 * tokens + 3 * targets) * n * itemsize,
    }
