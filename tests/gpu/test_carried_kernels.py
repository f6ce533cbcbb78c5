"""Programs that carry kernels, here and in other processes."""

import concurrent.futures
import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.kernels import program
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Operand, Problem

pytestmark = pytest.mark.gpu

# None of them is built, and each has a kernel of its own.
CONFIGS = [
    "128x256x64_c2x1x1_co",
    "192x176x64_c1x1x1_co",
    "128x160x64_c2x1x1_pp",
    "64x64x64_c1x1x4_pp",
    "128x224x64_c2x1x1_co_t",
    "64x96x64_c1x1x1_pp",
    "64x32x64_c1x1x1_pp_t",
    "256x128x64_c1x1x1_co_t",
]


@pytest.fixture
def operands():
    """Integers, whose products bfloat16 holds exactly in float32, and the product in float64."""
    rng = np.random.default_rng()
    a = rng.integers(-3, 3, (296, 136), endpoint=True)
    b = rng.integers(-3, 3, (136, 200), endpoint=True)
    return jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16), a.astype(float) @ b


def product(config):
    return functools.partial(
        jax_tcgemm.matmul,
        implementation="wgmma",
        config=config,
        preferred_element_type=jnp.float32,
    )


def chain(a, b):
    """Two kernels in a loop, and one of them before it."""
    both = [product(config) for config in CONFIGS[:2]]
    first = both[0](a, b)
    return jax.lax.fori_loop(0, 3, lambda _, sums: sums + both[0](a, b) + both[1](a, b), first)


def test_each_has_one_kernel():
    operand = Operand("bf16", False, 64, 0, 0)
    problem = Problem(1, 1, 64, 64, 64, operand, operand, "f32", "f32")
    for config in CONFIGS:
        chosen = selection.select(
            CallOptions("test", "wgmma", config), problem, selection.target_device("cuda")
        )
        assert len(chosen.kernels) == 1, config


def test_values_in_a_loop(operands):
    a, b, expected = operands
    np.testing.assert_array_equal(jax.jit(chain)(a, b), 7 * expected)


def test_eight_threads_bring_their_kernels_at_once(operands):
    a, b, expected = operands
    jax.clear_caches()

    def run(config):
        return np.asarray(jax.jit(product(config))(a, b))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got in pool.map(run, CONFIGS * 2):
            np.testing.assert_array_equal(got, expected)


# Without a compiler and without what is cached of kernels.
ELSEWHERE = """
import pickle, sys
import jax, numpy as np
from jax import export
from jax.experimental import serialize_executable
import jax_tcgemm
from jax_tcgemm.kernels import compiler, nvrtc

def refuse(*_):
    raise AssertionError("a kernel is compiled")

nvrtc._find = lambda: "libnvrtc was not found"
nvrtc.compile_kernel = compiler.compile_kernels = refuse
kind, program, *operands = pickle.load(sys.stdin.buffer)
if kind == "export":
    call = jax.jit(export.deserialize(program).call)
else:
    call = serialize_executable.deserialize_and_load(*program)
pickle.dump(np.asarray(call(*map(jax.numpy.asarray, operands))), sys.stdout.buffer)
"""


def elsewhere(kind, program, *operands):
    """What a program gives in another process."""
    given = pickle.dumps((kind, program, *map(np.asarray, operands)))
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], input=given, capture_output=True)
    assert not done.returncode, done.stderr.decode()
    return pickle.loads(done.stdout)


def test_an_exported_program_runs_without_a_compiler(operands):
    a, b, expected = operands
    checks = [export.DisabledSafetyCheck.custom_call(x) for x in (program.TARGET, "tcgemm_gemm")]
    exported = export.export(jax.jit(chain), disabled_checks=checks)(a, b)
    got = elsewhere("export", exported.serialize(), a, b)
    np.testing.assert_array_equal(got, 7 * expected)


def test_a_compiled_program_runs_in_another_process(operands):
    a, b, expected = operands
    compiled = jax.jit(chain).lower(a, b).compile()
    got = elsewhere("compiled", serialize_executable.serialize(compiled), a, b)
    np.testing.assert_array_equal(got, 7 * expected)


def test_programs_from_the_compilation_cache(operands, tmp_path, monkeypatch):
    """Compiled by one process and run by the next, whose kernels nobody has compiled."""
    code = f"""
import jax, numpy as np, pickle, sys
sys.path[:0] = {sys.path!r}
from gpu.test_carried_kernels import chain
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
a, b = map(jax.numpy.asarray, pickle.load(open(r"{tmp_path}/operands", "rb")))
np.save(sys.argv[1], jax.jit(chain)(a, b))
print(sum("cache_hit" in x for x in hits))
"""
    a, b, expected = operands
    (tmp_path / "operands").write_bytes(pickle.dumps([np.asarray(x) for x in (a, b)]))
    for name, value in {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }.items():
        monkeypatch.setenv(name, value)
    hits = []
    for i in range(2):
        out = tmp_path / f"out{i}.npy"
        done = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True)
        assert not done.returncode, done.stderr
        np.testing.assert_array_equal(np.load(out), 7 * expected)
        hits.append(int(done.stdout.split()[-1]))
    assert hits[1] > hits[0]
