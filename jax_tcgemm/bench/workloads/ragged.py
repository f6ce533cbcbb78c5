"""Workloads of grouped products, as mixtures of experts have them.

A group of a suite says `tokens`, `groups`, n, k, any of which may be a list, and `kind`:

    forward       tokens (tokens, k), experts (groups, k, n)
    lhs_gradient  the gradient of the tokens of that, read through the transposed experts
    rhs_gradient  that of the experts, which sums over the rows of each group
    gated         gated_ragged_linear: tokens (tokens, k), experts (groups, k, 2, n)
    gathered_gated  the same of rows gathered from half as many tokens
    combine       combine_rows and its gradients: the sums of k of the rows (tokens, n) each

Sizes of groups are drawn from a Dirichlet distribution (its parameter `alpha`, 4 unless given; 0
makes all equal), the same for every run. The peers are XLA's, where the mask that it multiplies by
fits the memory, and Pallas's kernel at several of its block sizes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import reference
from jax_tcgemm.bench.workload import Workload, check_keys, check_value, listed
from jax_tcgemm.bench.workloads import experts
from jax_tcgemm.bench.workloads.grouped import Computation, Grouped, workload

_KINDS = ("forward", "lhs_gradient", "rhs_gradient")
_KEYS = ("tokens", "groups", "n", "k")

_TRANSPOSED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def workloads(suite: str, group: dict, dtype: str) -> Iterable[Workload]:
    """The workloads of one group; see the module's documentation.

    Raises:
      ValueError: for an unknown kind or key.
    """
    check_keys(f"a group of {suite}", group, ("name", "kind", "alpha", *_KEYS))
    kinds = dict.fromkeys(_KINDS, _product) | experts.KINDS
    for kind in listed(group.get("kind", "forward")):
        check_value("kind", kind, kinds)
        for tokens, groups, n, k in itertools.product(*(listed(group[key]) for key in _KEYS)):
            sizes = group_sizes(tokens, groups, group.get("alpha", 4.0))
            of = Grouped(kind, dtype, sizes, tokens, groups, n, k)
            label = f"{group.get('name', '')} {kind.replace('_', ' ')}".strip()
            yield workload(suite, label, of, kinds[kind](of))


def group_sizes(tokens: int, groups: int, alpha: float) -> np.ndarray:
    """Rows of each group, the same for every run."""
    rng = np.random.default_rng([tokens, groups])
    shares = rng.dirichlet(np.full(groups, alpha)) if alpha else np.full(groups, 1 / groups)
    return rng.multinomial(tokens, shares) if alpha else _equal(tokens, groups)


def _equal(tokens: int, groups: int) -> np.ndarray:
    ends = np.arange(1, groups + 1) * tokens // groups
    return np.diff(ends, prepend=0)


def _product(of: Grouped) -> Computation:
    """A bare product or a gradient of it."""
    tokens, groups, n, k, kind = of.tokens, of.groups, of.n, of.k, of.kind
    shapes = {
        "forward": ((tokens, k), (groups, k, n)),
        "lhs_gradient": ((tokens, n), (groups, k, n)),
        "rhs_gradient": ((tokens, k), (tokens, n)),
    }[kind]
    peers: dict[str, Callable] = {}
    if of.fits_xla(sum(shape[-1] for shape in shapes if len(shape) == 2)):
        peers["xla"] = _function(lax, of)
    if of.element_type.itemsize == 2 and kind != "rhs_gradient":
        peers |= _pallas(kind, n if kind == "forward" else k, k if kind == "forward" else n)
    return Computation(
        shapes=shapes,
        integers=(jnp.asarray(of.group_sizes, jnp.int32),),
        ours={"ragged_dot": _function(jax_tcgemm, of)},
        peers=peers,
        reference=functools.partial(_reference, kind, of.group_sizes),
        flops=2 * tokens * n * k,
        elements=tokens * (n + k) + (groups if kind == "rhs_gradient" else of.used) * n * k,
        roundings=2,
    )


def _function(library, of: Grouped) -> Callable:
    if of.kind == "forward":
        return functools.partial(library.ragged_dot, precision=of.precision)
    numbers = _TRANSPOSED if of.kind == "lhs_gradient" else _CONTRACTION
    return functools.partial(
        library.ragged_dot_general, ragged_dot_dimension_numbers=numbers, precision=of.precision
    )


def _pallas(kind: str, columns: int, depth: int) -> dict[str, Callable]:
    """Pallas's kernel for Hopper, at each of a few block sizes that divide the columns."""
    if depth % 64 or jax.default_backend() != "gpu":
        return {}
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    def run(block_m, block_n, steps, grid_n):
        def function(lhs, rhs, sizes):
            return ragged_dot_mgpu.ragged_dot(
                lhs,
                rhs,
                group_sizes=sizes,
                block_m=block_m,
                block_n=block_n,
                block_k=64,
                max_concurrent_steps=steps,
                grid_block_n=grid_n,
                transpose_rhs=kind == "lhs_gradient",
            )

        return function

    blocks = [(64, 128, 6, 8), (128, 128, 5, 8), (128, 192, 4, 4), (192, 128, 4, 8)]
    return {
        f"pallas_{m}x{n}_s{steps}": run(m, n, steps, grid_n)
        for m, n, steps, wanted in blocks
        if columns % n == 0
        for grid_n in [next(g for g in (wanted, 4, 2, 1) if columns % (g * n) == 0)]
    }


def _reference(kind: str, sizes: np.ndarray, x, y, _):
    product = functools.partial(jnp.matmul, precision="highest")
    if kind == "forward":
        return reference.rows_of_groups(product, sizes, x, y)
    if kind == "lhs_gradient":
        return reference.rows_of_groups(lambda x, y: product(x, y.T), sizes, x, y)
    return reference.sums_of_groups(lambda x, y: product(x.T, y), sizes, x, y)
