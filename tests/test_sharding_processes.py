"""Two processes joined by jax.distributed: nothing of ours has to know."""

import os
import socket
import subprocess
import sys

CODE = """
import sys
import jax

process = int(sys.argv[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=process)

import functools
import jax.numpy as jnp
import numpy as np
import jax_tcgemm
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
rng = np.random.default_rng(0)
a, b = rng.standard_normal((8, 12)), rng.standard_normal((12, 16))
expected = a @ b
matmul = functools.partial(jax_tcgemm.matmul, implementation="host")
for axis_type in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)

    def put(value, spec):
        value, sharding = value.astype(np.float32), NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def check(f, *args):
        text = f.lower(*args).compile().as_text()
        assert 'custom_call_target="tcgemm_gemm"' in text and " dot(" not in text
        got = multihost_utils.process_allgather(f(*args), tiled=True)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)

    with jax.set_mesh(mesh):
        # Rows over the processes, then the contracted dimension over them.
        check(jax.jit(matmul), put(a, P("x")), put(b, P(None, "y")))
        out = {"out_sharding": P()} if axis_type == AxisType.Explicit else {}
        numbers = (((1,), (0,)), ((), ()))
        f = functools.partial(
            jax_tcgemm.dot_general, dimension_numbers=numbers, implementation="host", **out)
        check(jax.jit(f), put(a, P(None, "x")), put(b, P("x")))

mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
gather = functools.partial(jax_tcgemm.all_gather_matmul, axis_name="model", implementation="host")
specs = {"in_specs": (P("model"), P(None, "model")), "out_specs": P(None, "model")}
check(jax.jit(jax.shard_map(gather, mesh=mesh, **specs)), put(a, P("model")),
      put(b, P(None, "model")))
scatter = functools.partial(
    jax_tcgemm.matmul_reduce_scatter, axis_name="model", implementation="host")
specs = {"in_specs": (P(None, "model"), P("model")), "out_specs": P("model")}
check(jax.jit(jax.shard_map(scatter, mesh=mesh, **specs)), put(a, P(None, "model")),
      put(b, P("model")))
print("done", process)
"""


def test_two_processes(tmp_path):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES")}
    env["JAX_PLATFORMS"] = "cpu"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(i), address],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for i, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, output
        assert f"done {i}" in output
