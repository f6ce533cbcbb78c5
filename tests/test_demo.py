"""The demo: both networks learn the same, it says what ran, and what a GPU would run."""

import builtins
import io
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_arrays import normal
from rich.console import Console

from jax_tcgemm import accelerate, explain, info
from jax_tcgemm.command import demo, estimates, transformer
from jax_tcgemm.system import modules


def run(num_steps, implementation=None):
    return demo.run_demo(num_steps, implementation, Console(quiet=True))


@pytest.mark.parametrize(
    "implementation",
    [None, *(e.name for e in info().implementations if e.available and e.platform == "cpu")],
    ids=str,
)
def test_reaches_the_accuracy_of_jnp(implementation):
    result = run(120, implementation)
    assert result.ours.test_accuracy > 0.9
    assert abs(result.ours.test_accuracy - result.jnp.test_accuracy) < 0.02
    assert result.ours.final_loss == pytest.approx(result.jnp.final_loss, rel=0.1)
    assert result.ours.step_us > 0


def test_every_product_forward_and_backward_is_ours():
    explanation = run(2, "xla").explanation
    assert {call.implementation for call in explanation} == {"xla"}
    # Three layers: a forward product and a weight gradient each, an input gradient for all but
    # the first.
    assert len(explanation) == 8
    assert (
        sorted(call.problem.layout for call in explanation) == ["NN"] * 3 + ["NT"] * 2 + ["TN"] * 3
    )


@pytest.fixture
def assumed_gpu(monkeypatch):
    """An H200, whatever there is here."""
    monkeypatch.setattr(modules, "cuda_device", lambda: None)


@pytest.fixture
def without(monkeypatch):
    """Makes a package be missing."""
    real = builtins.__import__

    def remove(package):
        def without_package(name, *args, **kwargs):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_package)

    return remove


def test_accelerate_finds_biases_activations_and_derivatives(assumed_gpu):
    result = run(2)
    calls = [(str(c.problem).split(" ")[0], c.epilogue) for c in result.accelerated]
    assert calls == [
        ("128x256x64", ("add", "relu", "gt")),
        ("128x256x256", ("add", "relu", "gt")),
        ("128x10x256", ()),
        ("128x256x10", ("select_n", "reduce_sum")),
        ("128x256x256", ("select_n", "reduce_sum")),
        ("256x10x128", ("mul", "add", "sub")),
        ("256x256x128", ("mul", "add", "sub")),
        ("64x256x128", ("mul", "add", "sub")),
    ]
    assert {c.implementation for c in result.accelerated} == {"wgmma", "xla"}


def test_the_transformer_step_has_fused_epilogues_and_three_times(assumed_gpu):
    calls = demo.run_demo(2, None, Console(quiet=True)).transformer
    by_kernel = [c for c in calls if c.implementation == "wgmma" and c.epilogue]
    # A residual, gelu and its derivative, the exponentials of a loss, and updates of weights.
    assert {"add", "tanh", "exp", "sub"} <= {name for c in by_kernel for name in c.epilogue}
    for call in calls:
        assert call.roofline_us <= call.estimated_us
        assert call.roofline_us <= call.xla_estimated_us
        if call in by_kernel:
            assert call.estimated_us < call.xla_estimated_us
    total = estimates.totals(calls.calls)
    once = [c for c in calls if c.times == 1]
    assert total.num_calls == len(once) == len(calls) - 2
    assert total.selected == pytest.approx(sum(c.estimated_us for c in once))
    assert total.roofline < total.selected < total.xla


def test_the_transformer_step_runs_and_learns(monkeypatch):
    """At small sizes, accelerated as it is."""
    sizes = {"TOKENS": 16, "WIDTH": 32, "HEADS": 2, "HIDDEN": 64, "VOCABULARY": 48}
    for name, size in sizes.items():
        monkeypatch.setattr(transformer, name, size)
    shapes = {
        name: [dict(zip((1024, 4096, 32000, 3072), (32, 64, 48, 96), strict=True))[n] for n in x]
        for name, x in transformer._SHAPES.items()
    }
    params = {
        name: jnp.asarray(np.asarray(normal(*shape, seed=i)) * np.float32(shape[0] ** -0.5))
        for i, (name, shape) in enumerate(shapes.items())
    }
    x, labels = normal(16, 32, seed=len(shapes)), jnp.asarray(np.arange(16))
    monkeypatch.setattr(transformer, "_LEARNING_RATE", 0.1)
    plain = jax.jit(transformer.train_step)
    expected, before = plain(params, x, labels)
    got, value = jax.jit(accelerate(transformer.train_step))(params, x, labels)
    assert float(value) == pytest.approx(float(before), rel=1e-5)
    for name in params:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
    assert float(plain(got, x, labels)[1]) < float(before)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bars_are_as_long_as_times(encoding, assumed_gpu):
    calls = explain(
        accelerate(lambda x, w: x @ w),
        *(jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),) * 2,
        platform="cuda",
    )
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace", write_through=True)
    console = Console(file=out, width=100)
    console.print(estimates.bars("title", calls, console))
    text = out.buffer.getvalue().decode(encoding)
    full = "█" if encoding == "utf-8" else "#"
    lengths = {
        name: next(line for line in text.splitlines() if name in line).count(full)
        for name in ("selected", "XLA", "roofline")
    }
    (call,) = calls
    share = call.roofline_us / call.estimated_us
    # XLA runs the product.
    assert lengths["selected"] == lengths["XLA"] > 20
    assert lengths["roofline"] == pytest.approx(share * lengths["XLA"], abs=1)


def test_calls_without_estimate_have_dashes():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    calls = explain(accelerate(lambda x: jnp.tanh(x @ x)), x, platform="cpu")
    out = io.StringIO()
    console = Console(file=out, width=100)
    console.print(estimates.calls_table("", calls), estimates.bars("", calls, console))
    assert "tanh" in out.getvalue()
    assert not any(character in out.getvalue() for character in "█▏")
    assert estimates.totals(calls.calls) == (0, 0, 0, 0)


def test_a_picture_is_drawn(tmp_path, assumed_gpu):
    path = tmp_path / "estimates.png"
    demo.run_demo(2, None, Console(quiet=True), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_picture_without_matplotlib_is_refused_before_training(without, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_train", lambda *_: pytest.fail("trained"))
    with pytest.raises(ValueError, match="picture must be a file in a folder that exists, got"):
        demo.run_demo(2, None, Console(quiet=True), pathlib.Path("nowhere/a.png"))
    without("matplotlib")
    with pytest.raises(ModuleNotFoundError, match=r"matplotlib must .*'jax_tcgemm\[demo\]'"):
        demo.run_demo(2, None, Console(quiet=True), tmp_path / "a.png")


def test_a_switch_leaves_out_estimates(monkeypatch):
    monkeypatch.setenv("TCGEMM_IMPLEMENTATION", "xla")
    out = io.StringIO()
    result = demo.run_demo(2, None, Console(file=out, width=100))
    assert (result.accelerated, result.transformer) == (None, None)
    assert "No estimated times: a debug switch" in out.getvalue()


def test_says_which_extra_is_missing(without):
    without("sklearn")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax_tcgemm\[demo\]'"):
        demo.load_digits()


def test_refuses_too_few_steps():
    with pytest.raises(ValueError, match="steps must be at least 2, got steps=1"):
        demo.run_demo(1)
