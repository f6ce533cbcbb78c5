"""Decode steps of tensor-parallel MLPs over several devices: the sum over devices beside XLA's.

    x = sum over devices of silu(x @ up) @ down        a layer; x (rows, model)

up is sharded by columns and down by rows; every device has all of x. A program is a stack of
layers. What is compared, in turns:

    psum         `jax.lax.psum`
    all_reduce   `jax_tcgemm.all_reduce`
    alone        no sum over devices

All products are `jnp.matmul`, so that only the sums differ. Time is that of the wall clock over
several programs in flight, divided by the number of layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm
from jax_tcgemm.bench import records as rec
from jax_tcgemm.bench.wall_clock import percentiles, relative_error, seconds_in_turns

AXIS = "model"
HEAD = ["rows", "KB summed", "psum", "all_reduce", "alone", "psum / all_reduce", "of the sums"]
# Largest accepted |result - psum's| / |psum's|, by norm, of 16-bit addends.
_TOLERANCE = 0.02


def measure(
    devices: int,
    rows: Sequence[int] = (1, 4, 16, 64, 256, 512),
    model: int = 8192,
    hidden: int = 28672,
    *,
    layers: int = 6,
    steps: int = 20,
    samples: int = 9,
    revision: str | None = None,
) -> list[dict]:
    """Measure programs of each number of rows.

    Args:
      devices: number of devices, the first ones.
      rows: numbers of rows of x.
      model: columns of x.
      hidden: columns of up, over all devices.
      layers: layers of a program.
      steps: programs in flight in one sample.
      samples: samples of each contender.
      revision: recorded as the source revision; None reads it from git.

    Returns:
      A record for each number of rows: ``us`` maps contenders to microseconds of a layer.

    Raises:
      ValueError: if there are not so many devices, hidden is no multiple of devices, or results
        differ from those with `psum`.
    """
    if not 2 <= devices <= len(jax.devices()) or hidden % devices:
        raise ValueError(
            f"bench: devices must be from 2 to {len(jax.devices())} here and divide hidden, got "
            f"{devices=} and {hidden=}; name as many as take part"
        )
    mesh = jax.make_mesh(
        (devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    weights = _weights(mesh, layers, model, hidden)
    sums = {
        "psum": lambda y: lax.psum(y, AXIS),
        "all_reduce": lambda y: jax_tcgemm.all_reduce(y, AXIS),
        "alone": lambda y: y,
    }
    return [
        {
            "schema": rec.SCHEMA,
            "kind": "decode",
            "time": rec.now(),
            "revision": revision or rec.git_revision(),
            "devices": devices,
            "rows": count,
            "model": model,
            "hidden": hidden,
            "dtype": "bfloat16",
            "layers": layers,
            "samples": samples,
            "steps": steps,
            "us": _microseconds(mesh, sums, count, weights, steps, samples),
            "machine": rec.machine(),
        }
        for count in rows
    ]


def _weights(mesh, layers: int, model: int, hidden: int) -> tuple[jax.Array, jax.Array]:
    def drawn(seed, shape, spec):
        def draw(key):
            return jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5

        return jax.jit(draw, out_shardings=NamedSharding(mesh, spec))(jax.random.key(seed))

    return (
        drawn(0, (layers, model, hidden), P(None, None, AXIS)),
        drawn(1, (layers, hidden, model), P(None, AXIS)),
    )


def _stack(sum_over_devices: Callable, x, up, down):
    for layer in range(up.shape[0]):
        y = sum_over_devices(jax.nn.silu(x @ up[layer]) @ down[layer])
        x = x + y
    return x


def _microseconds(mesh, sums, rows: int, weights, steps: int, samples: int) -> dict[str, dict]:
    x = jax.random.normal(jax.random.key(2), (rows, weights[0].shape[1]), jnp.bfloat16)
    specs = {"in_specs": (P(), P(None, None, AXIS), P(None, AXIS)), "out_specs": P()}
    functions = {
        name: jax.jit(
            jax.shard_map(functools.partial(_stack, f), mesh=mesh, **specs, check_vma=False)
        )
        for name, f in sums.items()
    }
    got, expected = (functions[name](x, *weights) for name in ("all_reduce", "psum"))
    error = float(relative_error(got, expected))
    if not error <= _TOLERANCE:
        raise ValueError(f"bench: all_reduce gives other results than psum, by {error=}")
    layers = weights[0].shape[0]
    return {
        name: percentiles([program / layers for program in seconds], digits=2)
        for name, seconds in seconds_in_turns(functions, (x, *weights), steps, samples).items()
    }


def times(record: dict) -> dict[str, float]:
    """Return the median microseconds of each contender."""
    return {name: us["p50"] for name, us in record["us"].items()}


def row(record: dict) -> list[str]:
    """Return a table's row: see HEAD; times in microseconds of a layer."""
    us = times(record)
    sums = [us[name] - us["alone"] for name in ("psum", "all_reduce")]
    return [
        str(record["rows"]),
        f"{record['rows'] * record['model'] * 2 / 1024:g}",
        *(f"{us[name]:.1f}" for name in ("psum", "all_reduce", "alone")),
        f"{us['psum'] / us['all_reduce']:.3f}",
        f"{sums[0]:.1f} / {sums[1]:.1f}",
    ]
