"""Which implementation runs what, and what is said about it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from work import steps

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.problem.precision import Numerics, canonical_precision, resolve
from jax_tcgemm.problem.ragged import RaggedProblem
from jax_tcgemm.problem.rows import RowsProblem
from jax_tcgemm.selection import rules, tables
from jax_tcgemm.selection.cost_model import prediction
from jax_tcgemm.system import modules

GPU = selection.ASSUMED_GPU
CPU = selection.Device("cpu")


def problem(dtype="bf16", out="bf16", compute="f32", size=64, **changes):
    dense = Operand(dtype, False, size)
    return dataclasses.replace(
        Problem(1, 1, size, size, size, dense, dense, out, compute), **changes
    )


def test_the_order_of_preference(fake_cuda):
    order = []
    for _ in range(9):
        choice = selection.select(CallOptions("matmul"), problem(), GPU)
        order.append(choice.implementation)
        fake_cuda.rejects[choice.implementation] = f"{choice.implementation} is tired"
        selection.forget()
    assert order == [
        *("wgmma", "cublaslt", "mma_sync", "wmma_tiled", "simt_tiled"),
        *("simt_batched", "wmma_naive", "simt_naive", "xla"),
    ]
    assert "no other implementation can run this" in choice.why
    assert [c.reason for c in choice.candidates[:1]] == ["wgmma is tired"]


def test_the_choice_says_what_was_passed_over(fake_cuda):
    fake_cuda.rejects["wgmma"] = "needs sm_90a"
    choice = selection.select(CallOptions("matmul"), problem(), GPU)
    assert choice.implementation == "cublaslt"
    assert "wgmma cannot" in choice.why
    assert "an H200 is assumed" in choice.why


def test_the_first_config_that_can_run_is_taken(fake_cuda):
    def reject(name, config, problem, device):
        return "too small for it" if config == "small" else ""

    fake_cuda.reject = reject
    assert selection.select(CallOptions("matmul"), problem(), GPU).config == "large"
    assert selection.select(CallOptions("matmul", "mma_sync"), problem(), GPU).config == "large"
    with pytest.raises(ValueError, match="mma_sync cannot run this: too small for it"):
        selection.select(CallOptions("matmul", "mma_sync", "small"), problem(), GPU)


@pytest.mark.skipif(modules.cuda is None, reason=modules.reason("cuda"))
@pytest.mark.parametrize(("dtype", "compute"), [("f64", "f64"), ("f32", "f32")])
def test_what_no_model_knows_is_left_to_xla(dtype, compute):
    choice = selection.select(CallOptions("matmul"), problem(dtype, dtype, compute, size=512), GPU)
    assert choice.implementation == "xla"
    assert "nothing is known to be faster than XLA's program" in choice.why


def test_workspace_comes_with_the_choice(fake_cuda):
    assert (
        selection.select(CallOptions("matmul", "mma_sync"), problem(), GPU).workspace_bytes == 4096
    )


def test_same_inputs_same_choice(fake_cuda):
    assert selection.select(CallOptions("matmul"), problem(), GPU) == selection.select(
        CallOptions("matmul"), problem(), GPU
    )


def test_without_the_cuda_module_xla_runs_visibly(monkeypatch):
    monkeypatch.setattr(modules, "cuda", None)
    monkeypatch.setitem(modules._reasons, "cuda", "this build has none")
    selection.forget()
    choice = selection.select(CallOptions("matmul"), problem(), GPU)
    selection.forget()
    assert choice.implementation == "xla"
    assert "this build has none" in choice.why
    with pytest.raises(ValueError, match="wgmma cannot run this: this build has none"):
        selection.select(CallOptions("matmul", "wgmma"), problem(), GPU)


WGMMA = ("128x256x64_c2x1x1_co", "64x64x64_c1x1x1_pp", "64x16x64_c1x1x1_pp_t")


@pytest.fixture
def fake_wgmma(fake_cuda):
    """A _cuda module whose wgmma has configs that the cost model knows; no tables."""
    fake_cuda.implementations = lambda: {
        "wgmma": list(WGMMA),
        "cublaslt": ["heuristic0", "heuristic1"],
        "mma_sync": ["small"],
    }
    tables.reset()
    yield fake_cuda
    tables.reset()


def choose(**changes):
    return selection.select(CallOptions("matmul"), problem(**changes), GPU)


def test_the_cost_model_chooses_and_says_so(fake_wgmma):
    choice = choose(size=4096)
    assert (choice.implementation, choice.config) == ("wgmma", WGMMA[0])
    assert "the cost model predicts" in choice.why
    assert " us for " in choice.why
    assert choose(size=512 + 64).config == WGMMA[1]
    wide = Operand("bf16", False, 4096)
    assert choose(m=16, n=4096, k=4096, a=wide, b=wide).config == WGMMA[2]


def test_one_row_is_left_to_xla(fake_wgmma):
    """Wherever rows start; a choice by name stands."""
    wide = Operand("bf16", False, 4096)
    row = {"m": 1, "n": 4096, "k": 4096, "a": wide, "b": wide}
    assert choose(**row).implementation == "xla"
    assert choose(**row | {"m": 2}).implementation == "wgmma"
    odd = Operand("bf16", False, 4098)
    assert choose(**row | {"b": odd}).implementation == "xla"
    assert selection.select(CallOptions("matmul", "wgmma"), problem(**row), GPU).config == WGMMA[2]


def test_a_small_product_is_left_to_xla_beside_wgmma_alone(fake_wgmma):
    assert choose(size=24).implementation == "xla"
    assert choose(size=4096).implementation == "wgmma"
    fake_wgmma.rejects |= {"wgmma": "no", "cublaslt": "no"}
    selection.forget()
    # What it takes is known beside wgmma alone.
    assert choose(size=24).implementation == "mma_sync"


def test_the_cost_model_respects_rejections(fake_wgmma):
    fake_wgmma.reject = lambda name, config, problem, device: "no" if config == WGMMA[0] else ""
    assert choose(size=4096).config == WGMMA[1]
    forced = selection.select(CallOptions("matmul", "wgmma"), problem(size=4096), GPU)
    assert forced.config == WGMMA[1]
    assert forced.why.startswith("asked for by name; the cost model predicts")
    with pytest.raises(ValueError, match="wgmma cannot run this: no"):
        selection.select(CallOptions("matmul", "wgmma", WGMMA[0]), problem(size=4096), GPU)


def test_cublaslt_is_chosen_where_it_is_predicted_to_be_faster(fake_wgmma):
    a, b = Operand("bf16", True, 4), Operand("bf16", True, 17092)
    choice = choose(m=4, n=6605, k=17092, a=a, b=b)
    assert (choice.implementation, choice.config) == ("cublaslt", "heuristic0")
    assert "the cost model predicts" in choice.why


def adopt(size, implementation, config, abi=1, **device):
    entry = tables.make_entry(implementation, config, 1.5, abi)
    key = dataclasses.replace(GPU.key, **device)
    tables.adopt(tables.Table(key, {tables.problem_key(problem(size=size)): entry}), "a table")
    selection.forget()


def test_what_was_measured_comes_first(fake_wgmma):
    adopt(4096, "mma_sync", "small")
    choice = choose(size=4096)
    assert (choice.implementation, choice.config) == ("mma_sync", "small")
    assert choice.why.startswith("measured, 1.5 us (a table)")
    assert choose(size=2048).implementation == "wgmma"
    adopt(4096, "xla", "default", abi=0)
    assert choose(size=4096).implementation == "xla"
    # Only that implementation's own entry decides about its config.
    forced = selection.select(CallOptions("matmul", "wgmma"), problem(size=4096), GPU)
    assert "the cost model predicts" in forced.why


@pytest.mark.parametrize(
    "entry",
    [
        ("wgmma", "gone"),
        ("magic", "x"),
        ("mma_sync", "small", 99),
    ],
    ids=["no such config", "no such implementation", "another ABI"],
)
def test_an_entry_that_does_not_fit_this_build_is_passed_over(entry, fake_wgmma):
    adopt(4096, *entry)
    assert choose(size=4096).config == WGMMA[0]


def test_an_entry_of_another_device_has_no_effect(fake_wgmma):
    adopt(4096, "mma_sync", "small", name="NVIDIA H100")
    assert choose(size=4096).implementation == "wgmma"


def test_an_entry_that_is_rejected_is_passed_over(fake_wgmma):
    adopt(4096, "mma_sync", "small")
    fake_wgmma.rejects["mma_sync"] = "not today"
    assert choose(size=4096).implementation == "wgmma"


def test_a_choice_takes_one_pass_over_the_configs(fake_wgmma, monkeypatch):
    """One prediction and one question to the module for all of them, and none the next time."""
    predicted, asked = [], []
    predict, rejections = prediction.predict, fake_wgmma.rejections
    monkeypatch.setattr(
        prediction, "predict", lambda *args: [predicted.append(args), predict(*args)][1]
    )
    fake_wgmma.rejections = lambda *args: [asked.append(args[0]), rejections(*args)][1]

    def steps_per_config(num_splits):
        many = [f"{base}_split{i}" for base in WGMMA for i in range(2, num_splits)]
        fake_wgmma.implementations = lambda: {"wgmma": [*WGMMA, *many], "cublaslt": ["heuristic0"]}
        selection.forget()
        choose(size=2048)
        predicted.clear()
        asked.clear()
        count = steps(lambda: choose(size=4096))
        assert len(predicted) == 1
        assert asked == ["wgmma"]
        assert 10 < steps(lambda: choose(size=4096)) < 150
        return count / (len(WGMMA) + len(many))

    assert 1 < steps_per_config(80) <= steps_per_config(20) < 60


def test_collecting_sees_what_is_left_to_us(fake_cuda):
    with selection.collect() as outer, selection.collect() as inner:
        choose(size=64)
        selection.select(CallOptions("matmul", "wgmma"), problem(size=96), GPU)
    choose(size=128)
    assert inner == outer == [(problem(size=64), GPU)]


def test_debug_switches_force_and_print(monkeypatch, capsys):
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "host")
    monkeypatch.setenv("TCGEMM_CONFIG", "portable")
    monkeypatch.setenv("TCGEMM_PRINT_CHOICE", "1")
    choice = selection.select(CallOptions("matmul"), problem(), CPU)
    assert (choice.implementation, choice.config) == ("host", "portable")
    assert "64x64x64 NN bf16->bf16 (f32): host/portable: forced by" in capsys.readouterr().err
    assert selection.select(CallOptions("matmul", "xla"), problem(), CPU).implementation == "xla"
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "magic")
    with pytest.raises(
        ValueError, match="matmul: TCGEMM_IMPLEMENTATION must be one of .*TION='magic'; unset"
    ):
        selection.select(CallOptions("matmul"), problem(), CPU)
    jax_tcgemm.debug_switches()
    assert "TCGEMM_IMPLEMENTATION=magic" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["", "0", "false", "OFF", "no"])
def test_a_switch_can_be_off(value, monkeypatch, capsys):
    monkeypatch.setenv("TCGEMM_PRINT_CHOICE", value)
    selection.select(CallOptions("matmul"), problem(), CPU)
    jax.jit(lambda x: jax_tcgemm.blas.scal(2, x)).lower(jnp.ones(3))
    jax.jit(lambda x: jax_tcgemm.tensor.permute("i->i", x)).lower(jnp.ones(3))
    assert capsys.readouterr().err == ""


def test_a_refusal_of_what_a_variable_asks_for_names_the_variable(monkeypatch):
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "wgmma")
    says = (
        "TCGEMM_IMPLEMENTATION must be able to run the product, got TCGEMM_IMPLEMENTATION='wgmma'"
    )
    with pytest.raises(ValueError, match=f"^matmul: {says}: wgmma cannot run this: .*; unset"):
        selection.select(CallOptions("matmul"), problem(), CPU)
    with pytest.raises(ValueError, match=f"^matmul: {says}: wgmma cannot run this: no product"):
        selection.select(CallOptions("matmul"), None, CPU, obstacle="no product")
    with pytest.raises(ValueError, match="^matmul: implementation must .*; None selects one"):
        selection.select(CallOptions("matmul", "mma_sync"), problem(), CPU)


@pytest.mark.parametrize(("name", "runs"), [("host", "gemm host/"), ("xla", "xla default")])
def test_a_variable_says_what_runs_the_product_of_a_contraction(name, runs, monkeypatch):
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", name)
    x = jnp.ones((8, 8))
    f = functools.partial(jax_tcgemm.tensor.einsum, "ij,jk->ik")
    (call,) = jax_tcgemm.explain(f, x, x, platform="cpu")
    assert f"{call.implementation} {call.config}".startswith(runs)


def test_a_config_needs_an_implementation(monkeypatch):
    monkeypatch.setenv("TCGEMM_CONFIG", "portable")
    says = "matmul: TCGEMM_CONFIG must come with an implementation, got TCGEMM_CONFIG='portable'"
    with pytest.raises(ValueError, match=f"{says}; give TCGEMM_IMPLEMENTATION, too"):
        selection.select(CallOptions("matmul"), problem(), CPU)
    # Of a call that names one itself it says nothing.
    assert selection.select(CallOptions("matmul", "host", "auto"), problem(), CPU).config == "auto"


def cpu_candidates(*refused):
    """Those of a CPU; `refused`: instruction sets that it lacks."""
    hosts = [
        selection.Candidate("host", name, f"this CPU has no {name}" if name in refused else "")
        for name in ("auto", "avx512", "avx2", "portable")
    ]
    return *hosts, selection.Candidate("xla", "default", "")


def of_shape(dtype, m, n, k, layout="NN", batch=1):
    """A product of packed matrices."""
    a = Operand(dtype, layout[0] == "T", m if layout[0] == "T" else k)
    b = Operand(dtype, layout[1] == "T", k if layout[1] == "T" else n)
    out = "s32" if dtype in ("s8", "u8") else dtype
    extents = {"batch": batch, "batch_inner": batch, "m": m, "n": n, "k": k}
    return problem(dtype, out, **extents, a=a, b=b)


GAINS = [
    of_shape("f64", 4, 4, 4, batch=64),
    of_shape("f32", 512, 32, 64, "TN"),
    of_shape("bf16", 2048, 2, 64, "TN"),
    of_shape("f16", 512, 1, 512),
    of_shape("u8", 128, 128, 128, "TN"),
    of_shape("c64", 128, 64, 128),
    of_shape("c128", 4096, 64, 64, "TT"),
    RaggedProblem("rows", 1, 64, 32, 32, 4, 4, *(False,) * 4, "f32", "f32", "f32"),
    RowsProblem("sums", 128, 0, 64, 128, 64, True, "f32"),
]
LOSSES = [
    *(of_shape(dtype, 4, 4, 4) for dtype in ("f32", "f64", "bf16", "f16", "s8", "c64")),
    *(of_shape(dtype, 64, 1, 64) for dtype in ("f32", "f64", "bf16", "s8", "c64")),
    *(of_shape(dtype, 1, 4096, 4096) for dtype in ("f32", "f64", "bf16", "s8", "c64")),
    *(of_shape(dtype, 1024, 1024, 1024, "TN") for dtype in ("f32", "f64", "bf16")),
    *(of_shape("f32", size, size, size, batch=1000) for size in (3, 8)),
    of_shape("f32", 8, 8, 1, batch=1000),
    of_shape("c64", 64, 64, 64),
    of_shape("f32", 512, 32, 64, "NN"),
    of_shape("f32", 512, 64, 64, "TN"),
    of_shape("s8", 512, 512, 512, "NN"),
    RaggedProblem("rows", 1, 16, 16, 16, 4, 4, *(False,) * 4, "f32", "f32", "f32"),
    RowsProblem("sums", 64, 0, 32, 64, 32, True, "f32"),
]


@pytest.mark.parametrize("shape", GAINS, ids=str)
def test_host_runs_what_it_gains_at(shape, cpu_rule):
    candidates = cpu_candidates("avx512")
    assert rules.on_cpu(shape, candidates)[0].implementation == "host"


@pytest.mark.parametrize("shape", LOSSES, ids=str)
def test_xla_runs_the_rest_on_a_cpu(shape, cpu_rule):
    assert rules.on_cpu(shape, cpu_candidates())[0].implementation == "xla"


def test_host_runs_no_product_without_vector_instructions(cpu_rule):
    product, grouped = GAINS[0], GAINS[-2]
    candidates = cpu_candidates("avx512", "avx2")
    best, why = rules.on_cpu(product, candidates)
    assert best.implementation == "xla"
    assert "host is known beside XLA's own product with AVX2 or AVX-512" in why
    assert rules.on_cpu(grouped, candidates)[0].implementation == "host"


def test_the_query_is_what_the_modules_take():
    device = CPU.query()
    query = problem().query()
    for config in modules.cpu.implementations()["host"]:
        assert isinstance(modules.cpu.reject("host", config, query, device), str)
        assert modules.cpu.workspace_bytes("host", config, query, device) >= 0


def test_problem_counts_distinct_elements():
    dense = problem(size=100)
    assert dense.flops == 2 * 100**3
    assert dense.bytes == 3 * 2 * 100**2
    shared = Operand("bf16", False, 100)
    own = Operand("bf16", False, 100, 0, 100**2)
    batched = problem(size=100, batch=8, batch_inner=8, a=own, b=shared)
    assert batched.bytes == (8 + 1 + 8) * 2 * 100**2
    two_levels = problem(
        size=100, batch=8, batch_inner=4, a=dataclasses.replace(shared, outer_stride=10**4), b=own
    )
    assert two_levels.bytes == (2 + 4 + 8) * 2 * 100**2
    assert problem("c64", "c64").flops == 4 * problem().flops
    assert problem(beta=1.0).bytes == 4 * 2 * 64**2


F16, BF16, F32, F64 = map(jnp.dtype, ("float16", "bfloat16", "float32", "float64"))
S8, U8, S32, S64, C64 = map(jnp.dtype, ("int8", "uint8", "int32", "int64", "complex64"))


@pytest.mark.parametrize(
    ("lhs", "rhs", "result", "precision", "cuda", "cpu"),
    [
        (BF16, BF16, BF16, None, Numerics(BF16, BF16, BF16, "f32"), ...),
        (F16, F16, F32, "highest", Numerics(F16, F16, F32, "f32"), ...),
        (F16, F16, F16, "F16_F16_F16", Numerics(F16, F16, F16, "f16"), ...),
        (F16, F16, F32, "F16_F16_F16", Numerics(F16, F16, F16, "f16"), ...),
        (F32, F32, F32, None, Numerics(F32, F32, F32, "tf32"), Numerics(F32, F32, F32, "f32")),
        (F32, F32, F32, "high", Numerics(F32, F32, F32, "tf32"), Numerics(F32, F32, F32, "f32")),
        (F32, F32, F32, ("default", "highest"), Numerics(F32, F32, F32, "f32"), ...),
        (
            F32,
            F32,
            F32,
            "TF32_TF32_F32",
            Numerics(F32, F32, F32, "tf32"),
            Numerics(F32, F32, F32, "f32"),
        ),
        (F32, F32, F32, "F32_F32_F32", Numerics(F32, F32, F32, "f32"), ...),
        (F32, F32, F32, "F16_F16_F32", Numerics(F16, F16, F32, "f32"), ...),
        (BF16, BF16, BF16, "BF16_BF16_F32", Numerics(BF16, BF16, BF16, "f32"), ...),
        (F32, F32, F32, "BF16_BF16_F32", "rounds float32 operands", ...),
        (F32, F32, F32, "BF16_BF16_BF16", "no implementation has the algorithm", ...),
        (F32, F32, F32, lax.DotAlgorithm(F32, F32, F32), "lax.DotAlgorithm", ...),
        (C64, C64, C64, None, Numerics(C64, C64, C64, "tf32"), Numerics(C64, C64, C64, "f32")),
        (C64, C64, C64, "F32_F32_F32", "real operands", ...),
        (F64, F64, F32, None, Numerics(F64, F64, F64, "f64"), ...),
        (BF16, F32, F32, "highest", Numerics(F32, F32, F32, "f32"), ...),
        (F32, F32, F64, None, "makes float64 from float32", ...),
        (S8, S8, S8, None, Numerics(S8, S8, S32, "s32"), ...),
        (U8, U8, S32, None, Numerics(U8, U8, S32, "s32"), ...),
        (S8, U8, S32, None, Numerics(S8, U8, S32, "s32"), ...),
        (U8, S8, S8, None, Numerics(U8, S8, S32, "s32"), ...),
        (U8, S8, S64, None, "makes int64 from uint8 and int8", ...),
        (S8, S8, S64, None, "makes int64 from int8", ...),
        (S32, S32, S32, None, "multiplies int32", ...),
    ],
    ids=str,
)
def test_numerics(lhs, rhs, result, precision, cuda, cpu):
    for platform, expected in (("cuda", cuda), ("cpu", cuda if cpu is ... else cpu)):
        got = resolve(lhs, rhs, result, canonical_precision("dot_general", precision), platform)
        assert expected in got if isinstance(expected, str) else got == expected
