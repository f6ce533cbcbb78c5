"""How bits of rows are compared: among few rows, and among many."""

import jax
import numpy as np


def bits(x):
    return np.asarray(x).view(np.uint8)


def rows_that_differ(f, x, *rest, rows):
    """For which numbers of rows the first ones are not what they are among all."""
    f, x = jax.jit(f), np.asarray(x)
    among_all = jax.device_get(jax.tree.leaves(f(x, *rest)))
    return [
        m
        for m in rows
        if any(
            not np.array_equal(bits(few), bits(many[:m]))
            for few, many in zip(jax.tree.leaves(f(x[:m], *rest)), among_all, strict=True)
        )
    ]
