"""Host cost of a call: how long enqueuing a jitted step takes, ours beside ``lax.dot_general``.

The products are so small that the device is never waited for. A step of one product shows the
cost of a call, a step of a chain of them what each further call adds (on a GPU, XLA records
long steps as CUDA graphs, and so are ours).
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import records as rec
from jax_tcgemm.bench.wall_clock import percentiles

SIZE = 128
CHAINS = (1, 20)
# Steps enqueued before the device is waited for; fewer than the 32 that JAX keeps in flight.
_STEPS = 20
_DIMENSION_NUMBERS = (((1,), (0,)), ((), ()))


def measure_overhead(
    samples: int = 100, implementation: str | None = None, revision: str | None = None
) -> list[dict]:
    """Times steps of one and of many products, ours and XLA's in turns.

    Args:
      samples: measurements of each, every one the mean of 20 steps.
      implementation: forces one of ours; None lets the library choose.
      revision: recorded as the source revision; None reads it from git.

    Returns:
      One record for each chain length: ``us`` and ``xla_us`` are host microseconds of a step
      (p10, p50, p90), ``overhead_us`` the difference of the medians for one call.
    """
    a = jnp.eye(SIZE, dtype=jnp.bfloat16)
    ours = functools.partial(jax_tcgemm.dot_general, implementation=implementation)
    contenders = {"us": ours, "xla_us": lax.dot_general}
    (call,) = jax_tcgemm.explain(functools.partial(_chain, ours, 1), a, a)
    machine = rec.machine()
    found = []
    for length in CHAINS:
        steps = {
            name: jax.jit(functools.partial(_chain, product, length))
            for name, product in contenders.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for sample in range(samples + 5):
            for name, step in steps.items():
                jax.block_until_ready(step(a, a))
                start = time.perf_counter()
                for _ in range(_STEPS):
                    out = step(a, a)
                elapsed = (time.perf_counter() - start) / _STEPS
                jax.block_until_ready(out)
                if sample >= 5:  # The first ones compile and settle.
                    seconds[name].append(elapsed)
        us = {name: percentiles(values) for name, values in seconds.items()}
        found.append(
            {
                "schema": rec.SCHEMA,
                "kind": "overhead",
                "time": rec.now(),
                "revision": revision or rec.git_revision(),
                "size": SIZE,
                "ran": call.implementation,
                "config": call.config,
                "calls_per_step": length,
                **us,
                "overhead_us": round((us["us"]["p50"] - us["xla_us"]["p50"]) / length, 3),
                "samples": samples,
                "machine": machine,
            }
        )
    return found


def _chain(product, length: int, a, b):
    for _ in range(length):
        a = product(a, b, _DIMENSION_NUMBERS)
    return a
