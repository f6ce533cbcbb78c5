"""The command line."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import jax_tcgemm
from jax_tcgemm.bench import records
from jax_tcgemm.command import cli
from jax_tcgemm.command.cli import app

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


def test_info_as_json_has_the_facts_of_the_text(invoke):
    """Parsed, it is what `info` returns; and the tables print each of its facts."""
    code, text = invoke("info", "--json")
    assert code == 0
    found = json.loads(text)
    expected = jax_tcgemm.info()
    assert found == json.loads(json.dumps(dataclasses.asdict(expected))) == expected.as_dict()
    printed = " ".join(invoke("info")[1].split())
    for component, version in found["versions"].items():
        assert f"{component} {' '.join(version.split())}" in printed
    for entry in found["implementations"]:
        available = "yes" if entry["available"] else "no"
        assert f"{entry['name']} {entry['platform']} {available}" in printed
    for gpu in found["gpus"]:
        assert gpu["name"] in printed
    for name, count in found["plan_cache"].items():
        assert f"{name} {count}" in printed


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
        (["--suite", "smoke", "--budget", "nan"], "budget must be a positive, finite number"),
        (["--suite", "smoke", "--budget", "-1"], "budget must be a positive, finite number"),
        (
            ["--suite", "smoke", "--impl", "host", "--config", "magic"],
            "config must be one of auto, avx512, avx2, portable of host, got config='magic'",
        ),
        (
            ["--suite", "smoke", "--config", "portable"],
            "config must come with an implementation that has configs, got config='portable' and "
            "impl='auto'",
        ),
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
        (["tune", "--shape", "8,8,8", "--out", "/dev/null"], "must be a regular file"),
        (["tune", "--shape", "8,8,8", "--budget", "inf"], "budget must be a positive"),
        (["bench", "regret", "--scale", "inf"], "scale must be a positive"),
        (["tune", "--shape", "2000000000,1000000,8"], "a problem must fit in the memory of"),
        (["bench", "parallel", "--devices", "two"], "devices must be numbers"),
        (["bench", "programs", "--only", "magic"], "only must be in the name of a program"),
        (["bench", "programs", "--suite", "smoke_moe"], "a suite must be of products"),
        (["bench", "parallel", "--devices", "0"], "devices must be from 1 to 8 here, got"),
        (["bench", "parallel", "--devices", "3"], "must be multiples of devices, got tokens=8192"),
        (["bench", "parallel", "--dtype", "magic"], "dtype must be a floating-point dtype"),
        (["bench", "parallel", "--chunks", "a"], "chunks must be numbers"),
        (["bench", "render", "--root", "nowhere"], "nowhere"),
    ],
)
def test_errors_are_told_without_a_traceback(invoke, arguments, message):
    code, text = invoke(*arguments)
    assert code == 1
    assert message in text


@pytest.mark.parametrize("arguments", [["info"], ["fragment", "m16n16k16", "f16", "c"]])
def test_a_reader_may_leave_early(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jax_tcgemm", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_demo_prints_what_the_output_can_encode():
    command = [sys.executable, "-m", "jax_tcgemm", "demo", "--steps", "2"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"test accuracy" in done.stdout


def test_tune_writes_nothing_where_it_could_not(invoke, tmp_path, monkeypatch):
    """It says so before it measures anything."""
    measured = []
    monkeypatch.setattr(cli, "tune_problems", lambda *_, **__: measured)
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("TCGEMM_CACHE_DIR", str(tmp_path / "cache"))
    os.mkfifo(tmp_path / "fifo")
    for out in ([], ["--out", tmp_path / "fifo"]):
        code, text = invoke("tune", "--shape", "8,8,8", *out)
        assert code == 1
        assert text.startswith("error: tune: the table must be written, got ")
    assert (tmp_path / "fifo").is_fifo()


def test_bench_overhead_writes_its_records(invoke, tmp_path):
    out = tmp_path / "records.jsonl"
    code, text = invoke("bench", "overhead", "--samples", 2, "--impl", "xla", "--out", out)
    assert code == 0
    assert "products a step" in text
    assert [r["kind"] for r in records.read_records([out])] == ["overhead", "overhead"]


def test_bench_programs_writes_its_records(invoke, tmp_path):
    out = tmp_path / "records.jsonl"
    for what in (["--only", "width 2"], ["--suite", "smoke", "--impl", "xla"]):
        code, text = invoke("bench", "programs", *what, "--samples", 2, "--out", out)
        assert code == 0, text
        assert "plain JAX, µs" in text
    found = records.read_records([out])
    assert [r["group"] for r in found][:2] == ["models", "products"]
    assert {r["kind"] for r in found} == {"program"}


def test_bench_render_checks_the_committed_documents(invoke):
    code, text = invoke("bench", "render", "--root", REPOSITORY, "--check")
    assert code == 0, text
