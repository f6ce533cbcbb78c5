"""What BLAS calls become: what is chosen, the custom call, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jax_tcgemm
from jax_tcgemm import blas, selection

pytestmark = pytest.mark.usefixtures("x64")

# --- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routine", "size", "ran"),
    [("gemv", 2048, "xla"), ("trsv", 64, "xla"), ("trsv", 1024, "host")],
)
def test_on_a_cpu_host_runs_what_it_gains_at(routine, size, ran, cpu_rule):
    a, x = (jax.ShapeDtypeStruct((size,) * rank, jnp.float32) for rank in (2, 1))
    (call,) = jax_tcgemm.explain(getattr(blas, routine), a, x, platform="cpu")
    assert call.implementation == ran
    forced = functools.partial(getattr(blas, routine), implementation="host")
    (call,) = jax_tcgemm.explain(forced, a, x, platform="cpu")
    assert call.implementation == "host"


def test_explain_lists_calls_and_derivatives():
    a, x = jnp.ones((4, 3)), jnp.ones(3)
    f = jax.value_and_grad(lambda a, x: blas.gemv(a, x).sum(), (0, 1))
    report = jax_tcgemm.explain(f, a, x)
    assert sorted(call.problem.call.routine for call in report) == ["gemm", "gemv", "gemv"]
    assert {call.implementation for call in report} == {"host"}
    assert report[0].flops == 2 * 4 * 3
    assert "gemv f64 4x3 3" in str(report)


def test_choice_on_cuda(fake_cuda):
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    xs = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    explain = functools.partial(jax_tcgemm.explain, platform="cuda")
    (call,) = explain(blas.nrm2, x)
    assert (call.implementation, call.workspace_bytes) == ("cublas", (1 << 20) + 256)
    (call,) = explain(jax.vmap(blas.nrm2), xs)
    assert call.implementation == "xla"
    assert "no batched nrm2" in call.why
    (call,) = explain(functools.partial(blas.nrm2, implementation="cublas"), xs)
    assert call.implementation == "cublas"
    (call,) = explain(
        functools.partial(blas.gemv, options=blas.Options(workspace_bytes=512)),
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        x,
    )
    assert call.workspace_bytes == 512 + 256
    fake_cuda.rejects["cublas"] = "libcublas was not found"
    selection.forget()
    (call,) = explain(blas.nrm2, x)
    assert (call.implementation, call.why) == ("xla", "libcublas was not found")
    assert call.rejected == {"cublas": "libcublas was not found"}


def test_what_cublas_is_slow_at_is_left_to_xla(fake_cuda):
    explain = functools.partial(jax_tcgemm.explain, platform="cuda")
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    square, band = (jax.ShapeDtypeStruct((64, n), jnp.float32) for n in (64, 3))
    gbmv = functools.partial(blas.gbmv, kl=1, ku=1)
    for call, a in ((gbmv, band), (blas.gemv, square)):
        (chosen,) = explain(call, a, x)
        assert (chosen.implementation, chosen.why) == ("xla", "cuBLAS was measured slower than XLA")
        (forced,) = explain(functools.partial(call, implementation="cublas"), a, x)
        assert forced.implementation == "cublas"
    (chosen,) = explain(functools.partial(blas.gemv, trans="T"), square, x)
    assert chosen.implementation == "cublas"


def test_attributes_of_the_custom_call(fake_cuda):
    a, x = jnp.ones((3, 4, 5)), jnp.ones((4, 7))
    call = functools.partial(
        blas.gemv,
        alpha=2 - 0.5j,
        trans="C",
        increment_x=2,
        options=blas.Options("pedantic", atomics=True),
    )
    lowered = jax.jit(call).trace(a + 0j, x[0] + 0j).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @tcgemm_blas" in lowered
    for part in (
        'routine = "gemv"',
        'op_a = "C"',
        'math = "pedantic"',
        "atomics = true",
        "alpha_re = 2.0",
        "alpha_im = -5.0",
        "a_ld = 5 ",
        "a_stride = 20 ",
        "b_ld = 2 ",
        "b_stride = 0 ",
        "c_ld = 1 ",
        "c_stride = 5 ",
        "batch = 3 ",
        "has_c = false",
    ):
        assert part in lowered


@pytest.mark.parametrize("routine", ["scal", "gemm"])
def test_updates_take_the_place_of_what_they_update(routine, fake_cuda):
    x = jnp.ones((4, 4))
    f = {"scal": lambda x: blas.scal(2, x[0]), "gemm": lambda x: blas.gemm(x, x, x)}[routine]
    lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "output_operand_alias" in lowered


# --- refusals -----------------------------------------------------------------------------------

FORMAT = re.compile(r"^blas\.\w+: .+ must .+, got .+; .+", re.DOTALL)
V, M = jnp.ones(4), jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: blas.iamax(V, increment=0), ValueError, "increment=0"),
        (lambda: blas.iamax(V, increment=-1), ValueError, "increment=-1"),
        (lambda: blas.iamax(V, increment=1.5), ValueError, "increment=1.5"),
        (lambda: blas.iamax(V, n=5), ValueError, "x.shape=(4,)"),
        (lambda: blas.iamax(V[:0]), ValueError, "x.shape=(0,)"),
        (lambda: blas.amax(V, n=0), ValueError, "n=0"),
        (lambda: blas.asum(jnp.ones(())), ValueError, "x.shape=()"),
        (lambda: blas.asum(jnp.ones(3, jnp.int32)), TypeError, "dtype=int32"),
        (lambda: blas.asum("abc"), TypeError, "type str"),
        (lambda: blas.nrm2(V, n=-1), ValueError, "n=-1"),
        (lambda: blas.dot(V, V[:3]), ValueError, "4 of x, 3 of y"),
        (lambda: blas.dot(V, V, increment_y=2), ValueError, "4 of x, 2 of y"),
        (lambda: blas.dot(M, jnp.ones((3, 4))), ValueError, "(4, 4), (3, 4)"),
        (lambda: blas.scal(V, V), TypeError, "alpha="),
        (lambda: blas.scal("2", V), TypeError, "alpha='2'"),
        (lambda: blas.axpy(1j, V, V), TypeError, "alpha=1j"),
        (lambda: blas.gemv(V, V), ValueError, "a.shape=(4,)"),
        (lambda: blas.gemv(M[:, :3], V[:2]), ValueError, "x.shape=(2,)"),
        (lambda: blas.gemv(M, V, V[:2]), ValueError, "y.shape=(2,)"),
        (lambda: blas.gemv(M, V, increment_y=2), ValueError, "increment_y=2"),
        (lambda: blas.gemv(M, V, trans="H"), ValueError, "trans='H'"),
        (lambda: blas.gemv(M, V, V, beta=V), TypeError, "beta="),
        (lambda: blas.gbmv(M, V, kl=1, ku=1), ValueError, "a.shape=(4, 4)"),
        (lambda: blas.gbmv(M, V, kl=-1, ku=4), ValueError, "kl=-1"),
        (lambda: blas.gbmv(M, V, kl=1, ku=2, columns=-3), ValueError, "columns=-3"),
        (lambda: blas.to_band(M, 1, -1), ValueError, "ku=-1"),
        (lambda: blas.trsv(M[:3], V), ValueError, "a.shape=(3, 4)"),
        (lambda: blas.trsv(M, V[:3]), ValueError, "b.shape=(3,)"),
        (lambda: blas.trsv(M, V, increment=2), ValueError, "7 in all"),
        (lambda: blas.trsm(M, M[:3]), ValueError, "b.shape=(3, 4)"),
        (lambda: blas.trsm(M, M[:, :3], side="right"), ValueError, "b.shape=(4, 3)"),
        (lambda: blas.trsm(M, M, side="both"), ValueError, "side='both'"),
        (lambda: blas.gemm(M, M[:3]), ValueError, "b.shape=(3, 4)"),
        (lambda: blas.gemm(M, M, M[:3]), ValueError, "c.shape=(3, 4)"),
        (lambda: blas.gemm(M, M, trans_b="X"), ValueError, "trans_b='X'"),
        (lambda: blas.gemm_batched([M], [M, M]), ValueError, "{'a': 1, 'b': 2}"),
        (lambda: blas.gemm_batched([M, M[:3]], [M, M]), ValueError, "all of a"),
        (lambda: blas.gemm(M, M, implementation="magic"), ValueError, "implementation='magic'"),
        (lambda: blas.gemm(M, M, implementation="cublas"), ValueError, "it runs on cuda, not on"),
        (lambda: blas.gemm(M, M, options={"math": "tf32"}), TypeError, "options="),
        (lambda: blas.Options(math="fast"), ValueError, "math='fast'"),
        (lambda: blas.Options(atomics=1), TypeError, "atomics=1"),
        (lambda: blas.Options(workspace_bytes=255), ValueError, "workspace_bytes=255"),
    ],
)
def test_refuses(call, error, says):
    with pytest.raises(error) as info:
        call()
    assert says in str(info.value)
    assert FORMAT.match(str(info.value)), str(info.value)


def test_logging_says_why_it_cannot(fake_cuda):
    fake_cuda.rejects["cublas"] = "libcublas was not found"
    selection.forget()
    with pytest.raises(RuntimeError, match="libcublas was not found"):
        blas.set_logging("cublas.log")


@pytest.mark.parametrize("routine", ["gemv", "gbmv", "trsv", "trsm"])
def test_workloads_of_the_benchmark(routine):
    """Ours and the peer agree on what they are measured on, and the suite's file makes them."""
    from jax_tcgemm.bench import reference, suites
    from jax_tcgemm.bench.workloads import blas as bench

    group = {"routine": routine, "band": 2, "shapes": [[24, 7 if routine == "trsm" else 24]]}
    (workload,) = bench.workloads("blas", group, "f64")
    (operands,) = reference.make_inputs(workload, 1)
    ours, peer = workload.ours["blas"](*operands), workload.peers["xla"](*operands)
    assert jnp.max(jnp.abs(ours - peer)) <= workload.tolerance * jnp.max(jnp.abs(peer))
    assert any(case.label.startswith(routine) for case in suites.load_suite("blas").cases)
