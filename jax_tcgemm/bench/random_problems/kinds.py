"""Random problems of many kinds, each as a user would write it with and without this library."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jax_tcgemm.bench.random_problems.encodings import ENCODED_PRODUCTS
from jax_tcgemm.bench.random_problems.layers import LAYERS
from jax_tcgemm.bench.random_problems.problem import Problem, Random
from jax_tcgemm.bench.random_problems.products import PRODUCTS

KINDS = {**PRODUCTS, **LAYERS, **ENCODED_PRODUCTS}

# Larger problems are drawn again: the reference is computed on the host.
_MOST_FLOPS, _MOST_BYTES = 6e10, 3e8


def random_problems(count: int, seed: int, kinds: Sequence[str] | None = None) -> list[Problem]:
    """Problems of all kinds in turn.

    Args:
      count: how many.
      seed: the same seed gives the same problems, of which a larger count has more.
      kinds: keys of `KINDS`; None means all.
    """
    names = tuple(KINDS if kinds is None else kinds)
    found = []
    for number in range(count):
        kind = names[number % len(names)]
        for attempt in range(1000):
            problem = KINDS[kind](Random((seed, number, attempt)))
            results = jax.tree.leaves(jax.eval_shape(problem.plain, *problem.operands))
            num_bytes = problem.input_bytes + sum(x.size * x.dtype.itemsize for x in results)
            if problem.flops <= _MOST_FLOPS and num_bytes <= _MOST_BYTES:
                found.append(dataclasses.replace(problem, kind=kind))
                break
    return found
