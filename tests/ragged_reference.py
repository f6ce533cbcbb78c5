"""Grouped products in float64, one group after the other: the reference for ragged_dot."""

import numpy as np


def bounds(sizes, tokens: int, offset: int = 0, groups: int | None = None) -> list[tuple[int, int]]:
    """First row and end of each group computed, as csrc/core/ragged_problem.h defines them."""
    sizes = np.maximum(np.asarray(sizes, np.int64), 0)
    ends = np.minimum(np.cumsum(sizes), tokens)
    starts = np.concatenate([[0], ends[:-1]])
    every = list(zip(map(int, starts), map(int, ends), strict=True))
    groups = len(sizes) if groups is None else groups
    last = int(ends[-1]) if len(ends) else 0
    return [(every[i] if i < len(every) else (last, last)) for i in range(offset, offset + groups)]


def random_sizes(rng) -> tuple[list[int], int]:
    """Sizes of up to 39 groups, most of them small, and the number of rows, a tenth of no group."""
    groups, tokens = int(rng.integers(1, 40)), int(rng.integers(1, 3000))
    sizes = rng.multinomial(tokens * 9 // 10, rng.dirichlet(np.full(groups, 0.5)))
    return sizes.tolist(), tokens


def rows(lhs, rhs, sizes, offset: int = 0) -> np.ndarray:
    """out[i] = lhs[i] @ rhs[g] for the rows i of group g, else 0."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for g, (begin, end) in enumerate(bounds(sizes, lhs.shape[0], offset, rhs.shape[0])):
        out[begin:end] = lhs[begin:end] @ rhs[g]
    return out


def contraction(lhs, rhs, sizes, offset: int = 0, groups: int | None = None) -> np.ndarray:
    """out[g] = lhs[rows of g].T @ rhs[rows of g]."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    limits = bounds(sizes, lhs.shape[0], offset, groups)
    return np.stack([lhs[begin:end].T @ rhs[begin:end] for begin, end in limits])
