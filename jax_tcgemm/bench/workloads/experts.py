"""Workloads of an expert layer other than grouped products alone, which ragged.py has.

The peer is the same expression by XLA.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.workloads.grouped import Computation, Grouped

_PER_TOKEN = 2


def gated(of: Grouped) -> Computation:
    """silu(x W_gate) * (x W_up), of rows as they lie or gathered from half as many."""
    tokens, groups, n, k = of.tokens, of.groups, of.n, of.k
    gathered = of.kind == "gathered_gated"
    rows = tokens // _PER_TOKEN if gathered else tokens
    indices = np.random.default_rng([tokens, groups, 1]).permutation(tokens) // _PER_TOKEN
    indices = np.minimum(indices, rows - 1)

    def by_us(x, weights, sizes, *indices):
        gather_indices = indices[0] if gathered else None
        return jax_tcgemm.gated_ragged_linear(x, weights, sizes, gather_indices=gather_indices)

    def expected(x, weights, _, *indices):
        def product(rows, weights):
            both = jnp.matmul(rows, weights.reshape(k, 2 * n), precision="highest")
            return jax.nn.silu(both[:, :n]) * both[:, n:]

        x = x[indices[0]] if gathered else x
        return reference.rows_of_groups(product, of.group_sizes, x, weights)

    def by_xla(x, weights, sizes, *indices):
        x = x[indices[0]] if gathered else x
        both = lax.ragged_dot(x, weights.reshape(groups, k, 2 * n), sizes)
        return jax.nn.silu(both[:, :n]) * both[:, n:]

    integers = jnp.asarray(of.group_sizes, jnp.int32), jnp.asarray(indices, jnp.int32)
    return Computation(
        shapes=((rows, k), (groups, k, 2, n)),
        integers=integers[: 1 + gathered],
        ours={"gated_ragged_linear": by_us},
        peers={"xla": by_xla} if of.fits_xla(k + 2 * n) else {},
        reference=expected,
        flops=4 * tokens * n * k,
        elements=tokens * (n + k) + of.used * 2 * n * k,
        roundings=4,
    )


def combine(of: Grouped) -> Computation:
    """The weighted sum of k rows for each token, `tokens` in all, and its gradients."""
    tokens, n, degree = of.tokens, of.n, of.k
    targets = tokens // degree
    indices = np.random.default_rng([tokens, n]).permutation(targets * degree)

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

    return Computation(
        shapes=((tokens, n), (targets, n), (targets, degree)),
        integers=(jnp.asarray(indices.reshape(targets, degree), jnp.int32),),
        ours={"combine_rows": functools.partial(run, None)},
        peers={"xla": functools.partial(run, "xla")},
        reference=expected,
        flops=6 * tokens * n,
        # Forward and for weights each row is read, for rows each is written; sums and cotangents.
        elements=(3 * tokens + 3 * targets) * n,
        roundings=4,
    )


KINDS = {"gated": gated, "gathered_gated": gated, "combine": combine}
