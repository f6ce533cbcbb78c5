"""The command line."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bench_cases import draw_by_numpy
from typer.testing import CliRunner

import jax_tcgemm
from jax_tcgemm.bench import records
from jax_tcgemm.command import cli
from jax_tcgemm.command.cli import app
from jax_tcgemm.inspect.explain import Call

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
    for command in ("info", "explain", "demo", "bench", "tune", "fragment"):
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


MODEL = """
import jax
import jax.numpy as jnp
import jax_tcgemm

NUMBER = 3


def layer(x, w, scale):
    return jax_tcgemm.matmul(x, w) * scale


def loss(x, w, labels):
    jax.debug.callback(lambda: open("ran", "w").close())
    y = jax_tcgemm.matmul(x, w)
    return {"loss": y[:, 0].sum(), "right": jnp.argmax(y, 1) == labels}


class Net:
    layer = staticmethod(jax.jit(layer))


def mismatch(x, w):
    return jax_tcgemm.matmul(x, w)
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with modules of a user's, which is the current one."""
    (tmp_path / "model_of_user.py").write_text(MODEL)
    (tmp_path / "lacks_of_user.py").write_text("import a_module_that_is_absent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("model_of_user", "lacks_of_user"):
        sys.modules.pop(name, None)


def test_explain_prints_what_explain_returns(invoke, model):
    """Arrays as large as these could not be made."""
    shapes = "bf16[4194304,1048576]", "bf16[1048576, 2097152]", "f32[]"
    code, text = invoke("explain", "model_of_user:layer", *shapes, "--platform", "cpu")
    assert code == 0, text
    layer = importlib.import_module("model_of_user").layer
    arguments = (
        jax.ShapeDtypeStruct((4194304, 1048576), jnp.bfloat16),
        jax.ShapeDtypeStruct((1048576, 2097152), jnp.bfloat16),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    assert text == f"{jax_tcgemm.explain(layer, *arguments, platform='cpu')}\n"
    assert "4194304x2097152x1048576 NN bf16->bf16 (f32)" in text


def test_explain_as_json_has_every_call(invoke, model):
    arguments = ["explain", "model_of_user:Net.layer", "f32[8,16]", "f32[16,4]", "f32[4]"]
    code, text = invoke(*arguments, "--json", "--platform", "cpu")
    assert code == 0, text
    found = json.loads(text)
    assert found["platform"] == found["device"]["platform"] == "cpu"
    (call,) = found["calls"]
    assert call["problem"] == "8x4x16 NN f32->f32 (f32)"
    assert (call["flops"], call["times"], call["path"]) == (2 * 8 * 4 * 16, 1, [])
    assert {field.name for field in dataclasses.fields(Call)} == set(call)


def test_explain_as_json_has_what_the_text_has(fake_cuda, invoke, model):
    fake_cuda.rejects["wgmma"] = "needs sm_90a"
    arguments = ["explain", "model_of_user:mismatch", "bf16[64,64]", "bf16[64,32]"]
    code, text = invoke(*arguments, "--json", "--platform", "cuda")
    assert code == 0, text
    found = json.loads(text)
    assert found["device"]["compute_capability"] == 90
    (call,) = found["calls"]
    assert call["rejected"] == {"wgmma": "needs sm_90a"}
    assert call["roofline_us"] == pytest.approx(call["bytes"] / 4.8e12 * 1e6)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_explain_of_gradients_runs_nothing(invoke, model, dtype):
    """The integer argument and the boolean result have no gradients."""
    shapes = f"{dtype}[32,16]", f"{dtype}[16,8]", "i32[32]"
    code, text = invoke("explain", "model_of_user:loss", *shapes, "--grad", "--platform", "cpu")
    assert code == 0, text
    for problem in ("32x8x16 NN", "16x8x32 TN", "32x16x8 NT"):
        assert f"{problem} {dtype}->{dtype}" in text
    assert not (model / "ran").exists()
    assert not jax.config.jax_enable_x64


def test_explain_imports_from_the_current_directory(model):
    arguments = ["model_of_user:mismatch", "f8_e4m3fn[16,64]", "f8_e4m3fn[64,8]"]
    command = [sys.executable, "-m", "jax_tcgemm", "explain", *arguments]
    done = subprocess.run(command, cwd=model, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "16x8x64 NN f8e4m3fn" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model_of_user"], "function must be MODULE:FUNCTION, got 'model_of_user'; write"),
        (["a/model.py:f"], "function must be MODULE:FUNCTION, got 'a/model.py:f'; write"),
        (["nowhere_to_find:f"], "module must be importable, got 'nowhere_to_find'; name it"),
        (["model_of_user.py:layer"], "module must be importable, got 'model_of_user.py'; name it"),
        (["model_of_user:absent"], "must be an attribute of model_of_user, got 'absent'"),
        (["model_of_user:NUMBER"], "must be a function, got an object of type int"),
        (["model_of_user:mismatch", "f32[4"], "shape must be DTYPE[SIZE,...], got 'f32[4'; write"),
        (["model_of_user:mismatch", "f32[-1]"], "write 'bf16[4096,2304]', or 'f32[]' for a scalar"),
        (["model_of_user:mismatch", "f12[4]"], "dtype must be one of bf16, f16, f32,"),
        (["model_of_user:mismatch", "f32[4]"], "of model_of_user:mismatch(x, w) must have a shape"),
        (["model_of_user:mismatch", *["f32[4]"] * 3], "got 3 of them: too many"),
        (["model_of_user:mismatch", *["i32[4]"] * 2, "--grad"], "a floating-point argument"),
        (["model_of_user:mismatch", *["f32[4]"] * 2, "--platform", "tpu"], "'tpu' is not one of"),
    ],
)
def test_explain_refuses_bad_arguments(invoke, model, arguments, message):
    code, text = invoke("explain", *arguments)
    assert code == 2
    # In a frame, which wraps it.
    assert message in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lacks_of_user:f"], "lacks_of_user must be importable, got: No module named 'a_module_"),
        (["model_of_user:mismatch", "f32[4,5]", "f32[6,7]"], "got a.shape=(4, 5) and b.shape=(6"),
        (["model_of_user:mismatch", "f32[4,5]", "f32[6,7]"], "model_of_user.py:24)"),
    ],
)
def test_explain_tells_errors_of_the_function_and_their_place(invoke, model, arguments, message):
    code, text = invoke("explain", *arguments)
    assert code == 1
    assert message in text
    assert "Traceback" not in text


def test_demo_prints_both_accuracies_and_what_ran(invoke, tmp_path):
    picture = tmp_path / "times.png"
    arguments = ["--steps", 20, "--implementation", "xla", "--picture", picture]
    code, text = invoke("demo", *arguments)
    assert code == 0
    assert picture.stat().st_size > 10_000
    assert "wrote" in text
    assert "calls with three times: selected" in text
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


def test_bench_measures_records_and_draws(invoke, tmp_path, monkeypatch):
    draw_by_numpy(monkeypatch)
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
        (["bench", "programs", "--only", "magic"], "--only must be part of a program's name"),
        (["bench", "programs", "--suite", "smoke_moe"], "every suite must be of plain products"),
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


def test_bench_programs_writes_its_records(invoke, tmp_path, monkeypatch):
    draw_by_numpy(monkeypatch)
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
