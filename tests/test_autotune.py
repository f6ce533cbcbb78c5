"""autotune: every product found, measured outside the program, and used afterwards."""

import math
import re
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from epilogue_call import Fused
from jax import lax
from typer.testing import CliRunner

import jax_tcgemm
from jax_tcgemm import selection
from jax_tcgemm.command.cli import app
from jax_tcgemm.device.fusion.results import result_arrays
from jax_tcgemm.problem.call_options import CallOptions
from jax_tcgemm.problem.gemm import Operand, Problem
from jax_tcgemm.selection import tables
from jax_tcgemm.selection.observation import _collectors
from jax_tcgemm.tuning import autotune, measuring, timing

# In the package, this name is the function.

X = jax.ShapeDtypeStruct((48, 48), jnp.float32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no tables from other tests."""
    monkeypatch.setenv("TCGEMM_CACHE_DIR", str(tmp_path / "cache"))
    tables.reset()
    yield tmp_path / "cache"
    tables.reset()
    jax.clear_caches()


@pytest.fixture
def measured(monkeypatch):
    """Makes the last contender win without measuring; gives the list of problems asked for."""
    found = []

    def measure(problem, names, budget_s):
        assert not isinstance(jnp.zeros(()), jax.core.Tracer)
        found.append(problem)
        times = [measuring.Measurement(*name, 10.0 + i) for i, name in enumerate(reversed(names))]
        return times

    monkeypatch.setattr(autotune, "measure", measure)
    return found


def loss(x, w):
    def step(x, _):
        return jax_tcgemm.matmul(x, w), None

    x, _ = lax.scan(step, x, length=3)
    return jnp.sum(jax_tcgemm.matmul(x, w, implementation="host"))


def test_every_distinct_product_is_tuned_and_used(measured, cache):
    result = jax_tcgemm.autotune(jax.grad(loss, (0, 1)), X, X, progress=False)
    layouts = [tuned.problem.layout for tuned in result]
    assert sorted(layouts) == ["NN", "NT", "TN"]
    assert measured == [tuned.problem for tuned in result]
    assert result.path.parent == cache
    for call in jax_tcgemm.explain(jax.grad(loss, (0, 1)), X, X):
        if call.why.startswith("asked"):
            continue
        tuned = next(t for t in result if t.problem == call.problem)
        assert call.why == f"measured, {tuned.best.us:.4g} us (autotune in this process)"
        assert f"{call.implementation}/{call.config}" == tuned.best.name
    text = str(result)
    assert "48x48x48 TN f32->f32 (f32)" in text
    assert "us before" in text


def test_a_later_process_reads_the_cache(measured, cache):
    result = jax_tcgemm.autotune(jax_tcgemm.matmul, X, X, progress=False)
    tables.reset()
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, X, X)
    assert call.why == f"measured, {result[0].best.us:.4g} us (user cache {result.path})"


def test_without_the_cache_nothing_is_written(measured, cache):
    result = jax_tcgemm.autotune(jax_tcgemm.matmul, X, X, progress=False, cache=False)
    assert result.path is None
    assert not cache.exists()


def test_save_and_load(measured, tmp_path):
    result = jax_tcgemm.autotune(jax_tcgemm.matmul, X, X, progress=False, cache=False)
    path = tmp_path / "table.json"
    result.save(path)
    tables.reset()
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, X, X)
    assert "measured" not in call.why
    assert jax_tcgemm.tuning.load(path) == result.table
    (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, X, X)
    assert call.why == f"measured, {result[0].best.us:.4g} us (table {path})"


def test_as_a_context_it_tunes_at_the_end_and_compiles_again(measured):
    chosen = []
    original = selection.select

    @jax.jit
    def f(x):
        chosen.append(original(CallOptions("f"), *measured_problem(x)))
        return jax_tcgemm.matmul(x, x)

    def measured_problem(x):
        (call,) = jax_tcgemm.explain(jax_tcgemm.matmul, x, x)
        return call.problem, selection.target_device("cpu")

    x = jnp.ones((24, 24))
    expected = f(x)
    assert len(chosen) == 1
    with jax_tcgemm.autotune(progress=False) as result:
        f(x)
        assert len(chosen) == 2
        assert len(result) == 0
        assert measured == []
    assert [tuned.problem.m for tuned in result] == [24]
    assert measured
    np.testing.assert_allclose(f(x), expected, rtol=1e-5)
    assert len(chosen) == 3
    assert chosen[0].config != chosen[2].config
    assert chosen[2].why.startswith("measured")
    f(x)
    assert len(chosen) == 3


def test_a_context_used_again_has_its_last_result(measured):
    tuned = jax_tcgemm.autotune(progress=False)
    for size in (24, 16):
        with tuned:
            jax_tcgemm.matmul(jnp.ones((size, size)), jnp.ones((size, size)))
        assert [each.problem.m for each in tuned] == [size]


@pytest.fixture
def interrupted(measured, monkeypatch):
    """The same, but the third problem is interrupted."""
    measure = autotune.measure

    def measure_two(problem, names, budget_s):
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(problem, names, budget_s)

    monkeypatch.setattr(autotune, "start_up", lambda device: None)
    monkeypatch.setattr(autotune, "measure", measure_two)


def test_what_was_measured_until_an_interruption_is_kept(interrupted, cache):
    def f(x):
        for size in (48, 40, 32):
            jax_tcgemm.matmul(x[:size, :size], x[:size, :size])

    tuned = jax_tcgemm.autotune(progress=False)
    with pytest.raises(KeyboardInterrupt), tuned:
        f(jnp.ones((48, 48)))
    assert [each.problem.m for each in tuned] == [48, 40]
    assert tables.read_table(tuned.path) == tuned.table


def test_an_interrupted_tune_writes_what_it_has(interrupted, tmp_path):
    out = tmp_path / "table.json"
    shapes = [word for size in (48, 40, 32) for word in ("--shape", f"{size},{size},{size}")]
    code, text = run(*shapes, "--out", out)
    assert code != 0
    assert "wrote" in text
    entries = tables.read_table(out).entries
    assert [key.split()[0] for key in entries] == ["40x40x40", "48x48x48"]


def test_a_context_that_fails_tunes_nothing(measured):
    def step():
        jax_tcgemm.matmul(jnp.ones((8, 8)), jnp.ones((8, 8)))
        raise RuntimeError("stop")

    result = jax_tcgemm.autotune(progress=False)
    with pytest.raises(RuntimeError, match="stop"), result:
        step()
    assert measured == []
    assert len(result) == 0
    assert _collectors == []


def test_nothing_is_measured_while_tracing(measured):
    def f(x):
        jax_tcgemm.autotune(jax_tcgemm.matmul, x, x, progress=False)

    with pytest.raises(ValueError, match="autotune: it must be called outside traced functions"):
        jax.jit(f)(jnp.ones((8, 8)))
    with pytest.raises(ValueError, match="outside traced functions"):
        jax.jit(lambda: jax_tcgemm.autotune().__enter__())()
    assert measured == []


def test_arguments_are_checked():
    with pytest.raises(
        ValueError, match="autotune: budget_s must be a positive, finite number, got budget_s=0"
    ):
        jax_tcgemm.autotune(jax_tcgemm.matmul, X, X, budget_s=0)
    with pytest.raises(ValueError, match="autotune: arguments must come with a function"):
        jax_tcgemm.autotune(x=X)


def test_a_function_without_products():
    result = jax_tcgemm.autotune(jnp.matmul, X, X, progress=False)
    assert len(result) == 0
    assert str(result) == "No product of jax_tcgemm was tuned."


def test_the_present_choice_stays_when_the_gain_is_noise():
    problem = Problem(1, 1, 8, 8, 8, *[Operand("f32", False, 8)] * 2, "f32", "f32")
    now = selection.Choice("host", "auto", "")
    close = [
        measuring.Measurement("xla", "default", 1.0),
        measuring.Measurement("host", "auto", 1.005),
    ]
    assert autotune.decide(problem, now, close).best.name == "host/auto"
    clear = [close[0], measuring.Measurement("host", "auto", 1.5)]
    assert autotune.decide(problem, now, clear).best.name == "xla/default"
    assert autotune.decide(problem, now, clear[:1]).before is None


def test_the_documented_examples_run(measured, capsys):
    text = Path(__file__).resolve().parents[1].joinpath("docs", "tuning.md").read_text("utf-8")
    namespace: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "docs/tuning.md", "exec"), namespace)
    assert capsys.readouterr().out.count("512x256x64 TN f32->f32 (f32)") == 2


# --- measuring ----------------------------------------------------------------------------------

DENSE = Operand("bf16", True, 40, 0, 800)
STRIDED = Operand("bf16", False, 60, 5, 20)


PROBLEMS = {
    "layouts": Problem(
        1, 1, 40, 30, 20, Operand("f32", True, 40), Operand("f32", True, 20), "f32", "f32"
    ),
    "batched": Problem(3, 3, 40, 30, 20, DENSE, Operand("bf16", False, 30, 0, 600), "f32", "f32"),
    "integers": Problem(
        1, 1, 8, 8, 8, Operand("s8", False, 8), Operand("s8", False, 8), "s32", "s32"
    ),
    "doubles": Problem(
        1, 1, 8, 8, 8, Operand("f64", False, 8), Operand("f64", False, 8), "f64", "f64"
    ),
    "scaled": Problem(
        *(1, 1, 40, 30, 20, Operand("f32", False, 20), Operand("f32", False, 30), "f32", "f32"),
        alpha=0.5,
        beta=2.0,
    ),
    "strided": Problem(6, 3, 10, 30, 20, STRIDED, Operand("bf16", False, 30), "bf16", "f32"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_contenders_compute_the_same(monkeypatch, problem):
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "host")  # the choice, whatever the processor
    device = selection.target_device("cpu")
    names = measuring.contenders(problem, device, 20)
    assert names[0][0] == "host"
    assert ("xla" in dict(names)) == (problem is not PROBLEMS["strided"])
    with jax.enable_x64(True):
        (operands,) = measuring._make_inputs(problem, 1)
        assert jnp.std(operands[0].astype(jnp.float32)) > 0.5
        results = [
            [
                np.asarray(x, np.float64).ravel()
                for x in jax.tree.leaves(measuring._function(problem, *name)(*operands))
            ]
            for name in names
        ]
    for result in results[1:]:
        for x, first in zip(result, results[0], strict=True):
            np.testing.assert_allclose(x, first, rtol=0.02, atol=0.02 * abs(first).max())


def test_functions_have_operands_to_be_measured_with():
    """Flat ones, as long as what is read of them."""
    case = Fused(m=24, n=40, k=16, activation="silu", gated=True, bias="n", aux_out=True, beta=0.5)
    shapes = measuring._operand_shapes(case.problem)
    a, b, *others = [math.prod(shape) for shape, _ in shapes]
    assert (a, b) == (24 * 16, 16 * 2 * 40)
    assert sorted(others) == [2 * 40, 24 * 40]
    d, saved = result_arrays(case.problem)
    assert (d.shape, saved.shape) == ((1, 24, 40), (1, 24, 2, 40))


def test_measurements_are_sorted_and_within_the_budget():
    problem = PROBLEMS["layouts"]
    names = [("host", "auto"), ("xla", "default"), ("host", "portable"), ("host", "not a config")]
    found = measuring.measure(problem, names, 0.5)
    assert {m.name for m in found} <= {"/".join(name) for name in names[:3]}
    assert "host/auto" in {m.name for m in found}
    assert [m.us for m in found] == sorted(m.us for m in found)


def test_a_budget_too_short_to_compile_is_told(monkeypatch):
    names = [("host", "auto"), ("xla", "default"), ("host", "portable")]
    original = measuring._compile
    monkeypatch.setattr(measuring, "_compile", lambda *args: original(*args)[:1])
    with pytest.warns(UserWarning, match=r"1 of 3 ways to run .* in 0\.25 s, half of the budget"):
        found = measuring.measure(PROBLEMS["layouts"], names, 0.5)
    assert [m.name for m in found] == ["host/auto"]


def test_without_a_trace_the_wall_clock_is_used(monkeypatch):
    problem = PROBLEMS["layouts"]
    names = [("host", "auto"), ("xla", "default")]
    asked = []
    original = timing.measure

    def measure(*args, timer, **kwargs):
        asked.append(timer)
        if timer == "trace":
            raise timing.TraceError("lost")
        return original(*args, timer=timer, **kwargs)

    monkeypatch.setattr(timing, "measure", measure)
    operands = measuring._make_inputs(problem, 2)
    runnables = measuring._compile(problem, names, time.perf_counter() + 60, operands[0])
    times = measuring._times(runnables, operands, [2, 2], 0, on_gpu=True)
    assert asked == ["trace", "trace", "chained"]
    assert set(times) == {"host/auto", "xla/default"}


def test_the_model_ranks_what_is_measured(fake_cuda):
    fake_cuda.implementations = lambda: {
        "wgmma": [f"{m}x{n}x64_c1x1x1_pp" for m in (64, 128) for n in (32, 64, 128)],
        "cublaslt": ["heuristic0", "heuristic1"],
        "mma_sync": ["small"],
    }
    # So large that the choice is not XLA's own kernel.
    problem = Problem(1, 1, 512, 512, 512, *[Operand("bf16", False, 512)] * 2, "bf16", "f32")
    names = measuring.contenders(problem, selection.ASSUMED_GPU, 3)
    assert [name for name, _ in names].count("wgmma") >= 2
    assert ("cublaslt", "heuristic1") in names
    assert ("xla", "default") in names
    assert not any(name == "mma_sync" for name, _ in names)
    without = measuring.contenders(problem, selection.ASSUMED_GPU, 3, xla=False)
    assert ("xla", "default") not in without


def test_a_slow_contender_is_left_out_but_for_the_one_to_compare_with(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measuring, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))

    def sleeper(seconds):
        def function(x):
            clock[0] += seconds
            return x

        return timing.Runnable(f"sleep/{seconds}", "", function)

    def fails(x):
        raise RuntimeError("no such kernel")

    sleepers = [sleeper(0.02), sleeper(0.001), sleeper(0.03)]
    runnables = [*sleepers, timing.Runnable("fails/always", "", fails)]
    alive, seconds = measuring._warm_up(runnables, [jnp.ones(1)], 60)
    assert [r.name for r in alive] == ["sleep/0.02", "sleep/0.001"]
    exact = {"sleep/0.02": 0.02, "sleep/0.001": 0.001, "sleep/0.03": 0.03}
    assert seconds == pytest.approx(exact)


# --- the command --------------------------------------------------------------------------------


def run(*arguments):
    result = CliRunner().invoke(app, ["tune", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_tune_writes_and_merges_tables(tmp_path):
    out = tmp_path / "table.json"
    code, text = run("--shape", "16,24,32", "--layout", "NN,TN", "--out", out, "--budget", 0.3)
    assert code == 0, text
    assert len(tables.read_table(out).entries) == 2
    code, text = run(
        *("--shape", "2,8,8,8", "--dtype", "f32", "--out", out, "--merge", "--budget", 0.3),
        *("--provenance", "a test"),
    )
    assert code == 0, text
    found = tables.read_table(out)
    assert "16x24x32 TN bf16->bf16 (f32)" in found.entries
    assert "2 x 8x8x8 NN f32->f32 (f32)" in found.entries
    assert found.provenance == "a test"
    assert found.device == selection.target_device("cpu").key


def test_tune_goes_to_the_cache_by_default(cache):
    code, text = run("--suite", "smoke", "--dtype", "f32", "--budget", 0.2)
    assert code == 0, text
    (path,) = cache.glob("*.json")
    assert len(tables.read_table(path).entries) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "problems must come from --suite or --shape"),
        (["--shape", "3,4,5", "--budget", 0], "budget must be a positive, finite number"),
        (["--shape", "3,4"], "shape must be M,N,K or BATCH,M,N,K, got shape='3,4'"),
        (["--shape", "3,4,5", "--layout", "NX"], "layout must be one of"),
        (["--suite", "nope"], "suite must be one of"),
    ],
)
def test_tune_refuses_what_it_does_not_know(arguments, message):
    code, text = run(*arguments)
    assert code == 1
    assert message in text
