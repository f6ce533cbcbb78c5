"""A tensor-parallel MLP over several devices, forward and backward, beside XLA's.

    y = silu(x @ up) @ down        x, y (tokens, model), up (model, hidden), down (hidden, model)

up is divided by columns and down by rows; x and y are divided by tokens, as between layers that are
parallel in the sequence. So a step gathers x and scatters y, and the other way round backward. Its
results are y and the gradients of x, up and down for a given gradient of y.

What is compared, every one jitted once:

    xla                      jnp.matmul, jit and NamedShardings, XLA's defaults
    xla_overlap              with XLA's latency-hiding scheduler and its collective matmuls
    sharded                  `jax_tcgemm.matmul` in xla's place, XLA's defaults
    collective               `all_gather_matmul` and `matmul_reduce_scatter`, XLA's defaults
    collective_scheduler     with XLA's latency-hiding scheduler
    collective_ce            with transfers by copy engines, which leave every multiprocessor to the
                             products
    collective_scheduler_ce  with both
    alone                    products and activations without any exchange: what no overlap can beat

Time is that of the wall clock over many steps in flight, taken in turns.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm
from jax_tcgemm.bench import records as rec
from jax_tcgemm.bench.wall_clock import percentiles, relative_error, seconds_in_turns

AXIS = "model"
PEERS = ("xla", "xla_overlap")

# Options of `jax.jit(..., compiler_options=...)`; as XLA_FLAGS each is `--NAME=VALUE`.
_SCHEDULER = {"xla_gpu_enable_latency_hiding_scheduler": True}
_COPY_ENGINES = {"xla_gpu_use_memcpy_local_p2p": True}
XLA_COLLECTIVE_MATMUL = _SCHEDULER | {"xla_gpu_threshold_for_windowed_einsum_mib": 0}
OPTIONS = {
    "": {},
    "_scheduler": _SCHEDULER,
    "_ce": _COPY_ENGINES,
    "_scheduler_ce": _SCHEDULER | _COPY_ENGINES,
}
# Largest accepted |result - xla's| / |xla's|, by norm, of 16-bit addends summed in another order.
_TOLERANCE = 0.02


def measure(
    devices: int,
    tokens: int = 8192,
    model: int = 8192,
    hidden: int = 28672,
    *,
    dtype: str = "bfloat16",
    chunks: Sequence[int | None] = (None,),
    implementation: str | None = None,
    steps: int = 10,
    samples: int = 10,
    revision: str | None = None,
) -> dict:
    """Times one step of the layer in every way.

    Args:
      devices: how many devices, the first ones.
      tokens: rows of x, over all devices.
      model: columns of x.
      hidden: columns of up, over all devices.
      dtype: dtype of all arrays.
      chunks: values of the argument `chunks` of the collective products to try.
      implementation: forces one of ours; None lets the library choose.
      steps: steps in flight in one sample.
      samples: samples of each contender.
      revision: recorded as the source revision; None reads it from git.

    Returns:
      A record: ``contenders`` maps each name to microseconds of a step (p10, p50, p90), compiler
      options, TFLOP/s of one device, and the largest relative error beside `xla` by norm; or to
      the options and the message of what ``failed``.

    Raises:
      ValueError: when there are not so many devices, for tokens or hidden columns that they cannot
        share, another dtype, or results that differ from XLA's.
    """
    if not 1 <= devices <= len(jax.devices()):
        raise ValueError(
            f"bench: devices must be from 1 to {len(jax.devices())} here, got {devices=}; "
            "name as many as take part"
        )
    if tokens % devices or hidden % devices:
        raise ValueError(
            f"bench: tokens and hidden must be multiples of devices, got {tokens=}, {hidden=} and "
            f"{devices=}; each device gets as many"
        )
    if not _is_floating(dtype):
        raise ValueError(
            f"bench: dtype must be a floating-point dtype, got {dtype=}; bfloat16 is the default"
        )
    mesh = jax.make_mesh(
        (devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    arrays = _arrays(mesh, tokens, model, hidden, dtype)
    found, functions = _checked(_contenders(mesh, chunks, implementation), arrays)
    flops = 3 * 2 * 2 * tokens * model * hidden / devices
    for name, seconds in seconds_in_turns(functions, arrays, steps, samples).items():
        found[name]["us"] = percentiles(seconds, digits=1)
        found[name]["tflops"] = round(flops / statistics.median(seconds) / 1e12, 1)
    return {
        "schema": rec.SCHEMA,
        "kind": "parallel",
        "time": rec.now(),
        "revision": revision or rec.git_revision(),
        "devices": devices,
        "tokens": tokens,
        "model": model,
        "hidden": hidden,
        "dtype": dtype,
        "implementation": implementation or "auto",
        "samples": samples,
        "steps": steps,
        "contenders": found,
        "machine": rec.machine(),
    }


def _checked(contenders: dict, arrays) -> tuple[dict, dict]:
    """Check all contenders; return their record fields except times, and those that run."""
    found, functions, expected = {}, {}, None
    for name, (function, options) in contenders.items():
        found[name] = {"options": options}
        try:
            got = jax.block_until_ready(function(*arrays))
        except jax.errors.JaxRuntimeError as error:
            found[name]["failed"] = str(error)
            continue
        functions[name] = function
        if name == "alone":
            continue
        expected = expected or got
        errors = [float(relative_error(g, e)) for g, e in zip(got, expected, strict=True)]
        found[name]["error"] = max(errors)
        if not max(errors) <= _TOLERANCE:
            raise ValueError(f"bench: {name} gives other results than xla, by {errors}")
    return found, functions


def _is_floating(dtype: str) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        return False


def _arrays(mesh: Mesh, tokens: int, model: int, hidden: int, dtype: str) -> list[jax.Array]:
    """X, up, down and the gradient of y, each divided as the layer wants it."""
    shapes = (tokens, model), (model, hidden), (hidden, model), (tokens, model)
    specs = P(AXIS), P(None, AXIS), P(AXIS), P(AXIS)
    scales = 1.0, model**-0.5, hidden**-0.5, 1.0
    return [
        jax.jit(
            lambda key, shape=shape, scale=scale: scale * jax.random.normal(key, shape, dtype),
            out_shardings=NamedSharding(mesh, spec),
        )(jax.random.key(i))
        for i, (shape, spec, scale) in enumerate(zip(shapes, specs, scales, strict=True))
    ]


def _contenders(mesh: Mesh, chunks, implementation) -> dict[str, tuple[Callable, dict]]:
    """A jitted step of each contender, and its compiler options."""
    matmul = functools.partial(jax_tcgemm.matmul, implementation=implementation)
    found = {
        "xla": (_by_shardings(mesh, jnp.matmul), {}),
        "xla_overlap": (_by_shardings(mesh, jnp.matmul), XLA_COLLECTIVE_MATMUL),
        "sharded": (_by_shardings(mesh, matmul), {}),
    }
    for count in chunks:
        suffix = "" if count is None else f"/{count}"
        how = {"axis_name": AXIS, "chunks": count, "implementation": implementation}
        layer = _by_shard_map(
            mesh,
            functools.partial(jax_tcgemm.all_gather_matmul, **how),
            functools.partial(jax_tcgemm.matmul_reduce_scatter, **how),
        )
        for name, options in OPTIONS.items():
            found[f"collective{name}{suffix}"] = (layer, options)
    found["alone"] = (_without_exchange(mesh, matmul), {})
    specs = P(AXIS), P(AXIS), P(None, AXIS), P(AXIS)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    return {
        name: (
            jax.jit(_step(layer), out_shardings=shardings, compiler_options=options),
            options,
        )
        for name, (layer, options) in found.items()
    }


def _step(layer: Callable) -> Callable:
    """A function of x, up, down and the gradient of y: forward and backward."""

    def step(x, up, down, y_bar):
        y, backward = jax.vjp(layer, x, up, down)
        return y, *backward(y_bar)

    return step


def _by_shardings(mesh: Mesh, matmul: Callable) -> Callable:
    def layer(x, up, down):
        y = matmul(jax.nn.silu(matmul(x, up)), down)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(AXIS)))

    return layer


def _by_shard_map(mesh: Mesh, gather_matmul: Callable, matmul_scatter: Callable) -> Callable:
    return jax.shard_map(
        lambda x, up, down: matmul_scatter(jax.nn.silu(gather_matmul(x, up)), down),
        mesh=mesh,
        in_specs=(P(AXIS), P(None, AXIS), P(AXIS)),
        out_specs=P(AXIS),
    )


def _without_exchange(mesh: Mesh, matmul: Callable) -> Callable:
    """Each device does its products on rows that stand for those it would have gathered.

    The rows that other devices would have sent or received are its own ones, both forward and
    backward: with zeros in their place a GPU takes less power, and runs at a higher clock.
    """
    size = mesh.shape[AXIS]

    def summed(h, down):
        y = matmul(h, down)
        return jnp.sum(y.reshape(size, -1, y.shape[-1]), 0, dtype=np.float32).astype(y.dtype)

    return _by_shard_map(mesh, lambda x, up: matmul(jnp.concatenate([x] * size), up), summed)


def ratios(record: dict) -> dict[str, list[float | None]]:
    """For each of ours, the time of each peer over its own; None where that failed."""
    us = {n: e["us"]["p50"] for n, e in record["contenders"].items() if "us" in e}
    return {
        name: [us[peer] / us[name] if peer in us else None for peer in PEERS]
        for name in us
        if name not in PEERS
    }


def rows(record: dict) -> list[list[str]]:
    """A table's rows: name, milliseconds, TFLOP/s of a device, and the two ratios."""
    against = ratios(record)
    found = []
    for name, entry in record["contenders"].items():
        if "us" not in entry:
            found.append([name, "failed", "", "", ""])
            continue
        ms, tflops = f"{entry['us']['p50'] / 1e3:.3f}", str(entry["tflops"])
        found.append([name, ms, tflops, *(_text(r) for r in against.get(name, [None, None]))])
    return found


HEAD = ["", "ms a step", "TFLOP/s a device", "xla / it", "xla_overlap / it"]


def _text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"
