"""The command line."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_tcgemm.bench import records
from jax_tcgemm.cli import app

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def invoke():
    """Runs a command in this process; returns its exit code and all its output."""

    def run(*arguments):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


@pytest.mark.parametrize("place", ["elsewhere", "checkout"])
def test_module_runs_anywhere(place, tmp_path):
    # In the checkout's root the sources hide the installed package.
    done = subprocess.run(
        [sys.executable, "-m", "jax_tcgemm", "info"],
        cwd=REPOSITORY if place == "checkout" else tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "host" in done.stdout
    assert "mma_sync" in done.stdout


def test_help_names_the_commands(invoke):
    code, text = invoke("--help")
    assert code == 0
    for command in ("info", "demo", "bench", "fragment"):
        assert command in text


def test_info(invoke):
    code, text = invoke("info")
    assert code == 0
    assert "implementation" in text


def test_demo_prints_both_accuracies_and_what_ran(invoke):
    code, text = invoke("demo", "--steps", 20, "--implementation", "xla")
    assert code == 0
    assert "test accuracy" in text
    assert "jnp.matmul" in text
    assert "xla/default" in text
    assert "asked for by name" in text


def test_demo_with_an_unknown_implementation_says_what_there_is(invoke):
    code, text = invoke("demo", "--implementation", "nope")
    assert code == 1
    assert "error: matmul: implementation must be one of" in text
    assert "Traceback" not in text


def test_fragment_prints_a_grid(invoke):
    code, text = invoke("fragment", "m16n16k16", "f16", "c")
    assert code == 0
    assert len(text.splitlines()) >= 16


def test_fragment_refuses_an_unknown_shape(invoke):
    code, text = invoke("fragment", "m1n1k1", "f16", "c")
    assert code == 1
    assert text.startswith("error: ")


def test_bench_lists_its_suites(invoke):
    code, text = invoke("bench", "--list")
    assert code == 0
    assert "squares" in text
    assert "llama" in text


def test_bench_measures_records_and_draws(invoke, tmp_path):
    out, plot = tmp_path / "records.jsonl", tmp_path / "chart.png"
    arguments = ["--suite", "smoke", "--impl", "auto", "--peers", "xla", "--repeats", 5]
    code, text = invoke("bench", *arguments, "--dtype", "f32", "--out", out, "--plot", plot)
    assert code == 0, text
    found = records.read_records([out])
    assert {record["dtype"] for record in found} == {"f32"}
    assert len(found) == 6
    assert plot.stat().st_size > 10_000
    assert "auto: geomean" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "suite must be given, got suite=None"),
        (["--suite", "nope"], "suite must be one of"),
        (["--suite", "smoke", "--impl", "nope"], "impl must be auto, all or one of"),
        (["--suite", "smoke", "--peers", "nope"], "peers must be among xla, cublaslt"),
        (["--suite", "smoke", "--dtype", "f12"], "dtype must be one of"),
        (["--suite", "smoke", "--timer", "sundial"], "timer must be"),
    ],
)
def test_bench_refuses_what_it_does_not_know(invoke, arguments, message):
    code, text = invoke("bench", *arguments)
    assert code == 1
    assert message in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--suite", "smoke_moe"], "a problem must be a product"),
        (["tune", "--shape", "8,8,8", "--out", "nowhere/table.json"], "out must lie in a folder"),
        (["bench", "parallel", "--devices", "two"], "invalid literal for int"),
        (["bench", "render", "--root", "nowhere"], "nowhere"),
    ],
)
def test_errors_are_told_without_a_traceback(invoke, arguments, message):
    code, text = invoke(*arguments)
    assert code == 1
    assert message in text


def test_bench_overhead_writes_its_records(invoke, tmp_path):
    out = tmp_path / "records.jsonl"
    code, text = invoke("bench", "overhead", "--samples", 2, "--impl", "xla", "--out", out)
    assert code == 0
    assert "products a step" in text
    assert [r["kind"] for r in records.read_records([out])] == ["overhead", "overhead"]


def test_bench_render_checks_the_committed_documents(invoke):
    code, text = invoke("bench", "render", "--root", REPOSITORY, "--check")
    assert code == 0, text
