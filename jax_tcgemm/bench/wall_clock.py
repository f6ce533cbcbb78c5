"""Wall-clock times of jitted steps, in turns, and what records hold of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np


def seconds_in_turns(
    functions: Mapping[str, Callable], arrays: Sequence[jax.Array], steps: int, samples: int
) -> dict[str, list[float]]:
    """Return the seconds of a step of each function in each sample.

    Args:
      functions: jitted functions by name; in each sample every one has its turn.
      arrays: their arguments.
      steps: calls in flight in one sample, whose mean is taken.
      samples: samples of each function.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(samples):
        for name, function in functions.items():
            jax.block_until_ready(function(*arrays))
            start = time.perf_counter()
            for _ in range(steps):
                out = function(*arrays)
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def percentiles(seconds: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return p10, p50 and p90 in microseconds, of one sample that sample."""
    deciles = statistics.quantiles(seconds, n=10) if len(seconds) > 1 else [*seconds] * 9
    return {f"p{10 * (i + 1)}": round(deciles[i] * 1e6, digits) for i in (0, 4, 8)}


@jax.jit
def relative_error(got: jax.Array, expected: jax.Array) -> jax.Array:
    """Return |got - expected| / |expected|, by norm in float32."""
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    return jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)
