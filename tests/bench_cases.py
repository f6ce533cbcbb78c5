"""Cases, workloads and records for the tests of the benchmark."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tcgemm
from jax_tcgemm.bench import records, reference
from jax_tcgemm.bench.suites import Case
from jax_tcgemm.bench.workload import Workload


def make_case(**changes) -> Case:
    fields = {"suite": "test", "label": "", "batch": 1, "m": 24, "n": 40, "k": 56}
    return Case(**(fields | {"dtype": "f32", "layout": "NN"} | changes))


def make_workload(**changes) -> Workload:
    """x w and its transpose, by ours and in two ways more."""

    def both(product):
        def function(x, w, shift):
            return product(x, w) + shift.astype(x.dtype), product(x, w).T

        return function

    fields = {
        "suite": "smoke",
        "label": "both",
        "dtype": "bf16",
        "shape": "8×12×16",
        "sizes": {"m": 8},
        "operands": (
            jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
            jax.ShapeDtypeStruct((16, 12), jnp.bfloat16),
            jax.ShapeDtypeStruct((), jnp.int8),
        ),
        "ours": {"ours": both(functools.partial(jax_tcgemm.matmul, implementation="host"))},
        "peers": {"jnp": both(jnp.matmul), "nn": both(lambda x, w: lax.dot(x, w))},
        "reference": both(lambda x, w: jnp.matmul(x, w, precision="highest")),
        "tolerance": 0.01,
        "flops": 4 * 8 * 12 * 16,
    }
    return Workload(**fields | changes)


def make_record(implementation="mma_sync", peer_us=10.0, us=20.0, **changes):
    record = {
        "schema": records.SCHEMA,
        "kind": "product",
        "time": "2026-01-01T00:00:00+00:00",
        "suite": "squares",
        "label": "",
        "batch": 1,
        "m": 512,
        "n": 512,
        "k": 512,
        "dtype": "bf16",
        "layout": "NN",
        "implementation": implementation,
        "us": {"p10": us, "p50": us, "p90": us},
        "peers": {"xla": {"us": {"p10": 1.0, "p50": peer_us, "p90": 99.0}, "error": 0.0}},
        "timer": "trace",
        "samples": 20,
        "machine": {"device": "NVIDIA H200", "driver": "580.1", "jax": "0.11.2"},
    } | changes
    flops = 2 * record["batch"] * record["m"] * record["n"] * record["k"]
    record["tflops"] = flops / us / 1e6
    record["ratio"] = peer_us / us
    return record


def make_records():
    squares = [
        make_record(name, m=size, n=size, k=size, us=us * size / 512)
        for size in (512, 1024, 2048)
        for name, us in (("mma_sync", 20.0), ("wgmma", 9.0))
    ]
    decode = [make_record(suite="decode", label="qkv", m=m, peer_us=12.0) for m in (1, 16)]
    return squares + decode


RANDOM = reference.random


def drawn(key, shape, dtype):
    """Draw random numbers by NumPy, for which nothing is compiled; traced ones as the harness."""
    if isinstance(key, jax.core.Tracer):
        return RANDOM(key, shape, dtype)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))
    bounds = jnp.iinfo(dtype)
    return jnp.asarray(rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True))


def draw_by_numpy(patch):
    """Let the harness draw as `drawn` does."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jax_tcgemm.bench") and vars(module).get("random") is RANDOM:
            patch.setattr(module, "random", drawn)
