"""How long programs wait for kernels that the library was not built with, on one GPU.

    python benchmarks/first_use.py OUT.json

Each figure is one of a fresh process with an empty cache of kernels, or with one that the process
before has filled: a kernel's first use beyond what the program takes with kernels that are built;
a program with twelve different products on eight cores; `autotune` of one product.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

MEASURED = {
    "import": 0,
    "bare kernel": 1,
    "kernel with an epilogue": 1,
    "twelve products": 8,
    "autotune": 16,
}


def measure(what: str) -> float:
    """Seconds, in this process."""
    start = time.perf_counter()
    import jax

    after_jax = time.perf_counter()
    import jax_tcgemm

    if what == "import":
        return time.perf_counter() - after_jax
    import jax.numpy as jnp

    x = jnp.ones((512, 512), jnp.bfloat16)
    built = "128x128x64_c1x1x1_pp"

    def seconds(f, *args):
        start = time.perf_counter()
        lowered = jax.jit(f).lower(*args)
        return time.perf_counter() - start, lowered

    def product(config, **kwargs):
        call = jax_tcgemm.linear if kwargs else jax_tcgemm.matmul
        return lambda x: call(x, x, implementation="wgmma", config=config, **kwargs)

    seconds(product(built), x)  # what every process does once
    if what == "bare kernel":
        return seconds(product("128x256x64_c2x1x1_co"), x)[0]
    if what == "kernel with an epilogue":
        config = "128x256x64_c2x1x1_co"
        return seconds(product(config, activation="gelu", bias=jnp.ones(512)), x)[0]
    if what == "twelve products":
        configs = CONFIGS[:12]

        def program(x):
            for config in configs:
                x = product(config)(x)
            return x

        return seconds(program, x)[0]
    jax_tcgemm.autotune(jax_tcgemm.matmul, x, x, cache=False, progress=False)  # starts libraries
    a, b = jnp.ones((1536, 2048), jnp.bfloat16), jnp.ones((2048, 1024), jnp.bfloat16)
    start = time.perf_counter()
    tuning = jax_tcgemm.autotune(jax_tcgemm.matmul, a, b, cache=False, progress=False)
    print(tuning, file=sys.stderr)
    return time.perf_counter() - start


CONFIGS = [
    "128x256x64_c1x1x1_co",
    "192x192x64_c2x1x1_co",
    "192x176x64_c1x1x1_co",
    "128x224x64_c2x1x1_co",
    "128x192x64_c2x1x1_co",
    "128x160x64_c2x1x1_pp",
    "128x128x64_c2x2x1_co",
    "64x256x64_c1x1x1_pp",
    "64x192x64_c1x1x1_pp",
    "64x128x64_c1x1x1_pp",
    "64x96x64_c1x1x1_pp",
    "64x64x64_c1x1x1_pp",
]


def main(out: str) -> None:
    """Runs every figure in processes of its own and writes them."""
    found = {}
    for what, cores in MEASURED.items():
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"TCGEMM_CACHE_DIR": folder}
            cpus = sorted(os.sched_getaffinity(0))[: cores or None]
            times = [
                json.loads(
                    subprocess.run(
                        [sys.executable, __file__, "--measure", what],
                        env=env,
                        stdout=subprocess.PIPE,
                        check=True,
                        preexec_fn=lambda cpus=cpus: os.sched_setaffinity(0, cpus),
                    ).stdout
                )
                for _ in range(2)
            ]
        found[what] = {"cores": len(cpus), "empty_cache_s": times[0], "full_cache_s": times[1]}
        print(what, found[what], flush=True)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        print(json.dumps(round(measure(sys.argv[2]), 4)))
    else:
        main(sys.argv[1])
