"""Kernels that programs carry: how often, where, and through what programs go through."""

import base64
import dataclasses
import importlib
import re
import types
import zlib

import jax
import jax.numpy as jnp
import pytest
from ffi_frame import INVALID_ARGUMENT, Buffer
from ffi_worker import Worker
from fuzz import execute
from fuzz_targets import Call
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.kernels import Instance, compile_kernels, compiler, nvrtc, program
from jax_tcgemm.system import modules
from jax_tcgemm.system.jax_internals import mlir

pytestmark = [
    pytest.mark.surface,
    pytest.mark.skipif(bool(nvrtc.reason()), reason=nvrtc.reason()),
]

CALL = f"stablehlo.custom_call @{program.TARGET}("
USE = f"call @{program.TARGET}_"


def kernel(name="tiny"):
    """One that compiles in no time."""
    return Instance("tests", (), name, "sm_80", f"__global__ void {name}(float* x) {{}}")


@pytest.fixture
def cuda_module():
    """The module, where this build has it."""
    if modules.reason("cuda"):
        pytest.skip(modules.reason("cuda"))
    return importlib.import_module("jax_tcgemm._cuda")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """What a program is told of the library, which not every build has."""
    known = types.SimpleNamespace(abi_version=7, device_headers_hash="abc")
    monkeypatch.setattr(modules, "cuda", known)


def run(x, *names):
    """A call that runs kernels."""
    call = jax.ffi.ffi_call("runs_kernels", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, *(program.carried(kernel(name)) for name in names))


def lowered(f, *args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_what_is_carried():
    text = lowered(lambda x: run(x, "tiny"), jnp.ones(3))
    (made,) = compile_kernels([kernel()]).values()
    for field in (
        "abi = 7 : i64",
        'headers = "abc"',
        'name = "tiny"',
        'target = "sm_80"',
        f'entry = "{made.name}"',
        f'cubin = "{base64.b64encode(made.cubin).decode()}"',
        f"checksum = {zlib.crc32(made.cubin)} : i64",
    ):
        assert field in text
    # Not a side effect, which XLA would not let alone in a program for several devices.
    assert "has_side_effect" not in text


def repeated(x, times=20):
    for _ in range(times):
        x = run(run(x, "first"), "first", "second") + 1
    return x


def test_calls_of_a_block_share_a_kernel():
    text = lowered(repeated, jnp.ones(3))
    assert (text.count(CALL), text.count(USE)) == (2, 2)


def step(x):
    return run(run(x, "tiny"), "tiny")


PROGRAMS = {
    "function": lambda x: jax.jit(step)(step(x)),
    "functions": lambda x: jax.jit(lambda x: step(x) + 1)(jax.jit(step)(x)),
    # JAX 0.10 writes unrolled iterations into one block, which has one call: hence the function.
    "unrolled": lambda x: lax.scan(
        lambda x, _: (step(x), None), jax.jit(step)(x), length=5, unroll=True
    )[0],
    "scan": lambda x: lax.scan(lambda x, _: (step(x), None), step(x), length=5, unroll=2)[0],
    "loop": lambda x: lax.fori_loop(0, 5, lambda i, x: step(x), step(x)),
    "branches": lambda x: lax.cond(x[0] > 0, step, lambda x: step(x) + 1, step(x)),
    "checkpoint": lambda x: jax.checkpoint(step)(jax.checkpoint(lambda x: step(x) + 1)(x)),
}


@pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_has_each_kernel_once(f):
    text = lowered(f, jnp.ones(3))
    assert text.count(CALL) == 1
    assert text.count(USE) > 1


def test_a_kernel_goes_with_the_calls_that_run_it():
    def f(x):
        run(x, "unused")
        return run(x, "used")

    text = lowered(f, jnp.ones(3))
    assert 'name = "used"' in text
    assert 'name = "unused"' not in text


def test_an_exported_program_carries_it():
    checks = [export.DisabledSafetyCheck.custom_call(x) for x in (program.TARGET, "runs_kernels")]
    exported = export.export(
        jax.jit(lambda x: run(run(x, "tiny"), "tiny")), platforms=["cuda"], disabled_checks=checks
    )(jnp.ones(3))
    again = export.deserialize(exported.serialize())
    assert again.mlir_module().count(CALL) == 1
    (made,) = compile_kernels([kernel()]).values()
    assert base64.b64encode(made.cubin).decode() in again.mlir_module()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
def test_programs_for_several_devices(monkeypatch, axis_type):
    """They pass XLA's partitioner; on the CPU, which knows the targets by other handlers."""
    handler = modules.cpu.registrations()["tcgemm_gemm"]
    for target in (program.TARGET, "runs_kernels"):
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    mlir.register_lowering(program.kernel_p, program._lower, platform="cpu", cacheable=False)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:4])
    x = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("x")))

    def f(x):
        on_shards = jax.shard_map(
            lambda x: run(run(x, "tiny"), "tiny"), mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
        x = on_shards(x * 2)
        return lax.fori_loop(0, 3, lambda i, x: on_shards(x), x), run(jnp.ones(3), "tiny")

    with jax.set_mesh(mesh):
        compiled = jax.jit(f).lower(x).compile().as_text()
    assert compiled.count('custom_call_target="runs_kernels"') == 5
    assert compiled.count(f'custom_call_target="{program.TARGET}"') == 3


@pytest.fixture
def cuda_worker(cuda_module):
    """Runs calls of the module's targets, without a GPU as far as they need none."""
    with Worker(cuda_module.__file__) as worker:
        yield worker


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"abi": 1}, "was lowered for ABI version 1"),
        ({"headers": "others"}, "a kernel for another version of this library; lower it again"),
        ({"cubin": "AB="}, "cubin must be base64"),
        ({"cubin": "A\u00e9BC"}, "cubin must be base64"),
        ({"cubin": ""}, "the cubin is damaged"),
        ({"cubin": "AAAA", "checksum": zlib.crc32(bytes(3))}, "the cubin is damaged"),
        ({"checksum": 1}, "the cubin is damaged"),
        ({"entry": 1}, "entry must be a string"),
        ({"target": ""}, "target must name an architecture"),
        ({"more": 1}, "more must not be given"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_a_program_brings_is_checked(cuda_module, cuda_worker, monkeypatch, change, message):
    monkeypatch.setattr(modules, "cuda", cuda_module)
    fields = program.attributes(kernel()) | change
    call = Call(program.TARGET, "kernel", fields, [], [Buffer("pred", (1,))])
    outcome = execute(cuda_worker, call)
    assert outcome.code == INVALID_ARGUMENT
    assert message in outcome.message


def test_a_call_takes_kernels_after_its_operands(cuda_module, monkeypatch):
    """What would run it is not part of the library: the call is lowered with it, once."""
    monkeypatch.setattr(modules, "cuda", cuda_module)
    source = ("kernels/wgmma/kernel.cuh", "kernel<...>", "sm_90a")
    monkeypatch.setattr(cuda_module, "kernels", lambda *_: [source])
    monkeypatch.setattr(compiler, "_kernels", {})
    asked = []

    def compile_kernel(instance):
        asked.append(instance)
        return nvrtc.Kernel("entry", b"cubin")

    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    selection.forget()

    def f(x):
        for _ in range(10):
            x = jnp.tanh(jax_tcgemm.matmul(x, x, implementation="wgmma"))
        return x

    text = lowered(f, jnp.ones((64, 64), jnp.bfloat16))
    selection.forget()
    assert asked == [Instance("wgmma", source[:1], *source[1:])]
    assert text.count(CALL) == 1
    # JAX copies what the first call was lowered to, and after it none.
    assert text.count(USE) <= 2
    calls = re.findall(r"custom_call @tcgemm_gemm\((%\w+), (%\w+), (%\w+)\)", text)
    assert len(calls) == 10
    assert len({carried for *_, carried in calls}) <= 2


F16, BF16, INT8 = (jax.ShapeDtypeStruct((256, 256), x) for x in ("float16", "bfloat16", "int8"))
SIZES = jax.ShapeDtypeStruct((4,), "int32")
WEIGHTS = jax.ShapeDtypeStruct((4, 256, 256), "bfloat16")


def mma_sync(function, **how):
    return lambda *args: function(*args, implementation="mma_sync", **how)


@pytest.mark.parametrize(
    ("f", "args", "names"),
    [
        (
            mma_sync(jax_tcgemm.matmul, config="64x64x32_w32x32_s4"),
            2 * [jnp.ones((8, 8))],
            ["mma::gemm_kernel<.*::Mma<tcgemm::ptx::TF32, tcgemm::ptx::TF32, float, .*::Bare>"],
        ),
        (
            mma_sync(jax_tcgemm.matmul, config="64x64x64_w32x32_s4_k4"),
            (BF16, BF16),
            [
                "split_reduction::reduce<float, .*::Floats, 1, 4>",
                "mma::gemm_kernel<.*64, 64.*::Mma<__nv_bfloat16, __nv_bfloat16, float, .*::Bare>",
            ],
        ),
        (
            mma_sync(jax_tcgemm.matmul, config="128x128x32_w64x64_s4"),
            (BF16, BF16),
            ["mma::gemm_kernel<.*128, 128.*::Mma<__nv_bfloat16, __nv_bfloat16, float, .*::Bare>"],
        ),
        (
            mma_sync(jax_tcgemm.matmul),
            (INT8, INT8),
            ["mma::gemm_kernel<.*::Mma<int8_t, int8_t, int32_t, .*::Scaled>"],
        ),
        (
            mma_sync(jax_tcgemm.linear, activation="relu"),
            (F16, F16),
            ["mma::gemm_kernel<.*::Mma<__half, __half, float, .*::Function<.*::Function_"],
        ),
        (
            mma_sync(jax_tcgemm.ragged_dot),
            (BF16, WEIGHTS, SIZES),
            ["mma::ragged_kernel<.*128, 128"],
        ),
    ],
    ids=["tf32", "split", "tile", "int8", "fused", "ragged"],
)
def test_a_program_brings_its_kernels(cuda_module, monkeypatch, f, args, names):
    monkeypatch.setattr(modules, "cuda", cuda_module)
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda x: nvrtc.Kernel("entry", b"cubin"))
    selection.forget()
    text = lowered(f, *args)
    selection.forget()
    # The device's architecture, of which an H200 is assumed.
    brought = re.findall(r'name = "tcgemm::([^"]*)", target = "sm_90"', text)
    assert text.count(CALL) == len(brought) == len(names)
    for name, expected in zip(brought, names, strict=True):
        assert re.match(expected, name)


@pytest.mark.parametrize("compute_capability", [80, 89, 120])
def test_a_kernel_is_of_its_devices_architecture(cuda_module, monkeypatch, compute_capability):
    monkeypatch.setattr(modules, "cuda", cuda_module)
    device = selection.target_device("cuda").query() | {"compute_capability": compute_capability}
    (call,) = jax_tcgemm.explain(mma_sync(jax_tcgemm.matmul), INT8, INT8, platform="cuda")
    query = call.problem.query()
    ((_, _, target),) = cuda_module.kernels("mma_sync", "64x64x128_w32x32_s4", query, device)
    assert target == f"sm_{compute_capability}"


def test_a_kernel_takes_a_compiler(cuda_module, monkeypatch):
    """On a GPU; of one that is assumed, explain() says what would run with one."""
    monkeypatch.setattr(modules, "cuda", cuda_module)
    monkeypatch.setattr(nvrtc, "reason", lambda: "there is none")
    product = mma_sync(jax_tcgemm.matmul)
    (call,) = jax_tcgemm.explain(product, F16, F16, platform="cuda")
    assert call.implementation == "mma_sync"
    gpu = dataclasses.replace(selection.ASSUMED_GPU, assumed=False)
    reason = cuda_module.reject("mma_sync", call.config, call.problem.query(), gpu.query())
    assert reason == "NVRTC to compile its kernel is missing; install nvidia-cuda-nvrtc"


def test_a_program_lowered_without_a_compiler_is_xlas(cuda_module, monkeypatch):
    monkeypatch.setattr(modules, "cuda", cuda_module)
    monkeypatch.setattr(nvrtc, "reason", lambda: "there is no NVRTC")
    selection.forget()
    assert "tcgemm" not in lowered(jax_tcgemm.ragged_dot, BF16, WEIGHTS, SIZES)
    with pytest.raises(ValueError, match="matmul: .* there is no NVRTC"):
        lowered(mma_sync(jax_tcgemm.matmul), F16, F16)
    selection.forget()
