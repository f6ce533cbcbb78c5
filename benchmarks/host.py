"""The host implementation beside XLA:CPU's dot, through the public functions, as a markdown table.

    python benchmarks/host.py [--seconds 0.5] [--dtypes float32,bfloat16] [--group squares]

The two are timed in turn, in one process, on random normal data, after their values have been
compared. Times are the 10th percentile, because a CPU is rarely idle. `wall` is host's median over
XLA's, `CPU` the same for the processor time of all threads, which other work on the machine
disturbs less; above 1, XLA is the faster.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_tcgemm

jax.config.update("jax_enable_x64", True)

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "complex64")
LAYOUTS = ("NN", "NT", "TN", "TT")
# (batch, m, n, k)
GROUPS = {
    "squares": [(1, s, s, s) for s in (4, 16, 64, 128, 256, 512, 1024, 2048)],
    "transformer": [
        (1, 256, 768, 768),
        (1, 256, 3072, 768),
        (1, 256, 768, 3072),
        (1, 512, 2048, 512),
        (96, 128, 128, 64),
        (96, 128, 64, 128),
    ],
    "vectors": [(1, 1, 4096, 4096), (1, 4096, 1, 4096)],
    "few rows": [(1, m, 4096, 1024) for m in (2, 4, 8, 16, 32, 64)],
    "few columns": [(1, 4096, n, 1024) for n in (2, 4, 10, 16, 32, 64)],
    "batches": [(10000, 4, 4, 4), (1000, 16, 16, 16), (200, 32, 32, 32)],
}


def operand(rng, dtype, shape):
    """Random numbers: standard normal, or uniform over the range of an integer dtype."""
    if dtype == "int8":
        return jnp.asarray(rng.integers(-128, 128, shape), dtype)
    x = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    return jnp.asarray(x, dtype)


def product(dot_general, layout, dtype, batched, **kwargs):
    """A jitted product whose operands lie in memory as the layout says."""
    a, b = (1, 2) if batched else (0, 1)
    contracting = (a if layout[0] == "T" else b,), (b if layout[1] == "T" else a,)
    dimension_numbers = (contracting, ((0,), (0,)) if batched else ((), ()))
    result = jnp.int32 if dtype == "int8" else None
    return jax.jit(
        lambda x, y: dot_general(x, y, dimension_numbers, preferred_element_type=result, **kwargs)
    )


def measure(functions, operands, seconds):
    """The wall times and the processor times of each function in seconds, each sorted."""
    first, second = (np.asarray(f(*operands)).astype(complex) for f in functions)
    scale = max(np.abs(second).max(), 1e-30)
    assert np.abs(first - second).max() <= 0.02 * scale, "the products differ"
    walls, cpus = ([[] for _ in functions] for _ in range(2))
    end = time.perf_counter() + seconds
    while len(walls[0]) < 9 or time.perf_counter() < end:
        for f, wall, cpu in zip(functions, walls, cpus, strict=True):
            start, cpu_start = time.perf_counter(), time.process_time()
            f(*operands).block_until_ready()
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
    return [sorted(x) for x in walls], [sorted(x) for x in cpus]


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line of the table")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--layouts", default="NN,NT,TN")
    parser.add_argument("--group", choices=GROUPS, action="append")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    print("| dtype | batch×m×n×k | layout | host µs | XLA µs | host GFLOP/s | wall | CPU |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for group in args.group or GROUPS:
        for dtype in args.dtypes.split(","):
            for batch, m, n, k in GROUPS[group]:
                for layout in args.layouts.split(",") if batch == 1 else ["NN"]:
                    a = (m, k) if layout[0] == "N" else (k, m)
                    b = (k, n) if layout[1] == "N" else (n, k)
                    lead = (batch,) if batch > 1 else ()
                    operands = [operand(rng, dtype, (*lead, *shape)) for shape in (a, b)]
                    host = product(
                        jax_tcgemm.dot_general, layout, dtype, batch > 1, implementation="host"
                    )
                    xla = product(jax.lax.dot_general, layout, dtype, batch > 1)
                    (ours, theirs), (our_cpu, their_cpu) = measure(
                        [host, xla], operands, args.seconds
                    )
                    p10, p50 = len(ours) // 10, len(ours) // 2
                    flops = (8 if dtype.startswith("complex") else 2) * batch * m * n * k
                    print(
                        f"| {dtype} | {batch}×{m}×{n}×{k} | {layout} | {ours[p10] * 1e6:.1f} "
                        f"| {theirs[p10] * 1e6:.1f} | {flops / ours[p10] / 1e9:.1f} "
                        f"| {ours[p50] / theirs[p50]:.2f} | {our_cpu[p50] / their_cpu[p50]:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
